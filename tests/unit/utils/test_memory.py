"""What large tensors leave behind is used again, without asking the kernel for it page by page."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from zhixing.utils.memory import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
torch.set_num_threads(1)
x = torch.ones(12_000_000)  # 48 MB: beyond what malloc would learn to keep by itself
for i in range(60):
    if i == 20:  # it has found its places
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    (x + 1).sum()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep memory in their own ways")
def test_large_tensors_take_the_memory_of_those_before() -> None:
    """40 tensors of 12,000 pages of 4 kB each; where pages are larger, there are fewer of them.

    A tenth may come anew: malloc may still find another place for one, and a kernel may take back what lay idle.
    """

    def faults(how: str, **settings: str) -> int:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        command = [sys.executable, "-c", PROGRAM, how]
        return int(subprocess.run(command, env=clean | settings, capture_output=True, text=True, check=True).stdout)

    usual = faults("leave")
    assert usual > 800
    assert faults("keep") < usual / 10
    assert faults("keep", MALLOC_MMAP_THRESHOLD_="131072") > usual / 2  # somebody has decided otherwise
