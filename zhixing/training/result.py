"""The result of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, overload

from zhixing.utils import tables

Text = Literal["algorithm", "env"]
Number = Literal["seed", "env_steps", "updates"]
Optional = Literal["final_return", "best_return", "stop_return", "seconds_to_stop"]


class RunResult(dict[str, Any]):
    """The content of a run's result.json. Every function that takes a run also takes its result."""

    def __init__(self, values: Mapping[str, Any], run: Path) -> None:
        """`run` is the run's folder."""
        super().__init__(values)
        self.run = run

    @overload
    def __getitem__(self, key: Text) -> str: ...
    @overload
    def __getitem__(self, key: Number) -> int: ...
    @overload
    def __getitem__(self, key: Literal["seconds", "steps_per_second"]) -> float: ...
    @overload
    def __getitem__(self, key: Optional) -> float | None: ...
    @overload
    def __getitem__(self, key: Literal["reached"]) -> bool: ...
    @overload
    def __getitem__(self, key: Literal["env_steps_to_stop"]) -> int | None: ...
    @overload
    def __getitem__(self, key: str) -> Any: ...
    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)

    def __fspath__(self) -> str:
        return str(self.run)

    def _repr_html_(self) -> str:
        known = {"run": self.run, **{key: value for key, value in self.items() if value is not None}}
        return tables.html_table([{"": key.replace("_", " "), "result": value} for key, value in known.items()])
