"""GAIL (Ho & Ermon, 2016).   max_D E_expert[log D(s, a)] + E_π[log(1 - D(s, a))],   π is paid -log(1 - D(s, a))

A discriminator learns to tell an expert's steps from the policy's; the policy learns by PPO to be taken for the expert.
The task's own rewards are never looked at. The discriminator's slope between both kinds of steps is held near 1
(Gulrajani et al., 2017), so that it stays a guide even where it could be certain.
Differs from the paper: PPO instead of TRPO, and the gradient penalty.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor, nn
from torch.nn import functional as F

from zhixing.algorithms import register, with_graphs
from zhixing.algorithms.ppo import (
    PPO,  # what it is handed: any learner from rollouts would do
    PPOConfig,
)
from zhixing.config import Auto, Group, NonNegative, Positive, PositiveFloat
from zhixing.core.batch import Batch
from zhixing.core.learner import Gradients, Learner, Update
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.nets.mlp import MLP
from zhixing.nets.torso import Encoder, NetFactory, num_features


class GAILConfig(PPOConfig):
    dataset: Annotated[str | None, Group.COLLECTION] = None
    """Dataset of the expert's demonstrations."""
    demonstrations: Annotated[Positive | None, Group.COLLECTION] = 10
    """Number of expert episodes to use; none is all."""
    lr: PositiveFloat = 1e-3
    """Learning rate of the policy."""
    optimizer_eps: PositiveFloat = 1e-5
    """Epsilon of the policy's Adam, added to the denominator."""
    rollout_steps: Positive = 32
    minibatch_size: Positive = 256
    normalize_obs: bool | Auto = False
    normalize_reward: bool = False
    """Divide imitation rewards by the running standard deviation of returns."""
    discriminator_lr: PositiveFloat = 1e-3
    """Learning rate of the discriminator."""
    discriminator_size: Annotated[Positive, Group.NETWORK] = 100
    """Units of each of the discriminator's two hidden layers."""
    discriminator_updates: Positive = 16
    """Discriminator updates per iteration."""
    discriminator_batch_size: Positive = 256
    """Expert steps, and as many policy steps, per discriminator update."""
    gradient_penalty: NonNegative = 0.1
    """Weight of the penalty that keeps the norm of the discriminator's gradient near 1."""
    imitation_reward: Literal["gail", "airl"] = "gail"
    """Imitation reward: gail is -log(1 - D), never negative; airl is log D - log(1 - D)."""

    needs_data: ClassVar[bool] = True


class Discriminator(nn.Module):
    """`net(obs, action) -> logits [B]` that a step is the expert's."""

    def __init__(self, spaces: Spaces, cfg: GAILConfig) -> None:
        super().__init__()
        self.space = spaces.action
        self.encoder = Encoder(spaces.obs, cfg.net.cnn, normalize=True)
        sizes = self.space.nvec.reshape(-1).tolist() if isinstance(self.space, MultiDiscrete) else []
        self.sizes = [int(self.space.n)] if isinstance(self.space, Discrete) else sizes
        actions = sum(self.sizes) if self.sizes else spaces.num_actions
        inputs = num_features(self.encoder, spaces.obs) + actions
        self.layers = MLP(inputs, [cfg.discriminator_size] * 2, "tanh", outputs=1)

    def features(self, obs: Tree, action: Tensor) -> Tensor:
        if isinstance(self.space, Box):
            shown = action.clamp(-1.0, 1.0) if self.space.is_bounded() else action
        else:
            choices = action.view(len(action), -1).unbind(-1)
            shown = torch.cat([F.one_hot(c, n).float() for c, n in zip(choices, self.sizes, strict=True)], -1)
        return torch.cat([self.encoder(obs), shown], -1)

    def forward(self, obs: Tree, action: Tensor) -> Tensor:
        return self.layers(self.features(obs, action)).squeeze(-1)


