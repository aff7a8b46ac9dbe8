"""CrossQ (Bhatt et al., 2024).   y = r + γ^k (1 - terminated) (min_i Q_i(s', a') - α log π(a'|s')),   a' ~ π(s')

SAC without target networks. The critics have batch renormalization and evaluate (s, a) and (s', a') in one forward
pass, so both are normalized by the statistics of the joint batch: the actions of a' differ from those of the replay
buffer, and separate batches would be normalized differently. y has no gradient. The actor has batch renormalization,
too. Adam has β₁ = 0.5, and an actor update follows every third critic update.
Differs from the paper: the critics have 1,024 units per layer by default instead of 2,048, which takes a quarter of the
time; observations of Dict spaces and images are encoded before the normalization; the loss of the temperature is linear
in log α, and its Adam has the same β₁.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from zhixing.algorithms import register
from zhixing.config import Beta, Count, Finite, Group, NetConfig, OffPolicyConfig, Positive, PositiveFloat
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner, Update, train_step
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_map
from zhixing.nets.batch_norm import BatchNormTowers
from zhixing.nets.critics import EncoderModule, check_box, squashed_gaussian
from zhixing.nets.policies import StochasticPolicy
from zhixing.nets.simba import make_mlp
from zhixing.nets.torso import NetFactory
from zhixing.ops.distributions import SquashedGaussian
from zhixing.ops.losses import weighted_mean
from zhixing.ops.returns import td_target


class CrossQConfig(OffPolicyConfig):
    algorithm: str = "crossq"
    lr: PositiveFloat = 1e-3
    actor_lr: PositiveFloat | None = None
    """Learning rate of the actor; none uses lr."""
    optimizer_betas: list[Beta] = Field([0.5, 0.999], min_length=2, max_length=2)
    batch_size: Positive = 256
    net: NetConfig = NetConfig(hidden_sizes=[256, 256], activation="relu")
    critics: Annotated[Positive, Group.NETWORK] = 2
    """Number of critics; targets use the smallest estimate."""
    critic_hidden_sizes: Annotated[list[Positive] | None, Group.NETWORK] = Field([1024, 1024])
    """Units of the critics' fully connected layers or residual blocks; none uses net.hidden_sizes."""
    renorm_warmup: Annotated[Count, Group.NETWORK] = 100_000
    """Updates with plain batch normalization before batch renormalization begins to correct it."""
    alpha: PositiveFloat | None = None
    """Entropy coefficient; none learns it."""
    target_entropy: Finite | None = None
    """Target entropy of a learned alpha; none is -n for n action dimensions."""
    policy_delay: Positive = 3
    """Critic updates per actor update."""


class CrossQCritics(EncoderModule):
    """K estimates of Q with batch renormalization: `net(obs, action, train) -> [K,B]`."""

    def __init__(self, spaces: Spaces, cfg: CrossQConfig, make_net: NetFactory | None) -> None:
        super().__init__(spaces, cfg, make_net)
        inputs, sizes = self.num_features + spaces.num_actions, cfg.critic_hidden_sizes
        networks = [make_mlp(cfg.net, inputs, 1, hidden_sizes=sizes) for _ in range(cfg.critics)]
        self.towers = BatchNormTowers(networks, cfg.renorm_warmup)

    def forward(self, obs: Tree, action: Tensor, train: bool = False) -> Tensor:
        return self.towers(torch.cat([self.features(obs), action], -1), train).squeeze(-1)


class CrossQActor(EncoderModule):
    """`net(obs, mask, train)` returns a tanh-squashed Gaussian, from a network with batch renormalization."""

    def __init__(self, spaces: Spaces, cfg: CrossQConfig, make_net: NetFactory | None) -> None:
        super().__init__(spaces, cfg, make_net)
        self.tower = BatchNormTowers([make_mlp(cfg.net, self.num_features, 2 * spaces.num_actions)], cfg.renorm_warmup)

    def forward(self, obs: Tree, mask: Tensor | None = None, train: bool = False) -> SquashedGaussian:
        return squashed_gaussian(self.tower(self.features(obs), train).squeeze(0))


@register("crossq", "SAC without target networks, with batch renormalization and wide critics")
class CrossQ(Learner):
    settings = CrossQConfig
    metrics = ("critic_loss", "actor_loss", "q_mean", "alpha", "entropy", "grad_norm")

    def __init__(
        self, cfg: CrossQConfig, spaces: Spaces, device: torch.device | str = "cpu", net: NetFactory | None = None
    ) -> None:
        check_box(spaces, cfg.algorithm)
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        with self.seeded_init():
            self.actor = CrossQActor(spaces, cfg, net).to(self.device)
            self.critics = CrossQCritics(spaces, cfg, net).to(self.device)
        self.log_alpha = nn.ParameterList([torch.tensor(math.log(cfg.alpha or 1.0), device=self.device)])
        self.actor_optimizer = self.make_optimizer(self.actor.parameters(), cfg.actor_lr or cfg.lr)
        self.critic_optimizer = self.make_optimizer(self.critics.parameters(), cfg.lr)
        self.alpha_optimizer = self.make_optimizer(self.log_alpha.parameters(), cfg.lr, weight_decay=0.0)
        self.policy = StochasticPolicy(spaces, self.actor)
        self.last_actor_loss = self.last_entropy = torch.zeros((), device=self.device)  # reported with policy_delay

    @property
    def alpha(self) -> Tensor:
        return self.log_alpha[0].exp()

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, the absolute TD errors `[B]` and the mean value. Updates the critics' running statistics."""
        with torch.no_grad():
            next_action, next_logp = self.actor(batch.next_obs).sample_with_logp(self.rng)
        obs = tree_map(lambda *leaves: torch.cat(leaves), batch.obs, batch.next_obs)
        joint_q = self.critics(obs, torch.cat([batch.action, next_action]), train=True)  # [K,2B]
        q, next_q = joint_q.chunk(2, 1)
        target = td_target(batch, (next_q.amin(0) - self.alpha * next_logp).detach())
        td_error = q - target
        loss = weighted_mean(0.5 * td_error.square().sum(0), batch)
        return loss, td_error.detach().abs().mean(0), q.detach().mean()

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss and the mean entropy of the policy. Updates the actor's running statistics."""
        action, logp = self.actor(batch.obs, train=True).sample_with_logp(self.rng)
        q = self.critics(batch.obs, action).amin(0)
        return (self.alpha.detach() * logp - q).mean(), -logp.detach().mean()

    def alpha_loss(self, entropy: Tensor) -> Tensor:
        target = -float(self.spaces.num_actions) if self.cfg.target_entropy is None else self.cfg.target_entropy
        return self.log_alpha[0] * (entropy - target)

    @train_step
    def update(self, batch: Batch) -> Update:
        critic_loss, td_error, q_mean = self.critic_loss(batch)
        grad_norm = self.critic_optimizer.step(critic_loss)
        if self.updates % self.cfg.policy_delay == 0:
            actor_loss, entropy = self.actor_loss(batch)  # uses the critics just updated
            self.actor_optimizer.step(actor_loss)
            if self.cfg.alpha is None:
                self.alpha_optimizer.step(self.alpha_loss(entropy))
            self.last_actor_loss, self.last_entropy = actor_loss.detach(), entropy
        metrics = {"critic_loss": critic_loss, "actor_loss": self.last_actor_loss, "q_mean": q_mean}
        metrics |= {"alpha": self.alpha, "entropy": self.last_entropy, "grad_norm": grad_norm}
        return Update(metrics, td_error)

    def value(self, obs: Tree) -> Tensor:
        return self.critics(obs, self.actor(obs).mode()).amin(0)
