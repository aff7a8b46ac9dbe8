"""A model of the world: states that follow each other, and what can be told of them. Actors learn in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor, nn
from torch.nn import functional as F

from zhixing.config import NetConfig
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_map
from zhixing.nets.obs_encoder import ObsDecoder, ObsEncoder, ObsPreprocessor
from zhixing.nets.rssm import RSSM, LayerNormMLP, RSSMState
from zhixing.ops.distributions import Categorical, Distribution, Gaussian, MultiCategorical
from zhixing.ops.imagination import uniform_mix
from zhixing.ops.symlog import symexp_bins, two_hot_mean

STD_RANGE = (0.1, 1.0)  # of continuous actions


class TwoHotHead(nn.Module):
    """Features to a number, told as a distribution over bins of the symexp scale. It starts by saying 0."""

    bins: Tensor

    def __init__(self, features: int, net: NetConfig, bins: int) -> None:
        super().__init__()
        self.net = LayerNormMLP(features, net.hidden_sizes, net.activation, bins, scale=0.0)
        self.register_buffer("bins", symexp_bins(bins), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Logits `[..., bins]`."""
        return self.net(features)

    def mean(self, logits: Tensor) -> Tensor:
        return two_hot_mean(logits, self.bins)


class WorldModelActor(nn.Module):
    """An actor: features to a distribution over actions. A share of the chances of discrete ones is uniform; continuous
    ones are normal, with bounded mean and spread, and what lies beyond the task's bounds is cut off there."""

    def __init__(self, features: int, spaces: Spaces, net: NetConfig, mix: float) -> None:
        super().__init__()
        self.sizes, self.mix, self.single = discrete_sizes(spaces), mix, isinstance(spaces.action, Discrete)
        outputs = sum(self.sizes) if self.sizes else 2 * spaces.num_actions
        self.net = LayerNormMLP(features, net.hidden_sizes, net.activation, outputs, scale=0.1)  # nearly equal chances

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Distribution:
        out = self.net(features)
        if not self.sizes:
            mean, spread = out.chunk(2, -1)
            low, high = STD_RANGE
            return Gaussian(mean.tanh(), torch.log(low + (high - low) * torch.sigmoid(spread + 2.0)))  # wide at first
        if self.single:
            return Categorical(uniform_mix(out, self.mix).log(), mask)
        logp = torch.cat([uniform_mix(part, self.mix).log() for part in out.split(self.sizes, -1)], -1)
        return MultiCategorical(logp, self.sizes, mask)


def discrete_sizes(spaces: Spaces) -> list[int]:
    """How many classes each choice of an action has; none where actions are continuous."""
    space = spaces.action
    if isinstance(space, Discrete):
        return [int(space.n)]
    return [int(n) for n in space.nvec.reshape(-1)] if isinstance(space, MultiDiscrete) else []


def encode_action(action: Tensor, spaces: Spaces) -> Tensor:
    """Actions `[...]` in the policy's scale as one vector: choices one-hot, others as the task takes them."""
    if isinstance(spaces.action, Box):
        return action.clamp(-1.0, 1.0)
    parts = [action] if isinstance(spaces.action, Discrete) else action.unbind(-1)
    one_hot = [F.one_hot(part.long(), n) for part, n in zip(parts, discrete_sizes(spaces), strict=True)]
    return (one_hot[0] if len(one_hot) == 1 else torch.cat(one_hot, -1)).float()


def time_major(tree: Tree) -> Tree:
    """Sequences `[B,T,...]` as `[T,B,...]`."""
    return tree_map(lambda leaf: leaf.transpose(0, 1), tree)


def flatten_time(tree: Tree) -> Tree:
    """`[T,B,...]` as `[T*B,...]`."""
    return tree_map(lambda leaf: leaf.flatten(0, 1), tree)


class ImaginedRollout(NamedTuple):
    """What an actor did in the model for H steps from N states: `features [H+1,N,n]` of the states passed; of each step
    the action, which ones the model took to be allowed, the reward, and the chance that the world went on `[H,N]`."""

    features: Tensor
    action: Tensor
    mask: Tensor | None
    reward: Tensor
    continue_prob: Tensor


