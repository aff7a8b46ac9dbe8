"""Check users' torch tasks before a run uses them, and infer their spaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor

from zhixing.core.action_layout import is_composite
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Field
from zhixing.envs.torch_native.env import TorchEnv, Transition
from zhixing.envs.vector.backend_choice import random_action
from zhixing.errors import UserError

NUM_ENVS, STEPS = 3, 5  # of the trial
OPTIONAL_FIELDS = ("mask", "state", "alive")
TOLERANCE = 1e-4  # relative, of single precision; batches of different sizes round differently


def infer_spaces(task: TorchEnv, name: str, device: torch.device) -> Spaces:
    """Return the spaces of a task. Raise `UserError` if an attribute or a result is invalid."""
    checker = _TaskChecker(task, name, device)
    checker.check_attributes()
    spaces = checker.infer_spaces()
    checker.check_steps(spaces)
    return spaces


class _TaskChecker:
    def __init__(self, task: TorchEnv, name: str, device: torch.device) -> None:
        self.task, self.name, self.device = task, name, device

    def fail(self, problem: str, rule: str) -> NoReturn:
        raise UserError(f"{self.name}: {problem}; {rule}")

    def check_attributes(self) -> None:
        task, limit = self.task, getattr(self.task, "max_episode_steps", None)
        for attribute, kinds in (
            ("observation_space", (Box, Discrete, MultiDiscrete)),
            ("action_space", (Box, Discrete, MultiDiscrete)),
        ):
            space = getattr(task, attribute, None)
            if not isinstance(space, kinds):
                self.fail(f"{attribute} is {space}", "set it to a Box, Discrete or MultiDiscrete of gymnasium.spaces")
        if is_composite(task.action_space):
            self.fail(f"the action space is {task.action_space}", "set it to a Discrete or to one dimension")
        if isinstance(task.action_space, Box) and not task.action_space.is_bounded():
            self.fail(f"the action space {task.action_space} is unbounded", "set finite bounds")
        if not isinstance(limit, int) or limit == 0 or limit < -1:
            self.fail(f"max_episode_steps is {limit!r}", "set it to a positive number of steps, or -1 for no limit")

    def infer_spaces(self) -> Spaces:
        task = self.task
        state = self.initial_state(0)
        fields = self.observe(state)
        agents = () if task.num_agents == 1 else (task.num_agents,)
        spaces = Spaces(
            task.observation_space,
            task.action_space,
            task.num_agents,
            mask=fields["mask"].shape[-1] if "mask" in fields else None,
            state=fields["state"].shape[-1] if "state" in fields else None,
            alive="alive" in fields,
            reward_kind=task.reward_kind,
        )
        if not agents and ("state" in fields or "alive" in fields):
            self.fail(
                "observe() returned state or alive, but num_agents is 1", "only tasks of several agents have them"
            )
        if "mask" in fields and isinstance(task.action_space, Box):
            self.fail("observe() returned a mask, but actions are continuous", "return none")
        return spaces

    def check_steps(self, spaces: Spaces) -> None:
        """Take random steps. Check shapes, dtypes, that nothing is changed in place, and that rows are independent."""
        rows = slice(1, 2)
        if not torch.equal(self.initial_state(1), self.initial_state(1)):
            self.fail("initial_state() differs with the same generator", "draw all random numbers from rng")
        state = self.initial_state(2)
        spaces.action.seed(0)
        for _ in range(STEPS):
            fields = self.observe(state)
            self.check_fields(fields, spaces)
            action = self.sample_actions(fields, spaces)
            before = state.clone()
            transition = self.transition(state, action, spaces)
            if not torch.equal(before, state):
                self.fail("transition() changed the state in place", "return a new tensor")
            if not torch.equal(transition.state, self.transition(state, action, spaces).state):
                self.fail(
                    "transition() differs when it is repeated", "compute everything from the state and the action"
                )
            alone = self.transition(state[:, rows].contiguous(), action[rows], spaces)
            self.check_close(alone.state, transition.state[:, rows], "transition().state")
            self.check_close(alone.reward, transition.reward[rows], "transition().reward")
            self.check_close(self.observe(alone.state)["obs"], self.observe(transition.state)["obs"][rows], "obs")
            self.check_info(transition.state)
            state = transition.state

    def check_fields(self, fields: dict[str, Tensor], spaces: Spaces) -> None:
        expected: dict[str, Any] = {"obs": spaces.fields()["obs"], **spaces.extras()}
        if set(fields) != set(expected):
            self.fail(f"observe() returned {', '.join(fields)}", f"return always the same keys: {', '.join(expected)}")
        for key, field in expected.items():
            self.check_tensor(fields[key], field, f"observe()[{key!r}]")

    def check_tensor(self, tensor: Any, field: Field, what: str, num: int = NUM_ENVS) -> None:
        shape = (num, *field.shape)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
            actual = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            self.fail(f"{what} is {actual}", f"return a tensor of shape {shape}")
        kind = "f" if tensor.dtype.is_floating_point else "b" if tensor.dtype == torch.bool else "i"
        expected = field.dtype.kind.replace("u", "i")
        if kind != expected:
            names = {"f": "a floating-point dtype", "b": "dtype bool", "i": "an integer dtype"}
            self.fail(f"{what} has dtype {tensor.dtype}", f"return {names[expected]}")
        if tensor.device.type != self.device.type:
            self.fail(f"{what} is on {tensor.device}", f"create tensors on the device of the state, here {self.device}")
        if kind == "f" and not bool(tensor.isfinite().all()):
            self.fail(f"{what} contains NaN or Inf", "numbers must be finite")

    def check_close(self, alone: Tensor, together: Tensor, what: str) -> None:
        if not torch.allclose(alone.double(), together.double(), rtol=TOLERANCE, atol=TOLERANCE):
            self.fail(
                f"{what} of one environment depends on the others", "compute each environment from its own column"
            )

    def check_info(self, state: Tensor) -> None:
        info = self.call("info", lambda: self.task.info(state))
        missing = [key for key in self.task.logged_info_keys if key not in info]
        if missing:
            self.fail(f"info() has no {missing[0]}, which logged_info_keys lists", "return it")
        for key, values in info.items():
            if tuple(values.shape) != (NUM_ENVS,):
                self.fail(f"info()[{key!r}] has shape {tuple(values.shape)}", f"return a tensor of shape {(NUM_ENVS,)}")

    def sample_actions(self, fields: dict[str, Tensor], spaces: Spaces) -> Tensor:
        masks: Any = [None] * NUM_ENVS if spaces.mask is None else fields["mask"].cpu().numpy()
        actions = np.array([random_action(spaces, mask) for mask in masks])
        return torch.as_tensor(actions.astype(spaces.action.dtype), device=self.device)

    # --- calls of the task, with the type of their results checked ---

    def initial_state(self, seed: int) -> Tensor:
        rng = torch.Generator(self.device).manual_seed(seed)
        state = self.call("initial_state", lambda: self.task.initial_state(NUM_ENVS, rng))
        if not isinstance(state, Tensor) or state.ndim != 2 or state.shape[1] != NUM_ENVS:
            actual = tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__
            self.fail(f"initial_state({NUM_ENVS}, rng) is {actual}", f"return a tensor of shape (k, {NUM_ENVS})")
        return state

    def observe(self, state: Tensor) -> dict[str, Tensor]:
        fields = self.call("observe", lambda: self.task.observe(state))
        if not isinstance(fields, dict) or "obs" not in fields or set(fields) - {"obs", *OPTIONAL_FIELDS}:
            actual = ", ".join(fields) if isinstance(fields, dict) else type(fields).__name__
            self.fail(
                f"observe() returned {actual}", f"return a dict with obs, and optionally {', '.join(OPTIONAL_FIELDS)}"
            )
        return fields

    def transition(self, state: Tensor, action: Tensor, spaces: Spaces) -> Transition:
        result = self.call("transition", lambda: self.task.transition(state, action))
        if not isinstance(result, Transition):
            self.fail(f"transition() returned {type(result).__name__}", "return Transition(state, reward, terminated)")
        num = state.shape[1]
        if result.state.shape != state.shape or result.state.dtype != state.dtype:
            actual, expected = ((tuple(s.shape), str(s.dtype)) for s in (result.state, state))
            self.fail(f"transition().state is {actual}", f"its shape and dtype must stay {expected}")
        self.check_tensor(result.reward, Field(spaces.agents, np.dtype(np.float32)), "transition().reward", num)
        self.check_tensor(result.terminated, Field((), np.dtype(bool)), "transition().terminated", num)
        return result

    def call(self, method: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except UserError:
            raise
        except Exception as error:
            self.fail(f"{method}() raised {type(error).__name__}: {error}", "see zhixing.envs.torch_native.TorchEnv")
