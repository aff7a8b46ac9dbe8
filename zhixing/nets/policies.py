"""Policies that act with a network: sample, take the mode, add noise, or take the action with the highest value."""

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
    """Samples from an actor-critic's distribution; takes its mode in evaluations unless `eval_stochastic`."""

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
            use_mode = phase is Phase.EVAL and not self.eval_stochastic
            action = distribution.mode() if use_mode else distribution.sample(rng)
        return Decision(action, distribution.log_prob(action), value, hidden)


class StochasticPolicy(Policy):
    """Samples from `net(obs, mask) -> Distribution`; takes its mode in evaluations. Not recurrent."""

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
    """Takes the action `net(obs)` in [-1, 1] and adds Gaussian or Ornstein-Uhlenbeck noise while collecting.

    The state of the Ornstein-Uhlenbeck process is the hidden state of the policy, so it is reset with each episode.
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
        noise = torch.empty_like(action).normal_(generator=rng) * self.noise
        if self.ou_theta is not None:
            noise = hidden = hidden * (1.0 - self.ou_theta) + noise
        return Decision((action + noise).clamp(-1.0, 1.0), hidden=hidden)


class GreedyPolicy(Policy):
    """Takes the action with the highest Q-value, or with probability epsilon a random valid action.

    `net(obs, hidden) -> (q [N,n], hidden)`; `epsilon(env_steps)` is the exploration rate. Noisy layers get new noise at
    every step, and none in evaluations.
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
        action = (q if mask is None else q.masked_fill(~mask, -torch.inf)).argmax(-1)
        epsilon = self.eval_epsilon if phase is Phase.EVAL else self.epsilon(env_steps)
        if epsilon > 0:
            uniform = torch.rand(num, generator=rng, device=rng.device)
            # skip the random actions if none is needed; on an accelerator the check would cost more than it saves
            if rng.device.type != "cpu" or min(uniform.tolist()) < epsilon:
                action = torch.where(uniform < epsilon, self.random_action(num, mask, rng), action)
        return Decision(action, hidden=hidden)


class ExpertMixturePolicy(Policy):
    """Collects with a mixture of a student and an expert, as DAgger does.

    While collecting, each decision stores the expert's action as `expert_action`, and the expert acts with probability
    `beta(env_steps)`. In evaluations, and without an expert, the student acts. The student is not recurrent.
    """

    def __init__(self, student: Policy, beta: Callable[[int], float]) -> None:
        super().__init__(student.spaces)
        self.student, self.beta = student, beta
        self.expert: list[Policy] = []  # at most one; in a list, so its weights are not saved with this policy

    def initial_hidden(self, num: int) -> Tree:
        return self.expert[0].initial_hidden(num) if self.expert else None

    def act(
        self, obs: Tree, hidden: Tree, mask: Tensor | None, phase: Phase, rng: torch.Generator, env_steps: int
    ) -> Decision:
        action = self.student.act(obs, None, mask, Phase.EVAL, rng, env_steps).action
        if phase is Phase.EVAL or not self.expert:
            return Decision(action, hidden=hidden)
        decision = self.expert[0].act(obs, hidden, mask, Phase.EVAL, rng, env_steps)
        # the mean of a Gaussian may be out of bounds: store the action that the env would get
        expert_action = self.clip_action(decision.action)
        beta = 1.0 if phase is Phase.RANDOM else self.beta(env_steps)
        use_expert = torch.rand(len(action), generator=rng, device=rng.device) < beta
        action = torch.where(use_expert.view(-1, *[1] * (action.ndim - 1)), expert_action, action)
        return Decision(action, hidden=decision.hidden, extras={"expert_action": expert_action})


def _zeros_like(hidden: Tree, num: int) -> Tree:
    if hidden is None:
        return None
    return tree_map(lambda leaf: leaf.detach().new_zeros(num, *leaf.shape[1:]), hidden)
