"""Action distributions, parameterized by raw network outputs.

Log-probability, entropy and KL are summed over the dimensions of an action.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from typing_extensions import Self

MASKED_LOGIT = -1e8  # logit of an invalid action: its probability is 0, and the entropy is not NaN as with -inf


def mask_logits(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Return logits or Q-values `[...,n]` in which invalid actions, where `mask` is false, are never preferred."""
    return logits if mask is None else logits.masked_fill(~mask, MASKED_LOGIT)


def gather_actions(values: Tensor, action: Tensor) -> Tensor:
    """Return the values of one action per row, `[...,n]` to `[...]`."""
    return values.gather(-1, action.unsqueeze(-1)).squeeze(-1)


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
        """Return KL(self || other)."""


class Categorical(Distribution):
    """One of n actions, `logits [..., n]`. Actions where `mask` is false have probability 0."""

    def __init__(self, logits: Tensor, mask: Tensor | None = None) -> None:
        self.logp = F.log_softmax(mask_logits(logits, mask), -1)

    def sample(self, rng: torch.Generator) -> Tensor:
        # exponential race: argmax p_i / e_i with e_i ~ Exp(1) is i with probability p_i
        exponential = torch.empty_like(self.logp).exponential_(generator=rng)
        return (self.logp.exp() / exponential).argmax(-1)

    def mode(self) -> Tensor:
        return self.logp.argmax(-1)

    def log_prob(self, action: Tensor) -> Tensor:
        return gather_actions(self.logp, action)

    def entropy(self) -> Tensor:
        return -(self.logp.exp() * self.logp).sum(-1)

    def kl(self, other: Self) -> Tensor:
        return (self.logp.exp() * (self.logp - other.logp)).sum(-1)


class MultiCategorical(Distribution):
    """Independent categoricals with `sizes` classes each; `logits` and `mask` are `[..., sum(sizes)]`."""

    def __init__(self, logits: Tensor, sizes: list[int], mask: Tensor | None = None) -> None:
        masks = [None] * len(sizes) if mask is None else mask.split(sizes, -1)
        self.parts = [Categorical(*part) for part in zip(logits.split(sizes, -1), masks, strict=True)]

    def sample(self, rng: torch.Generator) -> Tensor:
        return torch.stack([part.sample(rng) for part in self.parts], -1)

    def mode(self) -> Tensor:
        return torch.stack([part.mode() for part in self.parts], -1)

    def log_prob(self, action: Tensor) -> Tensor:
        logps = [part.log_prob(a) for part, a in zip(self.parts, action.long().unbind(-1), strict=True)]
        return torch.stack(logps).sum(0)

    def entropy(self) -> Tensor:
        return torch.stack([part.entropy() for part in self.parts]).sum(0)

    def kl(self, other: Self) -> Tensor:
        return torch.stack([p.kl(q) for p, q in zip(self.parts, other.parts, strict=True)]).sum(0)


class Bernoulli(Distribution):
    """Independent bits: `logits [..., n]` of the probabilities that they are 1."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def sample(self, rng: torch.Generator) -> Tensor:
        return (torch.empty_like(self.logits).uniform_(generator=rng) < self.logits.sigmoid()).to(torch.int8)

    def mode(self) -> Tensor:
        return (self.logits > 0).to(torch.int8)

    def log_prob(self, action: Tensor) -> Tensor:
        # a log p + (1 - a) log (1 - p), where log p - log (1 - p) is the logit and log (1 - p) is -softplus(logit)
        return (action * self.logits - F.softplus(self.logits)).sum(-1)

    def entropy(self) -> Tensor:
        return (F.softplus(self.logits) - self.logits.sigmoid() * self.logits).sum(-1)

    def kl(self, other: Self) -> Tensor:
        difference = self.logits.sigmoid() * (self.logits - other.logits)
        return (difference + F.softplus(other.logits) - F.softplus(self.logits)).sum(-1)


class Gaussian(Distribution):
    """Diagonal Gaussian: `mean [..., n]`, and `log_std` of a shape that broadcasts to it."""

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


class Composite(Distribution):
    """Independent distributions of consecutive columns of actions `[..., sum(widths)]`, which are floats."""

    def __init__(self, parts: Sequence[Distribution], widths: Sequence[int]) -> None:
        self.parts, self.widths = list(parts), list(widths)

    def sample(self, rng: torch.Generator) -> Tensor:
        return torch.cat([part.sample(rng).float() for part in self.parts], -1)

    def mode(self) -> Tensor:
        return torch.cat([part.mode().float() for part in self.parts], -1)

    def log_prob(self, action: Tensor) -> Tensor:
        columns = action.split(self.widths, -1)
        return torch.stack([part.log_prob(a) for part, a in zip(self.parts, columns, strict=True)]).sum(0)

    def entropy(self) -> Tensor:
        return torch.stack([part.entropy() for part in self.parts]).sum(0)

    def kl(self, other: Self) -> Tensor:
        return torch.stack([p.kl(q) for p, q in zip(self.parts, other.parts, strict=True)]).sum(0)


class SquashedGaussian(Distribution):
    """Diagonal Gaussian squashed by tanh to (-1, 1), with the density corrected for it (Haarnoja et al., 2018)."""

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        self.normal = Gaussian(mean, log_std)

    def sample(self, rng: torch.Generator) -> Tensor:
        return self.sample_with_logp(rng)[0]

    def sample_with_logp(self, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return a reparameterized sample and its log-probability, which is exact even where tanh saturates."""
        raw = self.normal.sample(rng)
        return raw.tanh(), self.normal.log_prob(raw) - _log_tanh_derivative(raw).sum(-1)

    def mode(self) -> Tensor:
        return self.normal.mean.tanh()

    def log_prob(self, action: Tensor) -> Tensor:
        bound = 1 - 1e-6  # atanh(±1) is infinite
        raw = action.clamp(-bound, bound).atanh()
        return self.normal.log_prob(raw) - _log_tanh_derivative(raw).sum(-1)

    def entropy(self) -> Tensor:
        raise NotImplementedError("the entropy of a squashed Gaussian has no closed form; use -log_prob of a sample")

    def kl(self, other: Self) -> Tensor:
        return self.normal.kl(other.normal)  # KL is invariant under the same tanh


def _log_tanh_derivative(x: Tensor) -> Tensor:
    """Return log(1 - tanh(x)²) = 2 (log 2 - x - softplus(-2x)), a form without cancellation at large x."""
    return 2.0 * (math.log(2.0) - x - F.softplus(-2.0 * x))