@register("gail", "PPO paid for being taken for an expert")
class GAIL(Learner):
    settings = GAILConfig
    metrics = (*PPO.metrics, "discriminator_loss", "discriminator_accuracy", "imitation_reward")

    def __init__(
        self, cfg: GAILConfig, spaces: Spaces, device: torch.device | str = "cpu", net: NetFactory | None = None
    ) -> None:
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        self.learner = with_graphs(PPO(cfg, spaces, device, net), cfg)
        self.policy = self.learner.policy
        with self.building():
            self.discriminator = Discriminator(spaces, cfg).to(self.device)
        self.discriminator_optimizer = self.make_optimizer(
            self.discriminator.parameters(), cfg.discriminator_lr, epsilon=1e-8
        )
        self.expert: Batch | None = None

    def show(self, demonstrations: Batch) -> None:
        self.expert = demonstrations.select(("obs", "action"))
        # of the expert alone: the policy's own steps must not move what the discriminator sees
        self.discriminator.encoder.update_norm(self.expert.obs)

    # --- the discriminator ---

    def gradients(self, batch: Batch) -> Gradients:
        """Of the discriminator, from as many steps of the policy `[B]` as of the expert."""
        expert = self._drawn(self.expert)
        real = self.discriminator.features(expert.obs, expert.action)
        own = self.discriminator.features(batch.obs, batch.action)
        logits = self.discriminator.layers(torch.cat([real, own])).squeeze(-1)
        labels = torch.cat([torch.ones(len(real)), torch.zeros(len(own))]).to(self.device)
        loss = F.binary_cross_entropy_with_logits(logits, labels) + self._penalty(real.detach(), own.detach())
        metrics = {
            "discriminator_loss": loss.detach(),
            "discriminator_accuracy": ((logits > 0) == labels.bool()).float().mean(),
        }
        return Gradients({"discriminator_optimizer": self.discriminator_optimizer.gradient(loss)}, metrics)

    def _penalty(self, real: Tensor, own: Tensor) -> Tensor:
        if not self.cfg.gradient_penalty:
            return torch.zeros((), device=self.device)
        share = torch.rand(len(real), 1, generator=self.rng, device=self.device)
        between = (share * real + (1.0 - share) * own).requires_grad_()
        (slope,) = torch.autograd.grad(self.discriminator.layers(between).sum(), between, create_graph=True)
        return self.cfg.gradient_penalty * (slope.norm(dim=-1) - 1.0).square().mean()

    @torch.no_grad()
    def imitation_reward(self, batch: Batch) -> Tensor:
        """What steps `[B]` are paid for looking like the expert's."""
        logits = self.discriminator(batch.obs, batch.action)
        return F.softplus(logits) if self.cfg.imitation_reward == "gail" else logits

    def _drawn(self, steps: Batch | None) -> Batch:
        assert steps is not None, "an expert must be shown before learning"
        rows = torch.randint(len(steps), (self.cfg.discriminator_batch_size,), generator=self.rng, device=self.device)
        return steps[rows]

    # --- the update ---

    def update(self, batch: Batch) -> Update:
        own = batch.select(("obs", "action")).flatten()
        told = [self.descend(self.gradients, self._drawn(own)).metrics for _ in range(self.cfg.discriminator_updates)]
        reward = self.imitation_reward(own).view_as(batch.reward)
        update = self.learner.update(batch.replace(reward=reward))
        metrics = {name: torch.stack([one[name] for one in told]).mean() for name in told[0] if name != "grad_norm"}
        return Update({**update.metrics, **metrics, "imitation_reward": reward.mean()})

    # --- what the learner inside gives ---

    @property
    def fields(self) -> dict[str, Tree]:
        return self.learner.fields

    def set_progress(self, fraction: float) -> None:
        self.learner.set_progress(fraction)

    def skipped_steps(self) -> int:
        return super().skipped_steps() + self.learner.skipped_steps()

    def load_networks(self, state: dict[str, Any]) -> None:
        """Of another run of gail, or of the policy's own algorithm."""
        super().load_networks(state)
        self.learner.load_networks(state.get("learner", state))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "learner": self.learner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.learner.load_state_dict(state["learner"])
