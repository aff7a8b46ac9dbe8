"""C51 (Bellemare et al., 2017).   m = Φ(r + γ^k (1 - terminated) z, p'(s', a*)),   L = E[w · -Σ_i m_i log p_i(s, a)]

A return is a distribution p over fixed atoms z. Φ shares what lies between atoms; a* has the highest mean Σ_i z_i p'_i.
Rainbow (Hessel et al., 2018) adds double Q-learning (a* by the network, p' by its target), dueling streams, noisy
layers instead of epsilon, prioritized replay and n-step returns.
Differs from the papers: layers of the head are noisy, those of the body aren't; priorities are KL(m || p),
the loss without what no learning removes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from zhixing.algorithms import register
from zhixing.batch import Batch
from zhixing.config import Fraction, NonNegative, ReplayConfig, ValueConfig
from zhixing.learner import Gradients, Learner
from zhixing.nets.body import MakeNet, hidden_fields
from zhixing.nets.heads import AtomsHead, DuelingHead
from zhixing.nets.noisy import NoisyLinear, is_noisy, resample, silence
from zhixing.nets.qnet import (
    Expected,
    QNet,
    best_next,
    check_discrete,
    check_sequences,
    epsilon_at,
    learned_steps,
    of_action,
    priorities,
    read,
    read_next,
)
from zhixing.ops.optim import Average
from zhixing.ops.projections import categorical_projection
from zhixing.policy import GreedyPolicy
from zhixing.spaces import Spaces
from zhixing.tree import Tree


class Config(ValueConfig):
    atoms: Annotated[int, Field(ge=2)] = 51  # values among which the chances of a return are shared
    v_min: Annotated[float, Field(allow_inf_nan=False)] = -10.0  # the lowest of them; returns below count as this
    v_max: Annotated[float, Field(allow_inf_nan=False)] = 10.0  # the highest of them; returns above count as this
    noise: NonNegative = 0.0  # first spread of the noise on the head's weights, which explores; 0 is none

    @model_validator(mode="after")
    def _range_is_one(self) -> Config:
        if self.v_min >= self.v_max:
            raise ValueError(f"v_min={self.v_min:g} must be below v_max={self.v_max:g}")
        return self


class RainbowConfig(Config):
    noise: NonNegative = 0.5  # first spread of the noise on the head's weights, which explores; 0 is none
    epsilon_start: Fraction = 0.0  # chance of a random action at the start
    epsilon_end: Fraction = 0.0  # and when it has fallen
    replay: ReplayConfig = ReplayConfig(prioritized=True, alpha=0.5, n_step=3)


class Mean(nn.Module):
    """Logits `[...,atoms]` of a distribution to its mean."""

    support: Tensor

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        # made of settings, so not saved
        self.register_buffer("support", torch.linspace(cfg.v_min, cfg.v_max, cfg.atoms), persistent=False)

    def forward(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1) @ self.support


@register("c51", "DQN that learns the distribution of returns, over fixed atoms")
@register(
    "rainbow",
    "C51 with double and dueling Q-learning, noisy layers, prioritized replay and n-step returns",
    settings=RainbowConfig,
    head=DuelingHead,
    double=True,
)
class C51(Learner):
    settings = Config
    metrics = ("loss", "q_mean", "grad_norm")

    def __init__(
        self,
        cfg: Config,
        spaces: Spaces,
        device: torch.device | str = "cpu",
        net: MakeNet | None = None,
        *,
        head: Callable[..., nn.Module] = AtomsHead,
        double: bool = False,
    ) -> None:
        check_discrete(cfg, spaces)
        super().__init__(cfg, spaces, device)
        self.cfg, self.double = cfg, double
        linear = partial(NoisyLinear, spread=cfg.noise) if cfg.noise > 0 else nn.Linear
        with self.building():
            make_head = partial(head, atoms=cfg.atoms, linear=linear)
            self.net = QNet(spaces, cfg.net, net, make_head).to(self.device)
        check_sequences(cfg, self.net)
        self.noisy = is_noisy(self.net)
        self.q_optimizer = self.optimizer(
            self.net.parameters(), cfg.lr, kind=cfg.optimizer, max_grad_norm=cfg.max_grad_norm
        )
        self.target = copy.deepcopy(self.net)
        self.follow = Average(self.target, self.net)
        self.mean = Mean(cfg).to(self.device)
        self.policy = GreedyPolicy(spaces, Expected(self.net, self.mean), partial(epsilon_at, cfg), cfg.eval_epsilon)

    @property
    def reads(self) -> str:
        return "sequences" if self.net.recurrent else "transitions"

    @property
    def fields(self) -> dict[str, Tree]:
        return {"hidden": hidden_fields(self.policy.initial_hidden(1))} if self.net.recurrent else {}

    @torch.no_grad()
    def target_distribution(self, batch: Batch, steps: Batch) -> Tensor:
        """What the network should say of each step `[B,atoms]`."""
        burn_in, support = self.cfg.replay.burn_in, self.mean.support
        logits = read_next(self.target, batch, burn_in)  # [B,n,atoms]
        chooser = read_next(self.net, batch, burn_in) if self.double else logits
        probability = of_action(logits, best_next(self.mean(chooser), steps)).softmax(-1)
        future = (steps.discount * ~steps.terminated).unsqueeze(-1) * support
        return categorical_projection(steps.reward.unsqueeze(-1) + future, probability, support)

    def gradients(self, batch: Batch) -> Gradients:
        if self.noisy:
            resample(self.net, self.rng)
            resample(self.target, self.rng)
        steps = learned_steps(batch, self.cfg) if self.net.recurrent else batch
        logits = of_action(read(self.net, batch, self.cfg.replay.burn_in), steps.action)  # [B,atoms]
        target = self.target_distribution(batch, steps)
        losses = -(target * logits.log_softmax(-1)).sum(-1)  # [B]
        loss = (losses * steps.weight).mean() if "weight" in steps else losses.mean()
        gradient = self.q_optimizer.gradient(loss)
        metrics = {"loss": loss.detach(), "q_mean": self.mean(logits.detach()).mean()}
        # less the target's own entropy, which no learning removes
        surprise = losses.detach() + torch.special.xlogy(target, target).sum(-1)
        return Gradients({"q_optimizer": gradient}, metrics, priorities(surprise, batch))

    def value(self, obs: Tree) -> Tensor:
        silence(self.net)
        return self.mean(self.net(obs)[0]).amax(-1)

    def after_step(self) -> None:
        if self.updates % self.cfg.sync_every_updates == 0:
            self.follow.move(self.cfg.tau)
