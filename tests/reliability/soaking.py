"""How much is tried: a little in every test run, much in `make soak`, which also gathers what was counted."""

from __future__ import annotations

import json
import os
from typing import Any

EXAMPLES = int(os.environ.get("ZHIXING_EXAMPLES", "200"))  # inputs to each reader
KILLS = int(os.environ.get("ZHIXING_KILLS", "4"))  # of each run
SOAKING = "ZHIXING_FIGURES" in os.environ
LONG_STEPS = int(os.environ.get("ZHIXING_LONG_STEPS", "5000"))  # of the runs whose memory is watched


def count(kind: str, **figures: Any) -> None:
    """Tell the soak what was tried, where there is one."""
    if SOAKING:
        with open(os.environ["ZHIXING_FIGURES"], "a") as file:
            file.write(json.dumps({"kind": kind, **figures}) + "\n")
