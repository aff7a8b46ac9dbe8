"""C51 (Bellemare et al., 2017).   m = Φ(r + γ^k (1 - terminated) z, p'(s', a*)),   L = E[w · -Σ_i m_i log p_i(s, a)]

The return of an action is a distribution p over fixed atoms z. The projection Φ splits the probability of a value
between the two nearest atoms. a* is the action with the highest mean Σ_i z_i p'_i.
Rainbow (Hessel et al., 2018) adds double Q-learning (the network chooses a*, the target network gives p'), dueling
streams, noisy layers instead of epsilon-greedy exploration, prioritized replay and n-step returns.
Differs from the papers: only the layers of the head are noisy; priorities are KL(m || p), which is the loss minus the
entropy of the target m.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from zhixing.algorithms import register
from zhixing.algorithms.dqn import Losses, QLearner
from zhixing.config import Finite, Fraction, Group, NonNegative, QLearningConfig, ReplayConfig
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces
from zhixing.nets.heads import AtomsHead, DuelingHead
from zhixing.nets.noisy import NoisyLinear
from zhixing.nets.qnet import gather_atoms, greedy_next_action
from zhixing.nets.torso import NetFactory
from zhixing.ops.projections import categorical_projection
from zhixing.ops.returns import td_target


class C51Config(QLearningConfig):
    algorithm: str = "c51"
    atoms: Annotated[int, Field(ge=2), Group.NETWORK] = 51
    """Number of atoms of the return distribution."""
    v_min: Annotated[Finite, Group.NETWORK] = -10.0
    """Smallest atom; lower returns are projected onto it."""
    v_max: Annotated[Finite, Group.NETWORK] = 10.0
    """Largest atom; higher returns are projected onto it."""
    noise: Annotated[NonNegative, Group.COLLECTION] = 0.0
    """Initial standard deviation of the noise on the head's weights, which drives exploration; 0 disables it."""

    @model_validator(mode="after")
    def _check_range(self) -> C51Config:
        if self.v_min >= self.v_max:
            raise ValueError(f"v_min={self.v_min:g} must be below v_max={self.v_max:g}")
        return self


class RainbowConfig(C51Config):
    algorithm: str = "rainbow"
    noise: NonNegative = 0.5
    epsilon_start: Fraction = 0.0
    epsilon_end: Fraction = 0.0
    replay: ReplayConfig = ReplayConfig(prioritized=True, alpha=0.5, n_step=3)


class Mean(nn.Module):
    """Maps the logits of a distribution `[...,atoms]` to its mean `[...]`."""

    support: Tensor

    def __init__(self, cfg: C51Config) -> None:
        super().__init__()
        # not saved, because the settings determine it
        self.register_buffer("support", torch.linspace(cfg.v_min, cfg.v_max, cfg.atoms), persistent=False)

    def forward(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1) @ self.support


@register("c51", "distributional DQN with a categorical distribution over fixed atoms")
@register(
    "rainbow",
    "C51 with double and dueling Q-learning, noisy layers, prioritized replay and n-step returns",
    settings=RainbowConfig,
    head=DuelingHead,
    double=True,
)
class C51(QLearner):
    settings = C51Config

    def __init__(
        self,
        cfg: C51Config,
        spaces: Spaces,
        device: torch.device | str = "cpu",
        net: NetFactory | None = None,
        *,
        head: Callable[..., nn.Module] = AtomsHead,
        double: bool = False,
    ) -> None:
        linear = partial(NoisyLinear, sigma_init=cfg.noise) if cfg.noise > 0 else nn.Linear
        self.mean = Mean(cfg).to(device)
        self.double = double
        super().__init__(cfg, spaces, device, net, partial(head, atoms=cfg.atoms, linear=linear), self.mean)

    @torch.no_grad()
    def target_distribution(self, batch: Batch, steps: Batch) -> Tensor:
        """Return the target distribution m of each step `[B,atoms]`."""
        support = self.mean.support
        logits = self.next_q_values(self.target_net, batch)  # [B,n,atoms]
        choice_logits = self.next_q_values(self.net, batch) if self.double else logits
        probability = gather_atoms(logits, greedy_next_action(self.mean(choice_logits), steps)).softmax(-1)
        values = td_target(steps, support.expand_as(probability))
        return categorical_projection(values, probability, support)

    def losses(self, batch: Batch, steps: Batch) -> Losses:
        logits = gather_atoms(self.q_values(self.net, batch), steps.action)  # [B,atoms]
        target = self.target_distribution(batch, steps)
        losses = -(target * logits.log_softmax(-1)).sum(-1)  # [B]
        kl = losses.detach() + torch.special.xlogy(target, target).sum(-1)  # minus the target's entropy
        return Losses(losses, self.mean(logits.detach()), kl)
