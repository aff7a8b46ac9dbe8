"""How much the reliability tests try: little in every test run, much in `make soak`, which also collects counts."""

from __future__ import annotations

import json
import os
from typing import Any

EXAMPLES = int(os.environ.get("ZHIXING_EXAMPLES", "200"))  # inputs per file format
KILLS = int(os.environ.get("ZHIXING_KILLS", "4"))  # per run
LONG_STEPS = int(os.environ.get("ZHIXING_LONG_STEPS", "5000"))  # of the runs whose memory is measured
SOAK = "ZHIXING_COUNTS" in os.environ


def record(kind: str, **counts: Any) -> None:
    """Append counts to the file of `make soak`. Do nothing in other test runs."""
    if SOAK:
        with open(os.environ["ZHIXING_COUNTS"], "a") as file:
            file.write(json.dumps({"kind": kind, **counts}) + "\n")
