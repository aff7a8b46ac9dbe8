"""Output in Jupyter notebooks. Nothing here needs IPython, except inside a notebook."""

from __future__ import annotations

import html
import sys
from typing import Any


def in_notebook() -> bool:
    """Return whether this code runs in the kernel of a notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"  # not that of IPython in a terminal


class LiveOutput:
    """A progress bar and text below a notebook cell, which each update replaces."""

    def __init__(self) -> None:
        self._handle: Any = None

    def update(self, text: str, fraction: float) -> None:
        bar = f'<progress value="{fraction:.4f}" max="1" style="width: 100%"></progress>'
        bundle = {"text/plain": text, "text/html": f"{bar}<pre>{html.escape(text)}</pre>"}
        if self._handle is None:
            from IPython.display import display

            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)