class WorldModel(nn.Module):
    """Encoder, states, decoder, and heads: for which actions a state allows, for tasks that tell it; for the reward of
    a step and whether the world goes on after it. These two are told of the memory after the step's action: they belong
    to the step, whether or not anything was seen after it.
    """

    def __init__(
        self,
        spaces: Spaces,
        net: NetConfig,
        *,
        size: int,
        variables: int,
        classes: int,
        mix: float,
        depth: int,
        bins: int,
    ) -> None:
        """The first four are those of `RSSM`; `depth` is the first convolution's."""
        super().__init__()
        self.spaces = spaces
        self.preprocessor = ObsPreprocessor(spaces.obs)
        self.encoder = ObsEncoder(self.preprocessor, net, depth)
        actions = sum(discrete_sizes(spaces)) or spaces.num_actions
        self.rssm = RSSM(self.encoder.outputs, actions, size, variables, classes, mix, net.activation)
        self.decoder = ObsDecoder(self.rssm.features, self.preprocessor, self.encoder, net)
        self.mask_head: LayerNormMLP | None = None
        if spaces.mask is not None:
            self.mask_head = LayerNormMLP(self.rssm.features, net.hidden_sizes, net.activation, spaces.mask)
        self.reward_head = TwoHotHead(size, net, bins)
        self.continue_head = LayerNormMLP(size, net.hidden_sizes, net.activation, 1)

    def continue_logits(self, after: Tensor) -> Tensor:
        """Logits `[...]` of the chance that the world goes on."""
        return self.continue_head(after).squeeze(-1)

    def infer_state(self, obs: Tree, hidden: tuple[Tensor, Tensor, Tensor], rng: torch.Generator | None) -> RSSMState:
        """The state at observations `[N,...]`, when `hidden` is the state before and the action taken there.

        Symbols are drawn, or without `rng` the likeliest.
        """
        h = self.rssm.advance(*hidden)
        chance = self.rssm.posterior(h, self.rssm.obs_projection(self.encoder(self.preprocessor(obs))))
        return RSSMState(h, self.rssm.sample(chance, None if rng is None else self.rssm.uniform_noise((len(h),), rng)))

    @torch.no_grad()
    def imagine(
        self,
        state: RSSMState,
        actor: Callable[[Tensor, Tensor | None], Distribution],
        horizon: int,
        rng: torch.Generator,
    ) -> ImaginedRollout:
        """Let an actor act in the model, from states `[N]`."""
        features, masks, actions, afters = [state.features], [], [], []
        for uniform_noise in self.rssm.uniform_noise((horizon, len(state.h)), rng):
            mask = None if self.mask_head is None else self.mask_head(features[-1]) > 0
            action = actor(features[-1], mask).sample(rng)
            h = self.rssm.advance(*state, encode_action(action, self.spaces))
            state = RSSMState(h, self.rssm.sample(self.rssm.prior(h), uniform_noise))
            features.append(state.features)
            actions.append(action)
            masks.append(mask)
            afters.append(h)
        after = torch.stack(afters)
        reward, continue_prob = (
            self.reward_head.mean(self.reward_head(after)),
            self.continue_logits(after).sigmoid(),
        )
        allowed = None if self.mask_head is None else torch.stack(masks)  # type: ignore[arg-type]
        return ImaginedRollout(torch.stack(features), torch.stack(actions), allowed, reward, continue_prob)

    @torch.no_grad()
    def predict_video(
        self, obs: Tree, action: Tensor, is_first: Tensor, shown: int, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """The first picture in observations `[T,B,...]`, and what the model made of it, `[T,B,C,H,W]` each.

        It is shown the first `shown` steps of each episode, or of a sequence that begins within one, and imagines what
        follows them from the actions alone.
        """
        lead = is_first.shape
        sight = self.preprocessor(flatten_time(obs))
        seen = self.rssm.obs_projection(self.encoder(sight)).unflatten(0, lead)
        taken, uniform_noise = encode_action(action, self.spaces), self.rssm.uniform_noise(lead, rng)
        hidden = self.rssm.initial_state(lead[1], is_first.device)
        left = torch.full(lead[1:], shown, device=is_first.device)
        states = []
        for t, first in enumerate(is_first):
            left = torch.where(first, shown, left)
            h = self.rssm.advance(*(part * ~first.unsqueeze(-1) for part in hidden))
            chance = torch.where((left > 0).view(-1, 1, 1), self.rssm.posterior(h, seen[t]), self.rssm.prior(h))
            hidden, left = (h, self.rssm.sample(chance, uniform_noise[t]), taken[t]), left - 1
            states.append(RSSMState(*hidden[:2]).features)
        dreamt = self.decoder(torch.cat(states)).images
        return sight.images[0].unflatten(0, lead), dreamt[0].unflatten(0, lead)
