"""The policy that looks ahead before it decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from zhixing.core.policy import Decision, Phase, Policy
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_leaves
from zhixing.errors import UserError
from zhixing.search import Copies, Game, SearchPlayer, numpy_generator, seat_to_move
from zhixing.search.players import draw, most_visited

if TYPE_CHECKING:
    from zhixing.envs.vector.base import VectorEnv
    from zhixing.envs.vector.step_buffers import Array
    from zhixing.search.tree import Evaluate


class SearchPolicy(Policy):
    """Takes the most visited action of a search; exploring, it draws one by the visits.

    What is seen of a game tells where it stands. Other tasks are copied as they stand: the policy must `bind_env` the
    environments that it acts in.
    """

    def __init__(
        self,
        spaces: Spaces,
        model: Game | Copies,
        evaluate: Evaluate,
        simulations: int,
        net: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        """`net` is what `evaluate` asks, if that has weights of this policy's own; `settings` are those of `search`."""
        super().__init__(spaces)
        self.model, self.net = model, net
        self.player = SearchPlayer(model, evaluate, simulations, **settings)
        self.envs: VectorEnv | None = None

    def bind_env(self, env: VectorEnv) -> None:
        if isinstance(self.model, Copies):
            if env.backend in ("native", "torch"):
                raise UserError(
                    f"{self.model.name} can't be searched with vector.backend={env.backend}; use serial or process"
                )
            self.envs = env

    def act(
        self, obs: Tree, hidden: Tree, mask: Tensor | None, phase: Phase, rng: torch.Generator, env_steps: int
    ) -> Decision:
        num = len(tree_leaves(obs)[0])
        if phase is Phase.RANDOM:
            return Decision(self.random_action(num, mask, rng))
        if isinstance(self.model, Copies):
            return Decision(torch.as_tensor(self._decide(self._copied(self.model, num), phase, rng), device=rng.device))
        seen = obs.cpu().numpy()  # [N,2,H,W,P]
        rows, seat = np.arange(num), seat_to_move(seen)
        action = np.zeros((num, self.spaces.num_agents), np.int64)  # who doesn't move may only do this
        action[rows, seat] = self._decide(self.model.from_obs(seen[rows, seat]), phase, rng)
        return Decision(torch.as_tensor(action, device=rng.device))

    def _decide(self, state: Array, phase: Phase, rng: torch.Generator) -> Array:
        chance = numpy_generator(rng)
        found = self.player.search(state, chance)
        return most_visited(found) if phase is Phase.EVAL else draw(found.visits, chance)

    def _copied(self, model: Copies, num: int) -> Array:
        if self.envs is None or self.envs.num_envs != num:
            watched = 0 if self.envs is None else self.envs.num_envs
            raise UserError(
                f"a search of {model.name} copies the environments as they stand, and needs more than what they show: "
                f"it acts in {num} and is bound to {watched}; call policy.bind_env(env) first"
            )
        return model.from_env(self.envs)
