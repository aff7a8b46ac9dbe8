"""Settings as people read and compare them."""

from __future__ import annotations

from typing import Any

# settings that change no return: runs that differ only in these are one configuration
IRRELEVANT = {"seed", "log_every_steps", "checkpoint_every_steps", "keep_checkpoints", "tensorboard"}
IRRELEVANT |= {"eval_video", "plot", "num_threads", "device", "vector.backend", "vector.workers"}


def shown(value: Any) -> str:
    """A setting's value as people write it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)
