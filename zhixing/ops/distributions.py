"""Distributions over actions, made of the raw outputs of a network. All of them sum over an action's parts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from typing_extensions import Self

MASKED_LOGIT = -1e8  # the logit of a forbidden action: no probability, and no NaN in the entropy


class Distribution(ABC):
    @abstractmethod
    def sample(self, rng: torch.Generator) -> Tensor: ...

    @abstractmethod
    def mode(self) -> Tensor: ...

    @abstractmethod
    def log_prob(self, action: Tensor) -> Tensor: ...

    @abstractmethod
    def entropy(self) -> Tensor: ...

    @abstractmethod
    def kl(self, other: Self) -> Tensor:
        """KL(self, other): how much less likely `other` makes what is drawn from this one, on average."""


class Categorical(Distribution):
    """One of n actions, `logits [..., n]`; where `mask` is false the action has no probability."""

    def __init__(self, logits: Tensor, mask: Tensor | None = None) -> None:
        if mask is not None:
            logits = logits.masked_fill(~mask, MASKED_LOGIT)
        self.logp = F.log_softmax(logits, -1)

    def sample(self, rng: torch.Generator) -> Tensor:
        # the smallest of exponential clocks with rates p rings with probability p
        clocks = torch.empty_like(self.logp).exponential_(generator=rng)
        return (self.logp.exp() / clocks).argmax(-1)

    def mode(self) -> Tensor:
        return self.logp.argmax(-1)

    def log_prob(self, action: Tensor) -> Tensor:
        return self.logp.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        return -(self.logp.exp() * self.logp).sum(-1)

    def kl(self, other: Self) -> Tensor:
        return (self.logp.exp() * (self.logp - other.logp)).sum(-1)


class MultiCategorical(Distribution):
    """Several independent choices, `logits [..., sum(sizes)]`, and so the mask."""

    def __init__(self, logits: Tensor, sizes: list[int], mask: Tensor | None = None) -> None:
        masks = [None] * len(sizes) if mask is None else mask.split(sizes, -1)
        self.parts = [Categorical(*part) for part in zip(logits.split(sizes, -1), masks, strict=True)]

    def sample(self, rng: torch.Generator) -> Tensor:
        return torch.stack([part.sample(rng) for part in self.parts], -1)

    def mode(self) -> Tensor:
        return torch.stack([part.mode() for part in self.parts], -1)

    def log_prob(self, action: Tensor) -> Tensor:
        chosen = [part.log_prob(a) for part, a in zip(self.parts, action.unbind(-1), strict=True)]
        return torch.stack(chosen).sum(0)

    def entropy(self) -> Tensor:
        return torch.stack([part.entropy() for part in self.parts]).sum(0)

    def kl(self, other: Self) -> Tensor:
        return torch.stack([mine.kl(theirs) for mine, theirs in zip(self.parts, other.parts, strict=True)]).sum(0)


class Gaussian(Distribution):
    """Independent normals: `mean [..., n]`, `log_std` of the same or a broadcastable shape."""

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        self.mean, self.log_std = mean, log_std.expand_as(mean)

    def sample(self, rng: torch.Generator) -> Tensor:
        noise = torch.empty_like(self.mean).normal_(generator=rng)
        return torch.addcmul(self.mean, self.log_std.exp(), noise)

    def mode(self) -> Tensor:
        return self.mean

    def log_prob(self, action: Tensor) -> Tensor:
        z = (action - self.mean) * torch.exp(-self.log_std)
        return (-0.5 * z * z - self.log_std).sum(-1) - 0.5 * math.log(2 * math.pi) * self.mean.shape[-1]

    def entropy(self) -> Tensor:
        return (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)

    def kl(self, other: Self) -> Tensor:
        log_ratio = self.log_std - other.log_std
        shift = (self.mean - other.mean) * torch.exp(-other.log_std)
        return 0.5 * (torch.exp(2 * log_ratio) + shift * shift - 1 - 2 * log_ratio).sum(-1)


class SquashedGaussian(Distribution):
    """Normals through tanh: actions in (-1, 1), their density corrected for it (Haarnoja et al., 2018)."""

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        self.normal = Gaussian(mean, log_std)

    def sample(self, rng: torch.Generator) -> Tensor:
        return self.sample_with_logp(rng)[0]

    def sample_with_logp(self, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """A sample that gradients pass through, and its log-probability, exact also where tanh is flat."""
        raw = self.normal.sample(rng)
        return raw.tanh(), self.normal.log_prob(raw) - _log_slope(raw).sum(-1)

    def mode(self) -> Tensor:
        return self.normal.mean.tanh()

    def log_prob(self, action: Tensor) -> Tensor:
        edge = 1 - 1e-6  # beyond it the inverse of tanh is infinite
        raw = action.clamp(-edge, edge).atanh()
        return self.normal.log_prob(raw) - _log_slope(raw).sum(-1)

    def entropy(self) -> Tensor:
        raise NotImplementedError("a squashed normal has no closed entropy; use -log_prob of a sample")

    def kl(self, other: Self) -> Tensor:
        return self.normal.kl(other.normal)  # the same tanh of both changes nothing


def _log_slope(raw: Tensor) -> Tensor:
    """log(1 - tanh(x)^2) = 2 (log 2 - x - softplus(-2x)), which doesn't cancel for large x."""
    return 2.0 * (math.log(2.0) - raw - F.softplus(-2.0 * raw))
