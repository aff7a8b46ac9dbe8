"""AlphaZero (Silver et al., 2018).   L = (z - v)² - π·log p + c‖θ‖²

A tree search, guided by the network's policy p and value v, plays games against itself. The policy is trained on the
visit fractions π of the search, the value on the outcome z of the game.
Differs from the paper: sampled positions are rotated and mirrored at random, as in AlphaGo Zero; value targets mix the
outcome with the search's value; the optimizer is Adam; optionally most moves use fast searches that aren't trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor, nn

from zhixing.algorithms import register
from zhixing.config import (
    Count,
    Fraction,
    Group,
    NonNegative,
    Positive,
    PositiveFloat,
    Schedule,
    SelfPlayConfig,
    StrictModel,
)
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner, LearnsFromSelfPlay, Update, train_step
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Field, Tree
from zhixing.errors import UserError
from zhixing.search import CACHE_SIZE, GAMES, BoardNet, NetworkEvaluator, SelfPlay, augment, find_game, numpy_generator
from zhixing.search.policy import SearchPolicy
from zhixing.utils.importing import import_object

BoardNetFactory = Callable[[tuple[int, ...], int], nn.Module]  # (board shape, number of actions) -> network


class BoardNetConfig(StrictModel):
    """The network that evaluates positions."""

    kind: str = "auto"
    """Network class: auto is residual; your.module:Net is called with board shape and number of actions."""
    blocks: Positive = 4
    """Number of residual blocks."""
    channels: Positive = 32
    """Channels of each convolution."""


class AlphaZeroConfig(SelfPlayConfig):
    algorithm: str = "alphazero"
    net: Annotated[BoardNetConfig, Group.NETWORK] = BoardNetConfig()
    lr: PositiveFloat = 2e-3
    lr_schedule: Schedule = "linear"
    l2_coef: Annotated[NonNegative, Group.OPTIMIZATION] = 1e-4
    """Weight of the squared L2 norm of all weights in the loss."""
    max_grad_norm: Annotated[PositiveFloat | None, Group.OPTIMIZATION] = 5.0
    """Maximum norm of the gradients; none disables clipping."""
    noise: Fraction = 0.25
    """Fraction of Dirichlet noise in the root's action probabilities during self-play."""
    alpha: PositiveFloat = 1.0
    """Concentration of the Dirichlet noise; about 10 divided by the number of legal moves."""
    explore_moves: Count = 12
    """Number of first moves of a game that are sampled by visit counts; later moves are the most visited."""
    fast_simulations: Positive | None = None
    """Simulations of fast searches, whose moves only advance the game and are not trained on."""
    full_share: Fraction = 0.25
    """Fraction of moves searched in full when fast_simulations is set."""
    search_value: Annotated[Fraction, Group.OPTIMIZATION] = 0.5
    """Weight of the search's value in value targets; the rest is the game's outcome."""
    gamma: Fraction = 1.0
    num_envs: Positive = 64

    @model_validator(mode="after")
    def _check_vector(self) -> AlphaZeroConfig:
        if self.vector.backend not in ("auto", "serial") or self.vector.workers not in ("auto", 1):
            raise ValueError(
                "alphazero plays all games in one process: set vector.backend=auto and vector.workers=auto"
            )
        return self


@register("alphazero", "self-play with a tree search that a policy and value network guides")
class AlphaZero(Learner, LearnsFromSelfPlay):
    settings = AlphaZeroConfig
    metrics = ("policy_loss", "value_loss", "entropy", "grad_norm")
    multi_agent = True

    def __init__(
        self,
        cfg: AlphaZeroConfig,
        spaces: Spaces,
        device: torch.device | str = "cpu",
        net: BoardNetFactory | None = None,
    ) -> None:
        game = find_game(cfg.env.name, cfg.env.options)
        if game is None:
            raise UserError(
                f"{cfg.algorithm} needs a game, not {cfg.env.name}; games are {', '.join(GAMES)} and your own, classes "
                f"that derive from zhixing.search.BoardGame"
            )
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        self.game = game
        self.game.gamma = cfg.gamma
        with self.seeded_init():
            self.net = _make_net(cfg.net, net, self.game.obs_shape, self.game.num_actions).to(self.device)
        self.optimizer = self.make_optimizer(self.net.parameters(), cfg.lr, max_grad_norm=cfg.max_grad_norm)
        self.policy = SearchPolicy(
            spaces, self.game, NetworkEvaluator(self.net), cfg.simulations, self.net, select="puct", c=cfg.c
        )

    @property
    def extra_fields(self) -> dict[str, Tree]:
        """Fields of a position for the player to move: `policy` are visit fractions, `value` is the search's value."""
        flag, number = Field((), np.dtype(bool)), Field((), np.dtype(np.float32))
        return {
            "obs": Field(self.game.obs_shape, self.game.observe(self.game.initial_states(1)).dtype),
            "mask": Field((self.game.num_actions,), np.dtype(bool)),
            "policy": Field((self.game.num_actions,), np.dtype(np.float32)),
            "value": number,
            "reward": number,
            "terminated": flag,
            "truncated": flag,
        }

    def self_play(self) -> SelfPlay:
        """Return the collector that plays games with the current network."""
        cfg = self.cfg
        return SelfPlay(
            self.game,
            self.net,
            cfg.num_envs,
            cfg.simulations,
            seed=cfg.seed,
            c=cfg.c,
            noise=cfg.noise,
            alpha=cfg.alpha,
            explore_moves=cfg.explore_moves,
            fast_simulations=cfg.fast_simulations,
            full_share=cfg.full_share,
            cache_size=CACHE_SIZE if self.game.cache_results else 0,
        )

    def update(self, batch: Batch) -> Update:
        return self.gradient_step(augment(self.game, batch.numpy(), numpy_generator(self.rng)).to(self.device))

    @train_step
    def gradient_step(self, batch: Batch) -> Update:
        """Update from positions `[B]`."""
        logits, value = self.net(batch.obs, batch.mask)
        logp = logits.log_softmax(-1)
        target = torch.lerp(batch.reward, batch.value, self.cfg.search_value)
        policy_loss, value_loss = losses(logp, value, batch.policy, target)
        l2 = sum((weight.square().sum() for weight in self.net.parameters()), torch.zeros((), device=self.device))
        grad_norm = self.optimizer.step(policy_loss + value_loss + self.cfg.l2_coef * l2)
        entropy = -(logp.exp() * logp.clamp(min=-100.0)).sum(-1).mean()
        return Update(
            {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "grad_norm": grad_norm}
        )

    def value(self, obs: Tree) -> Tensor | None:
        return None  # the network evaluates positions, not observations of the environment


def losses(logp: Tensor, value: Tensor, policy: Tensor, outcome: Tensor) -> tuple[Tensor, Tensor]:
    """Return the policy loss of `logp [B,n]` for visit fractions `[B,n]`, and the value loss for outcomes `[B]`."""
    return -(policy * logp).sum(-1).mean(), (outcome - value).square().mean()


def _make_net(
    cfg: BoardNetConfig, factory: BoardNetFactory | None, shape: tuple[int, ...], num_actions: int
) -> nn.Module:
    if factory is None and cfg.kind != "auto":
        factory = import_object(cfg.kind)
    if factory is None:
        return BoardNet(shape, num_actions, cfg.blocks, cfg.channels)
    return factory(shape, num_actions)
