"""After `keep_freed_memory`, large tensors reuse freed memory instead of new pages from the kernel."""

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
x = torch.ones(12_000_000)  # 48 MB: larger than what malloc keeps by default
for i in range(60):
    if i == 20:  # after a warm-up
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    (x + 1).sum()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="sets options of glibc")
def test_large_tensors_reuse_freed_memory() -> None:
    """Count page faults of 40 tensors with 12,000 pages of 4 kB each; larger pages mean fewer faults.

    A tenth of the faults may remain: malloc may choose another place for a tensor, and the kernel may reclaim pages.
    """

    def count_page_faults(mode: str, **variables: str) -> int:
        env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        command = [sys.executable, "-c", PROGRAM, mode]
        return int(subprocess.run(command, env=env | variables, capture_output=True, text=True, check=True).stdout)

    default = count_page_faults("default")
    assert default > 800
    assert count_page_faults("keep") < default / 10
    assert count_page_faults("keep", MALLOC_MMAP_THRESHOLD_="131072") > default / 2  # settings of the user win
