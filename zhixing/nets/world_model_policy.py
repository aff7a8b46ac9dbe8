"""Policy of an actor that acts on the state of a world model."""

from __future__ import annotations

import torch
from torch import Tensor

from zhixing.core.policy import Decision, Phase, Policy, device_of
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.nets.world_model import WorldModel, WorldModelActor, encode_action


class WorldModelPolicy(Policy):
    """Infers the state of the world model from observations and acts on it.

    The hidden state is `(h, z, a)`: the model's last state and the last action, which are zeros when an episode starts.
    """

    def __init__(self, spaces: Spaces, world: WorldModel, actor: WorldModelActor) -> None:
        super().__init__(spaces)
        self.world, self.actor = world, actor

    def initial_hidden(self, num: int) -> Tree:
        return self.world.rssm.initial_state(num, device_of(self))

    def act(
        self, obs: Tree, hidden: Tree, mask: Tensor | None, phase: Phase, rng: torch.Generator, env_steps: int
    ) -> Decision:
        state = self.world.infer_state(obs, hidden, None if phase is Phase.EVAL else rng)
        if phase is Phase.RANDOM:
            action = self.random_action(len(state.h), mask, rng)
        else:
            distribution = self.actor(state.features, mask)
            action = distribution.mode() if phase is Phase.EVAL else distribution.sample(rng)
        return Decision(action, hidden=(*state, encode_action(action, self.spaces)))
