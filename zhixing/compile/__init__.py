"""`compile=true`: the train steps of a learner as compiled graphs, traced once, compiled once and cached on disk."""

from __future__ import annotations

from zhixing.compile.compiler import cache_folder, check_compiler
from zhixing.compile.updates import CompiledUpdates

__all__ = ["CompiledUpdates", "cache_folder", "check_compiler"]
