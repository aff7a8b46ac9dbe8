"""`compile=true`: the update of a learner as one compiled graph. Recorded once, compiled once, kept on disk."""

from __future__ import annotations

from zhixing.compile.compiler import cache_folder, check_compiler
from zhixing.compile.updates import Graphs

__all__ = ["Graphs", "cache_folder", "check_compiler"]
