"""PQN (Gallici et al., 2024).   G = r + γ (1 - terminated) [λ G' + (1 - λ) max_a Q(s', a)],   L = E[½ (G - Q(s, a))²]

Q-learning on rollouts of many environments, without replay and without a target network. Layer normalization keeps it
stable. G, of which G' is that of the next step, is computed once per rollout; several epochs of minibatches follow. At
a truncated step and at the end of the rollout, G = r + γ max_a Q(s', a). Actions are epsilon-greedy.
Differs from the paper: Adam instead of RAdam; layer normalization of the fully connected layers only, without learned
weights; recurrent networks start from the hidden states of the rollout.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn

from zhixing.algorithms import register
from zhixing.config import (
    EpsilonGreedyConfig,
    Fraction,
    Group,
    NetConfig,
    OnPolicyConfig,
    Positive,
    PositiveFloat,
    Schedule,
)
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner, Update, mean_metrics, train_step
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_map
from zhixing.nets.actor_critic import episode_starts, torso_features
from zhixing.nets.policies import GreedyPolicy
from zhixing.nets.qnet import QNet, check_discrete, epsilon_at
from zhixing.nets.torso import NetFactory, hidden_fields
from zhixing.ops.distributions import gather_actions, mask_logits
from zhixing.ops.policy_gradient import minibatches
from zhixing.ops.returns import gae, next_values, rollout_boundary


class PQNConfig(OnPolicyConfig, EpsilonGreedyConfig):
    algorithm: str = "pqn"
    num_envs: Positive = 32
    rollout_steps: Positive = 32
    lr: PositiveFloat = 5e-4
    lr_schedule: Schedule = "linear"
    epochs: Positive = 2
    """Passes over each rollout."""
    minibatch_size: Positive = 128
    """Maximum steps per minibatch; the rollout is split evenly."""
    max_grad_norm: PositiveFloat | None = 10.0
    td_lambda: Fraction = 0.65
    """Lambda of the targets; 0 bootstraps after every step, 1 at the end of the rollout or the episode."""
    layer_norm: Annotated[bool, Group.NETWORK] = True
    """Apply layer normalization before each activation; net.kind=simba always has it."""
    normalize_obs: bool = False
    """Normalize observations by their running mean and standard deviation; the default is true with net.kind=simba."""
    net: NetConfig = NetConfig(hidden_sizes=[128, 128], activation="relu")


@register("pqn", "Q-learning on rollouts of many environments, with layer normalization, without replay or targets")
class PQN(Learner):
    settings = PQNConfig
    metrics = ("loss", "q_mean", "grad_norm")

    def __init__(
        self, cfg: PQNConfig, spaces: Spaces, device: torch.device | str = "cpu", net: NetFactory | None = None
    ) -> None:
        check_discrete(cfg, spaces)
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        with self.seeded_init():
            self.net = QNet(spaces, cfg.net, net, nn.Linear, normalize=cfg.normalize_obs, layer_norm=cfg.layer_norm).to(
                self.device
            )
        self.optimizer = self.make_optimizer(self.net.parameters(), cfg.lr, max_grad_norm=cfg.max_grad_norm)
        self.policy = GreedyPolicy(spaces, self.net, partial(epsilon_at, cfg), cfg.eval_epsilon)

    @property
    def extra_fields(self) -> dict[str, Tree]:
        return {"hidden": hidden_fields(self.policy.initial_hidden(1))} if self.net.recurrent else {}

    def value(self, obs: Tree) -> Tensor:
        return self.net(obs)[0].amax(-1)

    def q_values(self, batch: Batch) -> Tensor:
        """Return the values of all actions for `[B]`, or for recurrent networks `[T,N]`."""
        return self.net.head(torso_features(self.net.torso, batch, batch.hidden if self.net.recurrent else None))

    def final_value(self, batch: Batch, rows: Tensor) -> Tensor:
        """Return max_a Q of the next observation of each step where `rows [T,N]` is true."""
        next_obs = tree_map(lambda leaf: leaf[rows], batch.next_obs)
        hidden = None
        if self.net.recurrent:
            obs, hidden = (tree_map(lambda leaf: leaf[rows], tree) for tree in (batch.obs, batch.hidden))
            hidden = self.net(obs, hidden)[1]
        mask = batch.next_mask[rows] if "next_mask" in batch else None
        return mask_logits(self.net(next_obs, hidden)[0], mask).amax(-1)

    @torch.no_grad()
    def add_targets(self, batch: Batch) -> Batch:
        """Return the fields of a rollout `[T,N]` that updates read, with the targets `returns`."""
        fields = {name: getattr(batch, name) for name in ("obs", "action", "mask") if name in batch}
        if self.net.recurrent:
            fields |= {"hidden": batch.hidden, "is_first": episode_starts(batch)}
        data = Batch(**fields)
        q = self.q_values(data if self.net.recurrent else data.flatten())
        value = mask_logits(q.view(*batch.reward.shape, -1), batch.get("mask")).amax(-1)
        boundary = rollout_boundary(batch)
        next_value = next_values(value, boundary, self.final_value(batch, boundary))
        # with V = max_a Q, the λ-return is V plus the generalized advantage
        ends = batch.terminated, batch.truncated
        advantage = gae(batch.reward, value, next_value, *ends, self.cfg.gamma, self.cfg.td_lambda)
        return Batch(**fields, returns=value + advantage)

    @train_step
    def gradient_step(self, batch: Batch) -> Update:
        """Update from a minibatch: `[B]`, or `[T,n]` for recurrent networks."""
        q = gather_actions(self.q_values(batch), batch.action)
        loss = 0.5 * (batch.returns - q).square().mean()
        return Update({"loss": loss, "q_mean": q.detach().mean(), "grad_norm": self.optimizer.step(loss)})

    def update(self, batch: Batch) -> Update:
        data = self.add_targets(batch)
        updates = [
            self.gradient_step(minibatch)
            for _ in range(self.cfg.epochs)
            for minibatch in minibatches(data, self.cfg.minibatch_size, self.rng, self.net.recurrent)
        ]
        self.net.update_norm(batch.obs)  # after the epochs, so their inputs are those of the targets
        return Update(mean_metrics(updates))
