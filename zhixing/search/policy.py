"""A policy that chooses actions by tree search."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from zhixing.core.policy import Decision, Phase, Policy
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_leaves
from zhixing.errors import UserError
from zhixing.search import BoardGame, EnvModel, SearchPlayer, numpy_generator
from zhixing.search.players import most_visited, sample_by_visits

if TYPE_CHECKING:
    from zhixing.envs.vector.base import VectorEnv
    from zhixing.envs.vector.step_buffers import Array
    from zhixing.search.tree import Evaluator


class SearchPolicy(Policy):
    """Take the most visited action of a search, or sample in proportion to visits when exploring.

    A game's observation determines its state. Other environments are copied, so call `bind_env` with the vector env
    that the policy acts in.
    """

    def __init__(
        self,
        spaces: Spaces,
        model: BoardGame | EnvModel,
        evaluate: Evaluator,
        simulations: int,
        net: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        """`net` is the network of `evaluate`, if it belongs to this policy. `settings` are passed to `search`."""
        super().__init__(spaces)
        if spaces.stack > 1 and not isinstance(model, EnvModel):
            raise UserError(
                f"searches of board games (mcts, alphazero) need single observations, not env.stack={spaces.stack}; "
                f"set env.stack=1"
            )
        self.model, self.net = model, net
        self.player = SearchPlayer(model, evaluate, simulations, **settings)
        self.env: VectorEnv | None = None

    def bind_env(self, env: VectorEnv) -> None:
        if isinstance(self.model, EnvModel):
            if env.backend in ("native", "torch"):
                raise UserError(
                    f"{self.model.name} can't be searched with vector.backend={env.backend}; use serial or process"
                )
            self.env = env

    def act(
        self, obs: Tree, hidden: Tree, mask: Tensor | None, phase: Phase, rng: torch.Generator, env_steps: int
    ) -> Decision:
        num_envs = len(tree_leaves(obs)[0])
        if phase is Phase.RANDOM:
            return Decision(self.random_action(num_envs, mask, rng))
        if isinstance(self.model, EnvModel):
            states = self._env_states(self.model, num_envs)
            return Decision(torch.as_tensor(self._choose(states, phase, rng), device=rng.device))
        boards = obs.cpu().numpy()  # [N,2,H,W,P]
        rows, (seat, states) = np.arange(num_envs), self.model.from_seat_obs(boards)
        action = np.zeros(
            (num_envs, self.spaces.num_agents), np.int64
        )  # 0 is the only legal action of the waiting seat
        action[rows, seat] = self._choose(states, phase, rng)
        return Decision(torch.as_tensor(action, device=rng.device))

    def _choose(self, state: Array, phase: Phase, rng: torch.Generator) -> Array:
        numpy_rng = numpy_generator(rng)
        result = self.player.search(state, numpy_rng)
        return most_visited(result) if phase is Phase.EVAL else sample_by_visits(result.visits, numpy_rng)

    def _env_states(self, model: EnvModel, num_envs: int) -> Array:
        if self.env is None or self.env.num_envs != num_envs:
            num_bound = 0 if self.env is None else self.env.num_envs
            raise UserError(
                f"a search of {model.name} copies its environments, so the policy must be bound to them: it acts in "
                f"{num_envs} and is bound to {num_bound}; call policy.bind_env(env) first"
            )
        return model.from_env(self.env)
