"""Check that agents can share one team reward, the mean of their rewards."""

from __future__ import annotations

from torch import Tensor

from zhixing.core.spaces import Spaces
from zhixing.errors import UserError

MIN_REWARDED_STEPS = 10  # steps with rewards before agents are considered opposed


class TeamRewardChecker:
    """Rejects envs whose agents are opposed, because the mean of their rewards is meaningless.

    An env that declares `reward_kind` "opposed" is rejected by the constructor. If rewards are "individual", `check`
    rejects an env whose rewards sum to zero over the agents in each of the first `MIN_REWARDED_STEPS` steps with any
    reward. Other rewards that differ between agents, such as collected food, count as a team's.
    """

    def __init__(self, algorithm: str, spaces: Spaces) -> None:
        self.algorithm = algorithm
        self.undecided = spaces.reward_kind == "individual"
        self.rewarded_steps = 0
        if spaces.reward_kind == "opposed":
            raise self._error("the env declares them opposed")

    def check(self, reward: Tensor) -> None:
        """Check rewards `[...,A]`. Raise `UserError` if the agents are opposed."""
        if not self.undecided:
            return
        magnitude = reward.abs().sum(-1)
        rewarded = magnitude > 0
        zero_sum = reward.sum(-1).abs() <= 1e-5 * magnitude
        self.undecided = bool((zero_sum | ~rewarded).all())
        self.rewarded_steps += int(rewarded.sum())
        if self.undecided and self.rewarded_steps >= MIN_REWARDED_STEPS:
            raise self._error(f"they sum to zero in each of the first {self.rewarded_steps} steps with rewards")

    def _error(self, reason: str) -> UserError:
        return UserError(
            f"{self.algorithm} learns one value for the whole team, but the rewards of these agents are opposed: "
            f"{reason}. It supports shared rewards and rewards that can be averaged; use ippo, mappo, maddpg or idqn, "
            f"which learn from the reward of each agent"
        )
