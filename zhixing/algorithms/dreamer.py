"""DreamerV3 (Hafner et al., 2023).   world: E[-log p(x, r, c | s) + β_dyn KL(sg(q), p) + β_rep KL(q, sg(p))]
behavior, in imagination:   ∇ = E[∇ log π(a|s) (R - V(s)) / max(1, S) + η ∇H],   R = r + γ c ((1 - λ) V(s') + λ R')

A world model is trained on sequences of the replay buffer. Actor and critic are trained on rollouts that the model
imagines from every state of these sequences. S is a moving average of the range of imagined returns. If the environment
masks actions, the model predicts the mask, which restricts the actor in imagination.
Differs from the paper: the reward r and the continuation c of a step are predicted from the recurrent state after its
action, not from the state of the next observation, so the last observation of an episode isn't needed; every sequence
starts with a zero recurrent state; the optimizer is Adam with gradients clipped by norm.
"""

from __future__ import annotations

import copy
from typing import Annotated, Literal

import torch
from pydantic import model_validator
from torch import Tensor

from zhixing.algorithms import register
from zhixing.algorithms.common.checks import check_plain_replay
from zhixing.config import (
    EntropyBonusConfig,
    Fraction,
    Group,
    NetConfig,
    NonNegative,
    OffPolicyConfig,
    Positive,
    PositiveFloat,
    ReplayConfig,
)
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner, Update, train_step
from zhixing.core.optimizer import TargetUpdater
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, flatten_time, time_major, tree_leaves
from zhixing.errors import UserError
from zhixing.nets.critics import check_box
from zhixing.nets.rssm import RSSMState
from zhixing.nets.torso import NetFactory
from zhixing.nets.world_model import (
    ImaginedRollout,
    TwoHotHead,
    WorldModel,
    WorldModelActor,
    discrete_sizes,
    encode_action,
)
from zhixing.nets.world_model_policy import WorldModelPolicy
from zhixing.ops.imagination import balanced_kl, discount_weights, lambda_returns, percentile_range
from zhixing.ops.symlog import two_hot, two_hot_loss

RETURN_RANGE_RATE = 0.01  # rate of the moving average of the range of returns


class DreamerConfig(OffPolicyConfig, EntropyBonusConfig):
    algorithm: str = "dreamer"
    batch_size: Positive = 16
    """Sequences per update."""
    updates_per_step: PositiveFloat = 0.25
    lr: PositiveFloat = 3e-4
    """Learning rate of the world model."""
    actor_lr: PositiveFloat | None = None
    """Learning rate of the actor; none uses lr."""
    critic_lr: PositiveFloat | None = None
    """Learning rate of the critic; none uses lr."""
    optimizer_eps: PositiveFloat = 1e-8
    """Epsilon of the world model's Adam, added to the denominator."""
    behavior_optimizer_eps: PositiveFloat = 1e-5
    """Epsilon of the actor's and the critic's Adam, added to the denominator."""
    max_grad_norm: PositiveFloat | None = 100.0
    """Maximum norm of the gradients; none disables clipping."""
    gamma: Fraction = 0.997
    horizon: Positive = 15
    """Imagined steps from each state."""
    td_lambda: Fraction = 0.95
    """Lambda of the imagined lambda-returns."""
    entropy_coef: NonNegative = 3e-4
    """Weight of the entropy bonus, relative to returns scaled to a range of 1."""
    tau: Fraction = 0.02
    """Polyak coefficient of the slow critic, which regularizes the critic."""
    memory_size: Annotated[Positive, Group.NETWORK] = 64
    """Units of the world model's recurrent state."""
    variables: Annotated[Positive, Group.NETWORK] = 8
    """Number of categorical variables in the stochastic state."""
    classes: Annotated[Positive, Group.NETWORK] = 8
    """Classes per categorical variable of the stochastic state."""
    uniform_mix: Annotated[Fraction, Group.NETWORK] = 0.01
    """Fraction of the uniform distribution mixed into latent variables and discrete actions."""
    free_nats: NonNegative = 1.0
    """KL divergence between posterior and prior, in nats, below which it is not penalized."""
    dynamics_coef: NonNegative = 0.5
    """Weight of the dynamics loss, which trains the prior to predict the posterior."""
    representation_coef: NonNegative = 0.1
    """Weight of the representation loss, which pulls the posterior toward the prior."""
    cnn_depth: Annotated[Positive, Group.NETWORK] = 16
    """Channels of the first convolution; each following layer doubles them."""
    bins: Annotated[Positive, Group.NETWORK] = 127
    """Odd number of bins in the distributions of rewards and values."""
    net: NetConfig = NetConfig(hidden_sizes=[64, 64], activation="silu", cnn="simple")
    replay: ReplayConfig = ReplayConfig(sequence_length=16, burn_in=0)

    @model_validator(mode="after")
    def _check_bins(self) -> DreamerConfig:
        if self.bins % 2 == 0 or self.bins < 3:
            raise ValueError(f"bins={self.bins} must be odd and at least 3, because bins are symmetric around 0")
        return self


