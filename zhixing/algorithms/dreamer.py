"""DreamerV3 (Hafner et al., 2023).   world: E[-log p(x, r, c | s) + β_dyn KL(sg(q), p) + β_rep KL(q, sg(p))]
behaviour, in imagination:   ∇ = E[∇ log π(a|s) (R - V(s)) / max(1, S) + η ∇H],   R = r + γ c ((1 - λ) V(s') + λ R')

A model of the world is learned from sequences of the replay; actor and critic learn from what it imagines from every
state of these sequences on. S is a slow average of the range of imagined returns.
Differs from the paper: reward r and continuation c of a step are told of the memory after its action, not of the state
that is seen then, so that ends of episodes need no observation of their own (the chance to go on times the future of
those that did is the future); every sequence begins with an empty memory; Adam with gradients clipped by their norm.
Where a task forbids actions, the model learns which, and the actor keeps to them in imagination, too.
"""

from __future__ import annotations

import copy
from typing import Annotated, Literal

import torch
from pydantic import model_validator
from torch import Tensor
from torch.nn import functional as F

from zhixing.algorithms import register
from zhixing.algorithms.common.world_model_policy import WorldModelPolicy
from zhixing.config import (
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
from zhixing.core.learner import Gradients, Learner, Update
from zhixing.core.optimizer import Average
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_leaves
from zhixing.errors import UserError
from zhixing.nets.critics import check_box
from zhixing.nets.rssm import RSSMState
from zhixing.nets.torso import NetFactory
from zhixing.nets.world_model import (
    ImaginedRollout,
    TwoHotHead,
    WorldModel,
    WorldModelActor,
    encode_action,
    flatten_time,
    time_major,
)
from zhixing.ops.imagination import balanced_kl, discount_weights, lambda_returns, percentile_range
from zhixing.ops.symlog import two_hot, two_hot_loss

RANGE_RATE = 0.01  # how far the scale of returns moves towards that of the newest
SHOWN = 5  # steps of an episode that a dream is shown


class DreamerConfig(OffPolicyConfig):
    batch_size: Positive = 16
    """Sequences per update."""
    updates_per_step: PositiveFloat = 0.25
    lr: PositiveFloat = 3e-4
    """Learning rate of the world model."""
    actor_lr: PositiveFloat | None = None
    """Learning rate of the actor; none is lr."""
    critic_lr: PositiveFloat | None = None
    """Learning rate of the critic; none is lr."""
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
    def _bins_have_a_middle(self) -> DreamerConfig:
        if self.bins % 2 == 0 or self.bins < 3:
            raise ValueError(f"bins={self.bins}: one is 0, the others mirror each other: use an odd number from 3 on")
        return self


@register("dreamer", "a world model from the replay, and an actor that learns in imagination (DreamerV3)")
class Dreamer(Learner):
    settings = DreamerConfig
    metrics = (
        "reconstruction_loss",
        "reward_loss",
        "continue_loss",
        "kl",
        "actor_loss",
        "critic_loss",
        "imagined_return",
        "return_range",
        "entropy",
        "grad_norm",
    )

    def __init__(
        self, cfg: DreamerConfig, spaces: Spaces, device: torch.device | str = "cpu", net: NetFactory | None = None
    ) -> None:
        _check(cfg, spaces, net)
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        sizes = {"hidden_size": cfg.memory_size, "variables": cfg.variables, "classes": cfg.classes}
        with self.building():
            self.world = WorldModel(
                spaces, cfg.net, **sizes, uniform_mix=cfg.uniform_mix, depth=cfg.cnn_depth, bins=cfg.bins
            ).to(self.device)
            features = self.world.rssm.num_features
            self.actor = WorldModelActor(features, spaces, cfg.net, cfg.uniform_mix).to(self.device)
            self.critic = TwoHotHead(features, cfg.net, cfg.bins).to(self.device)
        clip = cfg.max_grad_norm
        self.world_optimizer = self.make_optimizer(self.world.parameters(), cfg.lr, max_grad_norm=clip)
        behaviour = {"max_grad_norm": clip, "epsilon": cfg.behavior_optimizer_eps}
        self.actor_optimizer = self.make_optimizer(self.actor.parameters(), cfg.actor_lr or cfg.lr, **behaviour)
        self.critic_optimizer = self.make_optimizer(self.critic.parameters(), cfg.critic_lr or cfg.lr, **behaviour)
        self.slow_critic = copy.deepcopy(self.critic)
        self.follow = Average(self.slow_critic, self.critic)
        self.return_range = torch.zeros((), device=self.device)
        self.policy = WorldModelPolicy(spaces, self.world, self.actor)

    @property
    def reads(self) -> Literal["sequences"]:
        return "sequences"

    # --- the world ---

    def world_loss(self, batch: Batch) -> tuple[Tensor, RSSMState, dict[str, Tensor]]:
        """Of sequences `[B,T]`; also returns the states `[N]` that they passed, and what there is to tell."""
        cfg, world = self.cfg, self.world
        obs, action, is_first = time_major((batch.obs, batch.action, batch.is_first))
        sight = world.preprocessor(flatten_time(obs))
        uniform_noise = world.rssm.uniform_noise(is_first.shape, self.rng)
        embedded = world.encoder(sight).unflatten(0, is_first.shape)
        seen = world.rssm.observe(embedded, encode_action(action, self.spaces), is_first, uniform_noise)
        warm = cfg.replay.burn_in  # steps that only warm up the memory
        state = RSSMState(*flatten_time(tuple(part[warm:] for part in seen.state)))
        after, posterior, prior = flatten_time(tuple(part[warm:] for part in seen[1:]))
        reward, terminated = flatten_time(time_major((batch.reward[:, warm:], batch.terminated[:, warm:])))
        shown = world.decoder.loss(state.features, sight.drop_first(warm * len(batch.reward))).mean()
        if world.mask_head is not None:
            mask = flatten_time(time_major(batch.mask[:, warm:])).float()
            shown += F.binary_cross_entropy_with_logits(world.mask_head(state.features), mask) * mask.shape[-1]
        dynamics, representation = balanced_kl(posterior, prior, cfg.free_nats)
        losses = {
            "reconstruction_loss": shown,
            "reward_loss": two_hot_loss(world.reward_head(after), two_hot(reward, world.reward_head.bins)).mean(),
            "continue_loss": F.binary_cross_entropy_with_logits(world.continue_logits(after), (~terminated).float()),
        }
        kl = cfg.dynamics_coef * dynamics.mean() + cfg.representation_coef * representation.mean()
        told = {name: loss.detach() for name, loss in losses.items()} | {"kl": dynamics.detach().mean()}
        return sum(losses.values(), kl), state.detach(), told

    # --- behaviour ---

    def critic_loss(self, imagined: ImaginedRollout) -> tuple[Tensor, Tensor, Tensor]:
        """Also returns the imagined returns and values `[H,N]`."""
        logits = self.critic(imagined.features)
        value = self.critic.mean(logits.detach())
        discount = self.cfg.gamma * imagined.continue_prob
        returns = lambda_returns(imagined.reward, discount, value, self.cfg.td_lambda)
        with torch.no_grad():  # held near where the slow critic is: both targets weigh the same
            slow = self.slow_critic.mean(self.slow_critic(imagined.features[:-1]))
            targets = two_hot(returns, self.critic.bins) + two_hot(slow, self.critic.bins)
        return (two_hot_loss(logits[:-1], targets) * discount_weights(discount)).mean(), returns, value[:-1]

    def actor_loss(self, imagined: ImaginedRollout, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """Also returns the entropy of the policy."""
        policy = self.actor(imagined.features[:-1], imagined.mask)
        entropy = policy.entropy()
        gain = policy.log_prob(imagined.action) * advantage + self.cfg.entropy_coef * entropy
        return -(gain * discount_weights(self.cfg.gamma * imagined.continue_prob)).mean(), entropy.detach().mean()

    def gradients(self, batch: Batch) -> Gradients:
        world_loss, state, told = self.world_loss(batch)
        found = {"world_optimizer": self.world_optimizer.gradient(world_loss)}
        imagined = self.world.imagine(state, self.actor, self.cfg.horizon, self.rng)
        critic_loss, returns, value = self.critic_loss(imagined)
        found["critic_optimizer"] = self.critic_optimizer.gradient(critic_loss)
        scale = torch.lerp(self.return_range, percentile_range(returns), RANGE_RATE)
        actor_loss, entropy = self.actor_loss(imagined, (returns - value) / scale.clamp_min(1.0))
        found["actor_optimizer"] = self.actor_optimizer.gradient(actor_loss)
        told |= {"actor_loss": actor_loss.detach(), "critic_loss": critic_loss.detach(), "entropy": entropy}
        return Gradients(found, told | {"imagined_return": returns.mean(), "return_range": scale})

    def apply(self, gradients: Gradients) -> Update:
        self.return_range = gradients.metrics["return_range"]
        return super().apply(gradients)

    def after_step(self) -> None:
        self.follow.move(self.cfg.tau)

    def value(self, obs: Tree) -> Tensor:
        """Of first observations: memory is that of an episode's start."""
        hidden = self.policy.initial_hidden(len(tree_leaves(obs)[0]))
        return self.critic.mean(self.critic(self.world.infer_state(obs, hidden, None).features))

    def dream_frames(self, batch: Batch) -> Tensor | None:
        """Of sequences `[B,T]`: what was seen, what the model made of it, and their difference, as bytes
        `[B,3,T,H,W,C]`; it saw only the first steps of each episode. None for tasks without pictures."""
        if not self.world.preprocessor.image_shapes:
            return None
        rng = torch.Generator(self.device).manual_seed(0)  # a look changes nothing
        obs, action, is_first = time_major((batch.obs, batch.action, batch.is_first))
        seen, dreamt = self.world.predict_video(obs, action, is_first, SHOWN, rng)
        dreamt = dreamt.clamp(0.0, 1.0)
        frames = torch.stack([seen, dreamt, 0.5 + 0.5 * (dreamt - seen)])  # [3,T,B,C,H,W]
        return (frames * 255.0).round().byte().permute(2, 0, 1, 4, 5, 3)


def _check(cfg: DreamerConfig, spaces: Spaces, net: NetFactory | None) -> None:
    """Refuse by name what a world model can't be combined with."""
    if not spaces.discrete:
        check_box(spaces, cfg.algorithm)
    if net is not None or cfg.net.kind != "auto" or cfg.net.cnn != "simple":
        raise UserError(f"{cfg.algorithm} makes its own networks: set net.kind=auto and net.cnn=simple")
    if cfg.net.recurrent != "none":
        raise UserError(f"{cfg.algorithm} has a memory of its own, whatever the network: set net.recurrent=none")
    if cfg.normalize_obs:
        raise UserError(f"{cfg.algorithm} scales observations by symlog: set normalize_obs=false")
    for name, only in (("prioritized", False), ("n_step", 1), ("her", False)):
        if getattr(cfg.replay, name) != only:
            raise UserError(f"{cfg.algorithm} learns from sequences: set replay.{name}={str(only).lower()}")
