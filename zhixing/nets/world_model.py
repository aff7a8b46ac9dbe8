"""World model of DreamerV3 (Hafner et al., 2023), in which an actor learns from imagined rollouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor, nn
from torch.nn import functional as F

from zhixing.config import NetConfig
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, flatten_time
from zhixing.nets.obs_encoder import ObsDecoder, ObsEncoder, ObsPreprocessor, ObsTensors
from zhixing.nets.rssm import RSSM, LayerNormMLP, RSSMState
from zhixing.ops.distributions import Categorical, Distribution, Gaussian, MultiCategorical
from zhixing.ops.imagination import uniform_mix
from zhixing.ops.symlog import symexp_bins, two_hot, two_hot_loss, two_hot_mean

STD_RANGE = (0.1, 1.0)  # of continuous actions
CONTEXT_STEPS = 5  # observed steps at the start of a predicted video


class TwoHotHead(nn.Module):
    """Predicts a number as a distribution over symexp-spaced bins. Its initial prediction is 0."""

    bins: Tensor

    def __init__(self, features: int, net: NetConfig, bins: int) -> None:
        super().__init__()
        self.net = LayerNormMLP(features, net.hidden_sizes, net.activation, bins, scale=0.0)
        self.register_buffer("bins", symexp_bins(bins), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits `[..., bins]`."""
        return self.net(features)

    def mean(self, logits: Tensor) -> Tensor:
        return two_hot_mean(logits, self.bins)


class WorldModelActor(nn.Module):
    """Actor that maps the features of the world model to an action distribution.

    Probabilities of discrete actions are mixed with a fraction `uniform_mix` of the uniform distribution. Continuous
    actions are Gaussian with bounded mean and std; samples out of bounds are clipped.
    """

    def __init__(self, features: int, spaces: Spaces, net: NetConfig, uniform_mix: float) -> None:
        super().__init__()
        self.sizes, self.uniform_mix = discrete_sizes(spaces), uniform_mix
        self.single = isinstance(spaces.action, Discrete)
        outputs = sum(self.sizes) if self.sizes else 2 * spaces.num_actions
        self.net = LayerNormMLP(features, net.hidden_sizes, net.activation, outputs, scale=0.1)  # nearly uniform

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Distribution:
        out = self.net(features)
        if not self.sizes:
            mean, raw_std = out.chunk(2, -1)
            low, high = STD_RANGE
            return Gaussian(mean.tanh(), torch.log(low + (high - low) * torch.sigmoid(raw_std + 2.0)))  # 0.89 at first
        if self.single:
            return Categorical(uniform_mix(out, self.uniform_mix).log(), mask)
        logp = torch.cat([uniform_mix(part, self.uniform_mix).log() for part in out.split(self.sizes, -1)], -1)
        return MultiCategorical(logp, self.sizes, mask)


def discrete_sizes(spaces: Spaces) -> list[int]:
    """Return the number of values of each discrete action dimension; an empty list for continuous actions."""
    space = spaces.action
    if isinstance(space, Discrete):
        return [int(space.n)]
    return [int(n) for n in space.nvec.reshape(-1)] if isinstance(space, MultiDiscrete) else []


def encode_action(action: Tensor, spaces: Spaces) -> Tensor:
    """Return actions as vectors `[...,n]`: discrete actions one-hot, continuous actions clipped to [-1, 1]."""
    if isinstance(spaces.action, Box):
        return action.clamp(-1.0, 1.0)
    parts = [action] if isinstance(spaces.action, Discrete) else action.unbind(-1)
    one_hot = [F.one_hot(part.long(), n) for part, n in zip(parts, discrete_sizes(spaces), strict=True)]
    return (one_hot[0] if len(one_hot) == 1 else torch.cat(one_hot, -1)).float()


class ImaginedRollout(NamedTuple):
    """H imagined steps from N states: `features [H+1,N,n]` of the states, everything else `[H,N,...]` per step.

    `mask` marks the actions that the model predicts as valid. `continue_prob` is the predicted probability that the
    episode does not terminate.
    """

    features: Tensor
    action: Tensor
    mask: Tensor | None
    reward: Tensor
    continue_prob: Tensor


