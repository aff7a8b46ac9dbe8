"""GAIL (Ho & Ermon, 2016).   max_D E_expert[log D(s, a)] + E_π[log(1 - D(s, a))],   reward of π: -log(1 - D(s, a))

A discriminator D is trained to distinguish the expert's steps from those of the policy, and PPO trains the policy on
the discriminator's rewards. The environment's rewards aren't used.
Differs from the paper: PPO instead of TRPO; a penalty keeps the gradient norm of the discriminator, between expert and
policy steps, close to 1 (Gulrajani et al., 2017), so its rewards still differ where it is certain.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zhixing.algorithms import compile_updates, register
from zhixing.algorithms.ppo import PPO, PPOConfig
from zhixing.config import Auto, Group, NonNegative, Positive, PositiveFloat
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner, LearnsFromDemonstrations, Update, mean_metrics, train_step
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.nets.heads import encode_action, num_outputs
from zhixing.nets.mlp import MLP
from zhixing.nets.torso import Encoder, NetFactory, num_features


class GAILConfig(PPOConfig):
    algorithm: str = "gail"
    dataset: Annotated[str | None, Group.COLLECTION] = None
    """Dataset of the expert's demonstrations."""
    demonstrations: Annotated[Positive | None, Group.COLLECTION] = 10
    """Number of expert episodes to use; none uses all."""
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
    """Learning rate of the discriminator, which has no schedule."""
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
    """`net(obs, action) -> logits [B]` of the probability that a step is the expert's."""

    def __init__(self, spaces: Spaces, cfg: GAILConfig) -> None:
        super().__init__()
        self.spaces = spaces
        self.encoder = Encoder(spaces.obs, cfg.net.cnn, normalize=True)
        inputs = num_features(self.encoder, spaces.obs) + num_outputs(spaces.layout)
        self.layers = MLP(inputs, [cfg.discriminator_size] * 2, "tanh", outputs=1)

    def features(self, obs: Tree, action: Tensor) -> Tensor:
        """Return steps as flat vectors: encoded observations, and actions one-hot or clipped to their bounds."""
        return torch.cat([self.encoder(obs), encode_action(action, self.spaces)], -1)

    def forward(self, obs: Tree, action: Tensor) -> Tensor:
        return self.layers(self.features(obs, action)).squeeze(-1)


@register("gail", "PPO with rewards from a discriminator that compares the policy with an expert")
class GAIL(Learner, LearnsFromDemonstrations):
    settings = GAILConfig
    metrics = (*PPO.metrics, "discriminator_loss", "discriminator_accuracy", "imitation_reward")

    def __init__(
        self, cfg: GAILConfig, spaces: Spaces, device: torch.device | str = "cpu", net: NetFactory | None = None
    ) -> None:
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        self.learner = compile_updates(PPO(cfg, spaces, device, net), cfg)
        self.policy = self.learner.policy
        with self.seeded_init():
            self.discriminator = Discriminator(spaces, cfg).to(self.device)
        self.discriminator_optimizer = self.make_optimizer(
            self.discriminator.parameters(), cfg.discriminator_lr, epsilon=1e-8, schedule="constant"
        )
        self.expert: Batch | None = None

    def set_demonstrations(self, demonstrations: Batch) -> None:
        self.expert = demonstrations.select(("obs", "action"))
        # only by the expert's steps: statistics that change with the policy would change the discriminator's inputs
        self.discriminator.encoder.update_norm(self.expert.obs)

    @train_step
    def discriminator_step(self, batch: Batch) -> Update:
        """Update the discriminator from steps of the policy `[B]` and as many of the expert."""
        expert = self.sample_steps(self.expert)
        real = self.discriminator.features(expert.obs, expert.action)
        fake = self.discriminator.features(batch.obs, batch.action)
        logits = self.discriminator.layers(torch.cat([real, fake])).squeeze(-1)
        labels = torch.cat([torch.ones(len(real)), torch.zeros(len(fake))]).to(self.device)
        penalty = self.gradient_penalty(real.detach(), fake.detach())
        loss = F.binary_cross_entropy_with_logits(logits, labels) + penalty
        self.discriminator_optimizer.step(loss)
        accuracy = ((logits > 0) == labels.bool()).float().mean()
        return Update({"discriminator_loss": loss, "discriminator_accuracy": accuracy})

    def gradient_penalty(self, real: Tensor, fake: Tensor) -> Tensor:
        """Return the penalty at random points between pairs of expert and policy steps."""
        if not self.cfg.gradient_penalty:
            return torch.zeros((), device=self.device)
        mix = torch.rand(len(real), 1, generator=self.rng, device=self.device)
        between = (mix * real + (1.0 - mix) * fake).requires_grad_()
        (gradient,) = torch.autograd.grad(self.discriminator.layers(between).sum(), between, create_graph=True)
        return self.cfg.gradient_penalty * (gradient.norm(dim=-1) - 1.0).square().mean()

    @torch.no_grad()
    def imitation_reward(self, batch: Batch) -> Tensor:
        """Return the discriminator's rewards of steps `[B]`."""
        logits = self.discriminator(batch.obs, batch.action)
        return F.softplus(logits) if self.cfg.imitation_reward == "gail" else logits

    def sample_steps(self, steps: Batch | None) -> Batch:
        """Return a random batch of the expert's or the policy's steps."""
        assert steps is not None, "set_demonstrations must be called before training"
        rows = torch.randint(len(steps), (self.cfg.discriminator_batch_size,), generator=self.rng, device=self.device)
        return steps[rows]

    def update(self, batch: Batch) -> Update:
        steps = batch.select(("obs", "action")).flatten()
        updates = [self.discriminator_step(self.sample_steps(steps)) for _ in range(self.cfg.discriminator_updates)]
        reward = self.imitation_reward(steps).view_as(batch.reward)
        update = self.learner.update(batch.replace(reward=reward))
        metrics = {**update.metrics, **mean_metrics(updates)}
        return Update({**metrics, "imitation_reward": reward.mean()})

    # --- methods that involve PPO ---

    @property
    def extra_fields(self) -> dict[str, Tree]:
        return self.learner.extra_fields

    def set_progress(self, fraction: float) -> None:
        self.learner.set_progress(fraction)

    def skipped_steps(self) -> int:
        return super().skipped_steps() + self.learner.skipped_steps()

    def load_networks(self, state: dict[str, Any]) -> None:
        """Load the networks of another run of gail, or of ppo."""
        super().load_networks(state)
        self.learner.load_networks(state.get("learner", state))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "learner": self.learner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.learner.load_state_dict(state["learner"])
