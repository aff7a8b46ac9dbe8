"""Policies of several agents that decide at the same time, each by what it sees itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zhixing.core.policy import Decision, Phase, Policy
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_leaves
from zhixing.nets.multi_agent import MultiAgentNet
from zhixing.ops.distributions import Categorical, Distribution


class TeamPolicy(Policy):
    """Carries what the agents remember: the memory of their networks, and what they did last, where they see it."""

    def __init__(self, spaces: Spaces, net: MultiAgentNet) -> None:
        super().__init__(spaces)
        self.net = net

    def initial_hidden(self, num: int) -> Tree:
        return self.net.initial_hidden(num)

    def look(self, obs: Tree, hidden: Tree) -> tuple[Tensor, Tree]:
        """What the network says of observations `[N,A,...]`, and its memory afterwards."""
        memory, last_action = self.net.split_hidden(hidden)
        return self.net(self.net.build_inputs(obs, last_action), memory)

    def remember(self, memory: Tree, action: Tensor) -> Tree:
        return self.net.join_hidden(memory, self.net.encode_action(action))


class TeamGreedyPolicy(TeamPolicy):
    """Each agent's action of highest value, or with probability epsilon any that is allowed to it."""

    def __init__(
        self, spaces: Spaces, net: MultiAgentNet, epsilon: Callable[[int], float], eval_epsilon: float
    ) -> None:
        super().__init__(spaces, net)
        self.epsilon, self.eval_epsilon = epsilon, eval_epsilon

    def act(
        self, obs: Tree, hidden: Tree, mask: Tensor | None, phase: Phase, rng: torch.Generator, env_steps: int
    ) -> Decision:
        q, memory = self.look(obs, hidden)  # [N,A,n]
        best = (q if mask is None else q.masked_fill(~mask, -torch.inf)).argmax(-1)
        epsilon = self.eval_epsilon if phase is Phase.EVAL else self.epsilon(env_steps)
        if phase is Phase.RANDOM:
            action = self.random_action(len(q), mask, rng)
        elif epsilon == 0:
            action = best
        else:
            random = self.random_action(len(q), mask, rng)
            explore = torch.rand(best.shape, generator=rng, device=rng.device) < epsilon
            action = torch.where(explore, random, best)
        return Decision(action, hidden=self.remember(memory, action))


class TeamSampledPolicy(TeamPolicy):
    """Each agent samples from its own distribution, made by `distribution(what the network says, mask)`."""

    def __init__(
        self,
        spaces: Spaces,
        net: MultiAgentNet,
        distribution: Callable[[Tensor, Tensor | None], Distribution],
        eval_stochastic: bool,
    ) -> None:
        """`eval_stochastic` draws actions in evaluations too: where agents must do something at the same time, the
        likeliest action of each may be to wait for the other for ever."""
        super().__init__(spaces, net)
        self.distribution, self.eval_stochastic = distribution, eval_stochastic

    def act(
        self, obs: Tree, hidden: Tree, mask: Tensor | None, phase: Phase, rng: torch.Generator, env_steps: int
    ) -> Decision:
        out, memory = self.look(obs, hidden)
        chances = self.distribution(out, mask)
        if phase is Phase.RANDOM:
            action = self.random_action(len(out), mask, rng)
        else:
            best = phase is Phase.EVAL and not self.eval_stochastic
            action = chances.mode() if best else chances.sample(rng)
        return Decision(action, chances.log_prob(action), hidden=self.remember(memory, action))


class TeamActorPolicy(Policy):
    """Each agent's own actor, `net(obs) -> [N,A,n]`, without memory.

    Choices are drawn from the softmax of its logits; continuous actions are its tanh, plus normal noise. The best is
    the likeliest choice, or the action without noise.
    """

    def __init__(self, spaces: Spaces, net: nn.Module, noise: float) -> None:
        super().__init__(spaces)
        self.net, self.noise = net, noise

    def act(
        self, obs: Tree, hidden: Tree, mask: Tensor | None, phase: Phase, rng: torch.Generator, env_steps: int
    ) -> Decision:
        if phase is Phase.RANDOM:
            return Decision(self.random_action(len(tree_leaves(obs)[0]), mask, rng))
        out = self.net(obs)
        if self.spaces.discrete:
            chances = Categorical(out, mask)
            return Decision(chances.mode() if phase is Phase.EVAL else chances.sample(rng))
        action = out.tanh()
        if phase is Phase.EVAL:
            return Decision(action)
        noise = torch.empty_like(action).normal_(generator=rng) * self.noise
        return Decision((action + noise).clamp(-1.0, 1.0))
