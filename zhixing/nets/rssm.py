"""A recurrent state-space model: a memory that follows by rule, and symbols that stand for what can't be foreseen.

    h' = f(h, z, a)      what follows a step, before it is seen
    z ~ q(z | h, x)      what is there, by the observation
    z ~ p(z | h)         what is there, imagined

At the start of an episode h, z and a are zeros, so that the first memory is f(0, 0, 0), which is learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zhixing.nets.mlp import ACTIVATIONS, Activation
from zhixing.ops.imagination import straight_through, uniform_mix


class LayerNormLinear(nn.Module):
    """A linear layer whose outputs are normalised over the features, and then activated.

    Plain functions on its own weights instead of modules: these models are small, and the calls would cost most.
    """

    def __init__(self, inputs: int, outputs: int, activation: Activation | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.Linear(inputs, outputs, bias=False).weight.detach())
        self.scale, self.shift = nn.Parameter(torch.ones(outputs)), nn.Parameter(torch.zeros(outputs))
        self.outputs, self.activation = (outputs,), None if activation is None else ACTIVATIONS[activation]

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        """`more` is added before the normalisation: what another linear layer made of other inputs."""
        own = self._parameters
        out = F.linear(x, own["weight"])  # type: ignore[arg-type]
        if more is not None:
            out = out + more
        out = torch.layer_norm(out, self.outputs, own["scale"], own["shift"], 1e-3)
        return out if self.activation is None else self.activation(out)


class LayerNormMLP(nn.Module):
    """Normed layers and, with `outputs`, a plain one. `scale` is that of its first weights: 0 has no opinion."""

    def __init__(
        self,
        inputs: int,
        hidden_sizes: Sequence[int],
        activation: Activation,
        outputs: int | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        sizes = [inputs, *hidden_sizes]
        self.layers = nn.ModuleList([LayerNormLinear(n, m, activation) for n, m in pairwise(sizes)])
        self.last = None if outputs is None else nn.Linear(sizes[-1], outputs)
        if self.last is not None:
            with torch.no_grad():
                self.last.weight.mul_(scale)
                self.last.bias.zero_()
        self.outputs = sizes[-1] if outputs is None else outputs
        self._calls = [layer.forward for layer in self.layers] + ([] if self.last is None else [self.last.forward])

    def forward(self, x: Tensor) -> Tensor:
        for call in self._calls:
            x = call(x)
        return x


class RSSMState(NamedTuple):
    """Where the model is: memory `[..., size]` and symbols `[..., variables * classes]`, one-hot each."""

    h: Tensor
    z: Tensor

    @property
    def features(self) -> Tensor:
        return torch.cat(self, -1)

    def detach(self) -> RSSMState:
        return RSSMState(self.h.detach(), self.z.detach())


class RSSMOutput(NamedTuple):
    """A model that was shown sequences: its states `[T,B,...]`, the memory after each step's action, and the logarithms
    of the symbols' chances `[T,B,variables,classes]` with the observation and without."""

    state: RSSMState
    next_h: Tensor
    posterior: Tensor
    prior: Tensor


class RSSM(nn.Module):
    """`size` units of memory, `variables` symbols of `classes` each; `mix` is the uniform share of their chances."""

    def __init__(
        self, embedding: int, actions: int, size: int, variables: int, classes: int, mix: float, activation: Activation
    ) -> None:
        super().__init__()
        self.size, self.variables, self.classes, self.actions, self.mix = size, variables, classes, actions, mix
        symbols = variables * classes
        self.input_layer = LayerNormLinear(symbols + actions, size, activation)
        self.gates = LayerNormLinear(2 * size, 3 * size, None)
        with torch.no_grad():
            self.gates.shift[2 * size :] = -1.0  # of the gate that writes
        self.obs_projection = nn.Linear(embedding, size, bias=False)
        self.posterior_hidden, self.posterior_logits = LayerNormLinear(size, size, activation), nn.Linear(size, symbols)
        with torch.no_grad():  # symbols that differ by what is seen: of nearly equal chances nobody learns to read them
            self.posterior_logits.weight.mul_(4.0)
        self.prior_logits = LayerNormMLP(size, [size], activation, symbols)
        self.features = size + symbols

    def initial_state(self, num: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """h, z and a before the first observation of N episodes."""
        sizes = (self.size, self.variables * self.classes, self.actions)
        return tuple(torch.zeros(num, n, device=device) for n in sizes)  # type: ignore[return-value]

    def advance(self, h: Tensor, z: Tensor, action: Tensor) -> Tensor:
        """The memory after a step: a GRU's, its gates normalised, and at first inclined to keep what it holds."""
        x = self.input_layer(torch.cat([z, action], -1))
        out = self.gates(torch.cat([h, x], -1))
        new, gates = out.split((self.size, 2 * self.size), -1)
        use, write = gates.sigmoid().chunk(2, -1)
        return torch.lerp(h, torch.tanh(use * new), write)

    def posterior(self, h: Tensor, seen: Tensor) -> Tensor:
        """ActionDistribution of the symbols `[...,variables,classes]`; `seen` is `see(embedding)`."""
        return self._chances(self.posterior_logits(self.posterior_hidden(h, seen)))

    def prior(self, h: Tensor) -> Tensor:
        return self._chances(self.prior_logits(h))

    def _chances(self, logits: Tensor) -> Tensor:
        return uniform_mix(logits.view(*logits.shape[:-1], self.variables, self.classes), self.mix)

    def uniform_noise(self, lead: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """What draws symbols: for all steps at once, since a call costs more than its numbers."""
        return torch.rand(*lead, self.variables, generator=rng, device=rng.device)

    def sample(self, chance: Tensor, uniform_noise: Tensor | None) -> Tensor:
        return straight_through(chance, uniform_noise).flatten(-2)

    def observe(self, embedded: Tensor, action: Tensor, is_first: Tensor, uniform_noise: Tensor | None) -> RSSMOutput:
        """Follow sequences `[T,B,...]`; where `is_first [T,B]`, and at the first row, the model starts anew."""
        seen = self.obs_projection(embedded).unbind()
        start = after = self.advance(*self.initial_state(1, embedded.device))
        first = is_first.unsqueeze(-1).clone()
        first[0] = True
        drawn = [None] * len(seen) if uniform_noise is None else uniform_noise.unbind()
        steps: list[tuple[Tensor, ...]] = []
        for x, a, begins, chosen in zip(seen, action.unbind(), first.unbind(), drawn, strict=True):
            h = torch.where(begins, start, after)
            chance = self.posterior(h, x)
            z = self.sample(chance, chosen)
            after = self.advance(h, z, a)
            steps.append((h, z, after, chance))
        h, z, afters, posterior = (torch.stack(part) for part in zip(*steps, strict=True))
        return RSSMOutput(RSSMState(h, z), afters, posterior.log(), self.prior(h).log())
