"""How much the reliability tests try: a little in every test run, much in `make soak`, which also collects counts."""

from __future__ import annotations

import json
import os
from typing import Any

EXAMPLES = int(os.environ.get("ZHIXING_EXAMPLES", "200"))  # inputs per file format
KILLS = int(os.environ.get("ZHIXING_KILLS", "4"))  # per run
SOAKING = "ZHIXING_FIGURES" in os.environ
LONG_STEPS = int(os.environ.get("ZHIXING_LONG_STEPS", "5000"))  # of the runs whose memory is measured


def count(kind: str, **figures: Any) -> None:
    """Append counts to the file of `make soak`. Does nothing in other test runs."""
    if SOAKING:
        with open(os.environ["ZHIXING_FIGURES"], "a") as file:
            file.write(json.dumps({"kind": kind, **figures}) + "\n")
