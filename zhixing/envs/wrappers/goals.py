"""Find the functions of a goal environment that compute rewards and terminations for any pair of goals."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from zhixing.core.goals import GoalFunction
from zhixing.errors import UserError

if TYPE_CHECKING:
    from zhixing.envs.vector.process import ProcessVectorEnv
    from zhixing.envs.vector.serial import SerialVectorEnv

REWARD, TERMINATED = "compute_reward", "compute_terminated"


def find_goal_functions(env: Any) -> dict[str, GoalFunction]:
    """Return the methods `compute_reward` and `compute_terminated` by name, as far as a gymnasium.Env has them."""
    base = env.unwrapped
    return {name: getattr(base, name) for name in (REWARD, TERMINATED) if callable(getattr(base, name, None))}


def goal_functions(env: SerialVectorEnv | ProcessVectorEnv) -> tuple[GoalFunction, GoalFunction | None]:
    """Return the reward function of the first environment, and its termination function or None.

    They run in the process of that environment.
    """
    names = env.goal_functions()
    if REWARD not in names:
        raise UserError(
            f"replay.her needs a goal environment; {env.name} has no method "
            f"compute_reward(achieved_goal, desired_goal, info)"
        )
    return partial(env.compute, REWARD), partial(env.compute, TERMINATED) if TERMINATED in names else None
