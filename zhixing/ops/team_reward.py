"""One reward for a whole team: the mean of its agents' rewards, where the agents are not opposed."""

from __future__ import annotations

from torch import Tensor

from zhixing.core.spaces import Spaces
from zhixing.errors import UserError

ENOUGH = 10  # steps with rewards that decide whether agents are opposed


class TeamRewardChecker:
    """Rejects environments whose agents are opposed: the mean of their rewards says nothing.

    Environments that declare `reward_kind` "opposed" are rejected at once. Where rewards are "individual", those that
    sum to zero over the agents in each of the first `ENOUGH` steps with any reward are rejected by `check`. Other
    rewards that differ, such as shares of food, are a team's.
    """

    def __init__(self, algorithm: str, spaces: Spaces) -> None:
        self.algorithm = algorithm
        self.undecided = spaces.reward_kind == "individual"
        self.seen = 0
        if spaces.reward_kind == "opposed":
            raise self._refusal("the environment declares them opposed")

    def check(self, reward: Tensor) -> None:
        """Look at rewards `[...,A]` of steps, until it is decided."""
        if not self.undecided:
            return
        size = reward.abs().sum(-1)
        paid = size > 0
        balanced = reward.sum(-1).abs() <= 1e-5 * size
        self.undecided = bool((balanced | ~paid).all())
        self.seen += int(paid.sum())
        if self.undecided and self.seen >= ENOUGH:
            raise self._refusal(f"they sum to zero in each of the first {self.seen} steps with rewards")

    def _refusal(self, reason: str) -> UserError:
        return UserError(
            f"{self.algorithm} learns one value for the whole team, and the rewards of these agents are opposed: "
            f"{reason}. It allows rewards that agents share or that can be averaged; use ippo, mappo, maddpg or idqn, "
            f"which learn from each agent's own reward"
        )