class WorldModel(nn.Module):
    """Encoder, RSSM, decoder, and heads for the reward, the continuation and, if the env has them, action masks.

    Reward and continuation are predicted from the deterministic state after the step's action. They belong to the step,
    whether or not an observation follows it.
    """

    def __init__(
        self,
        spaces: Spaces,
        net: NetConfig,
        *,
        hidden_size: int,
        variables: int,
        classes: int,
        uniform_mix: float,
        depth: int,
        bins: int,
    ) -> None:
        """See `RSSM` for the first four; `depth` is the number of channels of the first convolution."""
        super().__init__()
        self.spaces = spaces
        self.preprocessor = ObsPreprocessor(spaces.obs)
        self.encoder = ObsEncoder(self.preprocessor, net, depth)
        actions = sum(discrete_sizes(spaces)) or spaces.num_actions
        self.rssm = RSSM(self.encoder.outputs, actions, hidden_size, variables, classes, uniform_mix, net.activation)
        self.decoder = ObsDecoder(self.rssm.num_features, self.preprocessor, self.encoder, net)
        self.mask_head: LayerNormMLP | None = None
        if spaces.mask is not None:
            self.mask_head = LayerNormMLP(self.rssm.num_features, net.hidden_sizes, net.activation, spaces.mask)
        self.reward_head = TwoHotHead(hidden_size, net, bins)
        self.continue_head = LayerNormMLP(hidden_size, net.hidden_sizes, net.activation, 1)

    def continue_logits(self, next_h: Tensor) -> Tensor:
        """Return the logits `[...]` of the probability that the episode continues."""
        return self.continue_head(next_h).squeeze(-1)

    def prediction_losses(
        self,
        state: RSSMState,
        next_h: Tensor,
        obs: ObsTensors,
        reward: Tensor,
        terminated: Tensor,
        mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the mean losses of the predicted observations and masks, rewards and continuations of steps `[N]`."""
        reconstruction_loss = self.decoder.loss(state.features, obs).mean()
        if self.mask_head is not None:
            assert mask is not None
            logits = self.mask_head(state.features)
            reconstruction_loss += F.binary_cross_entropy_with_logits(logits, mask.float()) * mask.shape[-1]
        reward_target = two_hot(reward, self.reward_head.bins)
        return {
            "reconstruction_loss": reconstruction_loss,
            "reward_loss": two_hot_loss(self.reward_head(next_h), reward_target).mean(),
            "continue_loss": F.binary_cross_entropy_with_logits(self.continue_logits(next_h), (~terminated).float()),
        }

    def infer_state(self, obs: Tree, hidden: tuple[Tensor, Tensor, Tensor], rng: torch.Generator | None) -> RSSMState:
        """Return the state at `obs [N,...]`, given the previous state and action `hidden = (h, z, a)`.

        The stochastic state is sampled, or without `rng` the mode.
        """
        h = self.rssm.advance(*hidden)
        probability = self.rssm.posterior(h, self.rssm.obs_projection(self.encoder(self.preprocessor(obs))))
        uniform_noise = None if rng is None else self.rssm.uniform_noise((len(h),), rng)
        return RSSMState(h, self.rssm.sample(probability, uniform_noise))

    @torch.no_grad()
    def imagine(
        self,
        state: RSSMState,
        actor: Callable[[Tensor, Tensor | None], Distribution],
        horizon: int,
        rng: torch.Generator,
    ) -> ImaginedRollout:
        """Roll out an actor in the model for `horizon` steps from states `[N]`."""
        features, masks, actions, next_hs = [state.features], [], [], []
        for uniform_noise in self.rssm.uniform_noise((horizon, len(state.h)), rng):
            mask = None if self.mask_head is None else self.mask_head(features[-1]) > 0
            action = actor(features[-1], mask).sample(rng)
            h = self.rssm.advance(*state, encode_action(action, self.spaces))
            state = RSSMState(h, self.rssm.sample(self.rssm.prior(h), uniform_noise))
            features.append(state.features)
            actions.append(action)
            masks.append(mask)
            next_hs.append(h)
        next_h = torch.stack(next_hs)
        reward = self.reward_head.mean(self.reward_head(next_h))
        continue_prob = self.continue_logits(next_h).sigmoid()
        mask = None if self.mask_head is None else torch.stack(masks)  # type: ignore[arg-type]
        return ImaginedRollout(torch.stack(features), torch.stack(actions), mask, reward, continue_prob)

    @torch.no_grad()
    def predict_video(
        self, obs: Tree, action: Tensor, is_first: Tensor, context: int, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return the first image of `obs [T,B,...]` and the model's prediction of it, `[T,B,C,H,W]` each.

        The model gets the first `context` observations of each episode, or of a sequence that starts within an episode.
        It predicts the rest open-loop, from the actions only.
        """
        lead = is_first.shape
        inputs = self.preprocessor(flatten_time(obs))
        projected = self.rssm.obs_projection(self.encoder(inputs)).unflatten(0, lead)
        actions, uniform_noise = encode_action(action, self.spaces), self.rssm.uniform_noise(lead, rng)
        hidden = self.rssm.initial_state(lead[1], is_first.device)
        left = torch.full(lead[1:], context, device=is_first.device)
        states = []
        for t, first in enumerate(is_first):
            left = torch.where(first, context, left)
            h = self.rssm.advance(*(part * ~first.unsqueeze(-1) for part in hidden))
            probability = torch.where(
                (left > 0).view(-1, 1, 1), self.rssm.posterior(h, projected[t]), self.rssm.prior(h)
            )
            hidden, left = (h, self.rssm.sample(probability, uniform_noise[t]), actions[t]), left - 1
            states.append(RSSMState(*hidden[:2]).features)
        predicted = self.decoder(torch.cat(states)).images
        return inputs.images[0].unflatten(0, lead), predicted[0].unflatten(0, lead)

    def compare_videos(self, obs: Tree, action: Tensor, is_first: Tensor) -> Tensor | None:
        """Return the observed video, the video of `predict_video` and their difference, as bytes `[B,3,T,H,W,C]`.

        Equal pixels are gray in the difference. Returns None if observations have no images.
        """
        if not self.preprocessor.image_shapes:
            return None
        rng = torch.Generator(is_first.device).manual_seed(0)  # doesn't advance the learner's generator
        observed, predicted = self.predict_video(obs, action, is_first, CONTEXT_STEPS, rng)
        predicted = predicted.clamp(0.0, 1.0)
        videos = torch.stack([observed, predicted, 0.5 + 0.5 * (predicted - observed)])  # [3,T,B,C,H,W]
        return (videos * 255.0).round().byte().permute(2, 0, 1, 4, 5, 3)
