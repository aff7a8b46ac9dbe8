"""Policies of several agents that act simultaneously, each on its own observation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zhixing.core.policy import Decision, Phase, Policy
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_leaves
from zhixing.nets.multi_agent import MultiAgentNet
from zhixing.ops.distributions import Categorical, Distribution


class MultiAgentPolicy(Policy):
    """Base of policies that act with a `MultiAgentNet`.

    The hidden state holds the state of the networks' RNN and, if the networks use it, each agent's last action.
    """

    def __init__(self, spaces: Spaces, net: MultiAgentNet) -> None:
        super().__init__(spaces)
        self.net = net

    def initial_hidden(self, num: int) -> Tree:
        return self.net.initial_hidden(num)

    def run_net(self, obs: Tree, hidden: Tree) -> tuple[Tensor, Tree]:
        """Return the networks' outputs for observations `[N,A,...]`, and the next RNN state."""
        rnn_state, last_action = self.net.split_hidden(hidden)
        return self.net(self.net.build_inputs(obs, last_action), rnn_state)

    def next_hidden(self, rnn_state: Tree, action: Tensor) -> Tree:
        return self.net.join_hidden(rnn_state, self.net.encode_action(action))


class MultiAgentGreedyPolicy(MultiAgentPolicy):
    """Each agent takes its action with the highest Q-value, or with probability epsilon a random valid action."""

    def __init__(
        self, spaces: Spaces, net: MultiAgentNet, epsilon: Callable[[int], float], eval_epsilon: float
    ) -> None:
        super().__init__(spaces, net)
        self.epsilon, self.eval_epsilon = epsilon, eval_epsilon

    def act(
        self, obs: Tree, hidden: Tree, mask: Tensor | None, phase: Phase, rng: torch.Generator, env_steps: int
    ) -> Decision:
        q, rnn_state = self.run_net(obs, hidden)  # [N,A,n]
        greedy = (q if mask is None else q.masked_fill(~mask, -torch.inf)).argmax(-1)
        epsilon = self.eval_epsilon if phase is Phase.EVAL else self.epsilon(env_steps)
        if phase is Phase.RANDOM:
            action = self.random_action(len(q), mask, rng)
        elif epsilon == 0:
            action = greedy
        else:
            random = self.random_action(len(q), mask, rng)
            explore = torch.rand(greedy.shape, generator=rng, device=rng.device) < epsilon
            action = torch.where(explore, random, greedy)
        return Decision(action, hidden=self.next_hidden(rnn_state, action))


class MultiAgentStochasticPolicy(MultiAgentPolicy):
    """Each agent samples from its own distribution; takes its mode in evaluations unless `eval_stochastic`.

    `distribution(net outputs, mask)` makes the distributions. Agents that must coordinate can need `eval_stochastic`:
    if the most likely action of each is to wait for the other, the modes never make progress.
    """

    def __init__(
        self,
        spaces: Spaces,
        net: MultiAgentNet,
        distribution: Callable[[Tensor, Tensor | None], Distribution],
        eval_stochastic: bool,
    ) -> None:
        super().__init__(spaces, net)
        self.distribution, self.eval_stochastic = distribution, eval_stochastic

    def act(
        self, obs: Tree, hidden: Tree, mask: Tensor | None, phase: Phase, rng: torch.Generator, env_steps: int
    ) -> Decision:
        out, rnn_state = self.run_net(obs, hidden)
        distribution = self.distribution(out, mask)
        if phase is Phase.RANDOM:
            action = self.random_action(len(out), mask, rng)
        else:
            use_mode = phase is Phase.EVAL and not self.eval_stochastic
            action = distribution.mode() if use_mode else distribution.sample(rng)
        return Decision(action, distribution.log_prob(action), hidden=self.next_hidden(rnn_state, action))


class MultiAgentActorPolicy(Policy):
    """Acts with one actor per agent, `net(obs [N,A,...]) -> [N,A,n]`. Not recurrent.

    Discrete actions are sampled from the softmax of the outputs. Continuous actions are the tanh of the outputs plus
    Gaussian noise. Evaluations take the most likely action, or the action without noise.
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
            distribution = Categorical(out, mask)
            return Decision(distribution.mode() if phase is Phase.EVAL else distribution.sample(rng))
        action = out.tanh()
        if phase is Phase.EVAL:
            return Decision(action)
        noise = torch.empty_like(action).normal_(generator=rng) * self.noise
        return Decision((action + noise).clamp(-1.0, 1.0))
