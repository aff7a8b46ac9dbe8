"""Checks of settings that several algorithms share."""

from __future__ import annotations

from zhixing.config import OffPolicyConfig
from zhixing.errors import UserError


def check_plain_replay(cfg: OffPolicyConfig, reason: str) -> None:
    """Raise `UserError` if prioritized replay, n-step returns or HER are set, which `reason` rules out."""
    for name, required in (("prioritized", False), ("n_step", 1), ("her", False)):
        if getattr(cfg.replay, name) != required:
            raise UserError(f"{cfg.algorithm} {reason}: set replay.{name}={str(required).lower()}")
