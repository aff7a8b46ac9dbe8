"""Functions of environments with goals: the reward, or the end, of any pair of goals."""

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
    """Return those of the two functions that a gymnasium.Env has, by name."""
    task = env.unwrapped
    return {name: getattr(task, name) for name in (REWARD, TERMINATED) if callable(getattr(task, name, None))}


def goal_functions(env: SerialVectorEnv | ProcessVectorEnv) -> tuple[GoalFunction, GoalFunction | None]:
    """Return the reward function of the first environment and, where it has one, its termination function. They are
    called in the process that the environment lives in."""
    names = env.goal_functions()
    if REWARD not in names:
        raise UserError(
            f"replay.her needs a task with goals; {env.name} has no method "
            f"compute_reward(achieved_goal, desired_goal, info)"
        )
    return partial(env.compute, REWARD), partial(env.compute, TERMINATED) if TERMINATED in names else None
