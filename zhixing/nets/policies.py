"""Policies that act with a network: sample, take the mode, add noise, or take the action of highest value."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zhixing.core.policy import Decision, Phase, Policy, device_of
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_leaves, tree_map
from zhixing.nets.actor_critic import ActorCritic
from zhixing.nets.noisy import is_noisy, resample, zero_noise
from zhixing.nets.torso import example_obs


class ActorCriticPolicy(Policy):
    """Samples from a network's distribution; the best action is its mode, or with `eval_stochastic` a sample too."""

    def __init__(self, spaces: Spaces, net: ActorCritic, eval_stochastic: bool = False) -> None:
        super().__init__(spaces)
        self.net, self.eval_stochastic = net, eval_stochastic

    def initial_hidden(self, num: int) -> Tree:
        if not self.net.recurrent:
            return None
        return _zeros_like(self.net(example_obs(self.spaces.obs, device=device_of(self)), None).hidden, num)

    def act(
        self, obs: Tree, hidden: Tree, mask: Tensor | None, phase: Phase, rng: torch.Generator, env_steps: int
    ) -> Decision:
        distribution, value, hidden = self.net(obs, hidden, mask)
        if phase is Phase.RANDOM:
            action = self.random_action(len(value), mask, rng)
        else:
            best = phase is Phase.EVAL and not self.eval_stochastic
            action = distribution.mode() if best else distribution.sample(rng)
        return Decision(action, distribution.log_prob(action), value, hidden)


class StochasticPolicy(Policy):
    """Samples from `net(obs, mask) -> Distribution`; the best action is its mode. Without memory."""

    def __init__(self, spaces: Spaces, net: nn.Module) -> None:
        super().__init__(spaces)
        self.net = net

    def act(
        self, obs: Tree, hidden: Tree, mask: Tensor | None, phase: Phase, rng: torch.Generator, env_steps: int
    ) -> Decision:
        if phase is Phase.RANDOM:
            return Decision(self.random_action(len(tree_leaves(obs)[0]), mask, rng))
        distribution = self.net(obs, mask)
        return Decision(distribution.mode() if phase is Phase.EVAL else distribution.sample(rng))


class DeterministicPolicy(Policy):
    """`net(obs)` in [-1, 1], plus noise while collecting: independent normals, or an Ornstein-Uhlenbeck process.

    The process remembers where it was: that is this policy's hidden state, cleared like any at an episode's end.
    """

    def __init__(self, spaces: Spaces, net: nn.Module, noise: float, ou_theta: float | None = None) -> None:
        super().__init__(spaces)
        self.net, self.noise, self.ou_theta = net, noise, ou_theta

    def initial_hidden(self, num: int) -> Tree:
        return None if self.ou_theta is None else torch.zeros(num, self.spaces.num_actions, device=device_of(self))

    def act(
        self, obs: Tree, hidden: Tree, mask: Tensor | None, phase: Phase, rng: torch.Generator, env_steps: int
    ) -> Decision:
        if phase is Phase.RANDOM:
            return Decision(self.random_action(len(tree_leaves(obs)[0]), mask, rng), hidden=hidden)
        action = self.net(obs)
        if phase is Phase.EVAL:
            return Decision(action, hidden=hidden)
        kick = torch.empty_like(action).normal_(generator=rng) * self.noise
        if self.ou_theta is not None:
            kick = hidden = hidden * (1.0 - self.ou_theta) + kick
        return Decision((action + kick).clamp(-1.0, 1.0), hidden=hidden)


class GreedyPolicy(Policy):
    """The action of highest value, or with probability epsilon any allowed one.

    `net(obs, hidden) -> (q [N,n], hidden)`; `epsilon(env_steps)` is the chance of exploring. Noisy layers of the
    network explore too: they get new noise at each step, and none in evaluations.
    """

    def __init__(self, spaces: Spaces, net: nn.Module, epsilon: Callable[[int], float], eval_epsilon: float) -> None:
        super().__init__(spaces)
        self.net, self.epsilon, self.eval_epsilon = net, epsilon, eval_epsilon
        self.noisy = is_noisy(net)

    def initial_hidden(self, num: int) -> Tree:
        return _zeros_like(self.net(example_obs(self.spaces.obs, device=device_of(self)), None)[1], num)

    def act(
        self, obs: Tree, hidden: Tree, mask: Tensor | None, phase: Phase, rng: torch.Generator, env_steps: int
    ) -> Decision:
        if self.noisy and phase is Phase.COLLECT:
            resample(self.net, rng)
        elif self.noisy:
            zero_noise(self.net)
        q, hidden = self.net(obs, hidden)  # [N,n]
        num = q.shape[0]
        if phase is Phase.RANDOM:
            return Decision(self.random_action(num, mask, rng), hidden=hidden)
        best = (q if mask is None else q.masked_fill(~mask, -torch.inf)).argmax(-1)
        epsilon = self.eval_epsilon if phase is Phase.EVAL else self.epsilon(env_steps)
        if epsilon > 0:
            drawn = torch.rand(num, generator=rng, device=rng.device)
            # elsewhere than on the CPU asking costs more than an action
            if rng.device.type != "cpu" or min(drawn.tolist()) < epsilon:
                best = torch.where(drawn < epsilon, self.random_action(num, mask, rng), best)
        return Decision(best, hidden=hidden)


class ExpertMixturePolicy(Policy):
    """A student without memory, and somebody to ask: while collecting, the decision holds what the teacher would do, as
    `expert_action`, and with probability `share(env_steps)` that is done. Alone, and in evaluations, the student acts.
    """

    def __init__(self, student: Policy, share: Callable[[int], float]) -> None:
        super().__init__(student.spaces)
        self.student, self.share = student, share
        self.expert: list[Policy] = []  # in a list: its weights are no part of this policy's

    def initial_hidden(self, num: int) -> Tree:
        return self.expert[0].initial_hidden(num) if self.expert else None

    def act(
        self, obs: Tree, hidden: Tree, mask: Tensor | None, phase: Phase, rng: torch.Generator, env_steps: int
    ) -> Decision:
        action = self.student.act(obs, None, mask, Phase.EVAL, rng, env_steps).action
        if phase is Phase.EVAL or not self.expert:
            return Decision(action, hidden=hidden)
        asked = self.expert[0].act(obs, hidden, mask, Phase.EVAL, rng, env_steps)
        # a Gaussian's mean may lie beyond the bounds: label with the action that the environment would get
        expert_action = asked.action if self.spaces.discrete else asked.action.clamp(-1.0, 1.0)
        share = 1.0 if phase is Phase.RANDOM else self.share(env_steps)
        led = torch.rand(len(action), generator=rng, device=rng.device) < share
        taken = torch.where(led.view(-1, *[1] * (action.ndim - 1)), expert_action, action)
        return Decision(taken, hidden=asked.hidden, extras={"expert_action": expert_action})


def _zeros_like(hidden: Tree, num: int) -> Tree:
    if hidden is None:
        return None
    return tree_map(lambda leaf: leaf.detach().new_zeros(num, *leaf.shape[1:]), hidden)
