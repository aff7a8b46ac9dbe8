"""Recurrent state-space model of DreamerV3 (Hafner et al., 2023).

    h' = f(h, z, a)      deterministic recurrent state
    z ~ q(z | h, x)      posterior of the stochastic state, given the observation
    z ~ p(z | h)         prior of the stochastic state, used in imagination

At the start of an episode h, z and a are zeros, so the first recurrent state is f(0, 0, 0), which is learned.
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
    """A linear layer, a layer norm and an activation.

    Calls functions on its weights instead of modules, because in models this small the module calls would dominate.
    """

    def __init__(self, inputs: int, outputs: int, activation: Activation | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.Linear(inputs, outputs, bias=False).weight.detach())
        self.scale, self.shift = nn.Parameter(torch.ones(outputs)), nn.Parameter(torch.zeros(outputs))
        self.outputs, self.activation = (outputs,), None if activation is None else ACTIVATIONS[activation]

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Apply the layer; `residual` is added before the norm."""
        weights = self._parameters
        out = F.linear(x, weights["weight"])  # type: ignore[arg-type]
        if residual is not None:
            out = out + residual
        out = torch.layer_norm(out, self.outputs, weights["scale"], weights["shift"], 1e-3)
        return out if self.activation is None else self.activation(out)


class LayerNormMLP(nn.Module):
    """Layers with layer norm and, with `outputs`, a final linear layer whose initial weights are scaled by `scale`.

    With `scale=0` all initial outputs are zero.
    """

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
    """Deterministic state `h [..., hidden_size]` and stochastic state `z [..., variables * classes]`, one-hot each."""

    h: Tensor
    z: Tensor

    @property
    def features(self) -> Tensor:
        return torch.cat(self, -1)

    def detach(self) -> RSSMState:
        return RSSMState(self.h.detach(), self.z.detach())


class RSSMOutput(NamedTuple):
    """Results of `RSSM.observe` over sequences `[T,B]`.

    `next_h` is the deterministic state after each step's action. `posterior` and `prior` are log-probabilities
    `[T,B,variables,classes]` of the stochastic state.
    """

    state: RSSMState
    next_h: Tensor
    posterior: Tensor
    prior: Tensor


class RSSM(nn.Module):
    """Recurrent state-space model with `variables` categorical variables of `classes` each.

    The categorical probabilities are mixed with a fraction `uniform_mix` of the uniform distribution.
    """

    def __init__(
        self,
        embedding: int,
        actions: int,
        hidden_size: int,
        variables: int,
        classes: int,
        uniform_mix: float,
        activation: Activation,
    ) -> None:
        super().__init__()
        self.hidden_size, self.variables, self.classes = hidden_size, variables, classes
        self.actions, self.uniform_mix = actions, uniform_mix
        stochastic_size = variables * classes
        self.input_layer = LayerNormLinear(stochastic_size + actions, hidden_size, activation)
        self.gates = LayerNormLinear(2 * hidden_size, 3 * hidden_size, None)
        with torch.no_grad():
            self.gates.shift[2 * hidden_size :] = -1.0  # bias of the update gate: keep most of h at first
        self.obs_projection = nn.Linear(embedding, hidden_size, bias=False)
        self.posterior_hidden = LayerNormLinear(hidden_size, hidden_size, activation)
        self.posterior_logits = nn.Linear(hidden_size, stochastic_size)
        with torch.no_grad():  # nearly uniform initial posteriors carry no information and are never learned
            self.posterior_logits.weight.mul_(4.0)
        self.prior_logits = LayerNormMLP(hidden_size, [hidden_size], activation, stochastic_size)
        self.num_features = hidden_size + stochastic_size

    def initial_state(self, num: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return zeros `(h, z, a)` for the start of `num` episodes."""
        sizes = (self.hidden_size, self.variables * self.classes, self.actions)
        return tuple(torch.zeros(num, n, device=device) for n in sizes)  # type: ignore[return-value]

    def advance(self, h: Tensor, z: Tensor, action: Tensor) -> Tensor:
        """Return the next deterministic state, by a GRU with layer norm on its gates."""
        x = self.input_layer(torch.cat([z, action], -1))
        out = self.gates(torch.cat([h, x], -1))
        candidate, gates = out.split((self.hidden_size, 2 * self.hidden_size), -1)
        reset, update = gates.sigmoid().chunk(2, -1)
        return torch.lerp(h, torch.tanh(reset * candidate), update)

    def posterior(self, h: Tensor, projected_obs: Tensor) -> Tensor:
        """Return the probabilities `[...,variables,classes]` of z given `obs_projection(embedding)`."""
        return self._probabilities(self.posterior_logits(self.posterior_hidden(h, projected_obs)))

    def prior(self, h: Tensor) -> Tensor:
        """Return the probabilities `[...,variables,classes]` of z without an observation."""
        return self._probabilities(self.prior_logits(h))

    def _probabilities(self, logits: Tensor) -> Tensor:
        return uniform_mix(logits.view(*logits.shape[:-1], self.variables, self.classes), self.uniform_mix)

    def uniform_noise(self, lead: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """Return the noise for `sample`. Drawing it for all steps at once saves calls, which cost more than numbers."""
        return torch.rand(*lead, self.variables, generator=rng, device=rng.device)

    def sample(self, probability: Tensor, uniform_noise: Tensor | None) -> Tensor:
        """Return a one-hot sample of z with straight-through gradients, or the mode without noise."""
        return straight_through(probability, uniform_noise).flatten(-2)

    def observe(self, embedded: Tensor, action: Tensor, is_first: Tensor, uniform_noise: Tensor | None) -> RSSMOutput:
        """Infer the states of sequences `[T,B,...]`. The state is reset in the first row and where `is_first [T,B]`."""
        projected = self.obs_projection(embedded).unbind()
        start = next_h = self.advance(*self.initial_state(1, embedded.device))
        first = is_first.unsqueeze(-1).clone()
        first[0] = True
        noises = [None] * len(projected) if uniform_noise is None else uniform_noise.unbind()
        steps: list[tuple[Tensor, ...]] = []
        for x, a, reset, noise in zip(projected, action.unbind(), first.unbind(), noises, strict=True):
            h = torch.where(reset, start, next_h)
            probability = self.posterior(h, x)
            z = self.sample(probability, noise)
            next_h = self.advance(h, z, a)
            steps.append((h, z, next_h, probability))
        h, z, next_hs, posterior = (torch.stack(part) for part in zip(*steps, strict=True))
        return RSSMOutput(RSSMState(h, z), next_hs, posterior.log(), self.prior(h).log())
