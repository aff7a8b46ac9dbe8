"""Checks of settings that several algorithms share."""

from __future__ import annotations

from zhixing.config import OffPolicyConfig
from zhixing.errors import UserError


def check_plain_replay(cfg: OffPolicyConfig, reason: str) -> None:
    """Reject prioritized replay, n-step returns and HER. `reason` says why the algorithm doesn't support them."""
    for name, required in (("prioritized", False), ("n_step", 1), ("her", False)):
        value = getattr(cfg.replay, name)
        if value != required:
            raise UserError(
                f"{cfg.algorithm} {reason} and does not support replay.{name}={str(value).lower()}; "
                f"set replay.{name}={str(required).lower()}"
            )