@register("dreamer", "DreamerV3: a world model and an actor-critic trained in imagination")
class Dreamer(Learner):
    settings = DreamerConfig
    metrics = (
        *("reconstruction_loss", "reward_loss", "continue_loss", "kl"),
        *("actor_loss", "critic_loss", "imagined_return", "return_range", "entropy", "grad_norm"),
    )

    def __init__(
        self, cfg: DreamerConfig, spaces: Spaces, device: torch.device | str = "cpu", net: NetFactory | None = None
    ) -> None:
        _check(cfg, spaces, net)
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        sizes = {"hidden_size": cfg.memory_size, "variables": cfg.variables, "classes": cfg.classes}
        sizes |= {"depth": cfg.cnn_depth, "bins": cfg.bins}
        with self.seeded_init():
            self.world = WorldModel(spaces, cfg.net, uniform_mix=cfg.uniform_mix, **sizes).to(self.device)
            features = self.world.rssm.num_features
            self.actor = WorldModelActor(features, spaces, cfg.net, cfg.uniform_mix).to(self.device)
            self.critic = TwoHotHead(features, cfg.net, cfg.bins).to(self.device)
        self.world_optimizer = self.make_optimizer(self.world.parameters(), cfg.lr, max_grad_norm=cfg.max_grad_norm)
        settings = {"max_grad_norm": cfg.max_grad_norm, "epsilon": cfg.behavior_optimizer_eps}
        self.actor_optimizer = self.make_optimizer(self.actor.parameters(), cfg.actor_lr or cfg.lr, **settings)
        self.critic_optimizer = self.make_optimizer(self.critic.parameters(), cfg.critic_lr or cfg.lr, **settings)
        self.entropy_coef = self.make_coefficient("entropy_coef", cfg.entropy_coef, cfg.entropy_coef_schedule)
        self.slow_critic = copy.deepcopy(self.critic)
        self.target_updater = TargetUpdater((self.slow_critic, self.critic))
        self.return_range = torch.zeros((), device=self.device)
        self.policy = WorldModelPolicy(spaces, self.world, self.actor)

    @property
    def sample_type(self) -> Literal["sequences"]:
        return "sequences"

    def world_loss(self, batch: Batch) -> tuple[Tensor, RSSMState, dict[str, Tensor]]:
        """Return the loss of sequences `[B,T]`, their states `[N]` and metrics."""
        cfg, world = self.cfg, self.world
        obs, action, is_first = time_major((batch.obs, batch.action, batch.is_first))
        obs_tensors = world.preprocessor(flatten_time(obs))
        uniform_noise = world.rssm.uniform_noise(is_first.shape, self.rng)
        embedded = world.encoder(obs_tensors).unflatten(0, is_first.shape)
        observed = world.rssm.observe(embedded, encode_action(action, self.spaces), is_first, uniform_noise)
        burn_in = cfg.replay.burn_in  # steps that only warm up the recurrent state
        state = RSSMState(*flatten_time(tuple(part[burn_in:] for part in observed.state)))
        next_h, posterior, prior = flatten_time(tuple(part[burn_in:] for part in observed[1:]))
        obs_tensors = obs_tensors.drop_first(burn_in * len(batch))
        names = [name for name in ("reward", "terminated", "mask") if name in batch]
        targets = flatten_time(time_major({name: getattr(batch, name)[:, burn_in:] for name in names}))
        losses = world.prediction_losses(state, next_h, obs_tensors, **targets)
        dynamics, representation = balanced_kl(posterior, prior, cfg.free_nats)
        kl = cfg.dynamics_coef * dynamics.mean() + cfg.representation_coef * representation.mean()
        metrics = {name: loss.detach() for name, loss in losses.items()} | {"kl": dynamics.detach().mean()}
        return sum(losses.values(), kl), state.detach(), metrics

    def critic_loss(self, imagined: ImaginedRollout) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, and the imagined returns and values `[H,N]`."""
        logits = self.critic(imagined.features)
        value = self.critic.mean(logits.detach())
        discount = self.cfg.gamma * imagined.continue_prob
        returns = lambda_returns(imagined.reward, discount, value, self.cfg.td_lambda)
        with torch.no_grad():  # the slow critic's value is a second target, which regularizes the critic
            slow = self.slow_critic.mean(self.slow_critic(imagined.features[:-1]))
            targets = two_hot(returns, self.critic.bins) + two_hot(slow, self.critic.bins)
        return (two_hot_loss(logits[:-1], targets) * discount_weights(discount)).mean(), returns, value[:-1]

    def actor_loss(self, imagined: ImaginedRollout, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the mean entropy of the policy."""
        policy = self.actor(imagined.features[:-1], imagined.mask)
        entropy = policy.entropy()
        gain = policy.log_prob(imagined.action) * advantage + self.entropy_coef * entropy
        return -(gain * discount_weights(self.cfg.gamma * imagined.continue_prob)).mean(), entropy.detach().mean()

    @train_step
    def update(self, batch: Batch) -> Update:
        world_loss, state, metrics = self.world_loss(batch)
        imagined = self.world.imagine(state, self.actor, self.cfg.horizon, self.rng)
        critic_loss, returns, value = self.critic_loss(imagined)
        self.return_range = torch.lerp(self.return_range, percentile_range(returns), RETURN_RANGE_RATE)
        actor_loss, entropy = self.actor_loss(imagined, (returns - value) / self.return_range.clamp_min(1.0))
        grad_norm = self.world_optimizer.step(world_loss)  # all losses use the old weights, as in the authors' code
        self.actor_optimizer.step(actor_loss)
        self.critic_optimizer.step(critic_loss)
        self.target_updater.polyak_update(self.cfg.tau)
        metrics |= {"actor_loss": actor_loss, "critic_loss": critic_loss, "entropy": entropy, "grad_norm": grad_norm}
        return Update({**metrics, "imagined_return": returns.mean(), "return_range": self.return_range})

    def value(self, obs: Tree) -> Tensor:
        """Return the values of first observations of episodes."""
        hidden = self.policy.initial_hidden(len(tree_leaves(obs)[0]))
        return self.critic.mean(self.critic(self.world.infer_state(obs, hidden, None).features))

    def dream_frames(self, batch: Batch) -> Tensor | None:
        """Return videos of sequences `[B,T]`: see `WorldModel.compare_videos`. None if observations have no images."""
        return self.world.compare_videos(*time_major((batch.obs, batch.action, batch.is_first)))


def _check(cfg: DreamerConfig, spaces: Spaces, net: NetFactory | None) -> None:
    """Raise `UserError` for settings that a world model doesn't support."""
    if spaces.composite or not discrete_sizes(spaces):
        check_box(spaces, cfg.algorithm)
    if net is not None or cfg.net.kind != "auto" or cfg.net.cnn != "simple":
        raise UserError(f"{cfg.algorithm} supports only built-in networks: set net.kind=auto and net.cnn=simple")
    if cfg.net.recurrent != "none":
        raise UserError(f"{cfg.algorithm} has a built-in recurrent state: set net.recurrent=none")
    if cfg.normalize_obs:
        raise UserError(f"{cfg.algorithm} scales observations by symlog: set normalize_obs=false")
    check_plain_replay(cfg, "learns from sequences")
