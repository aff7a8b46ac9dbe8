"""Read agents of Stable-Baselines3 and CleanRL into networks of zhixing, without executing anything in the files."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor

from zhixing.errors import UserError
from zhixing.utils.files import parse_json

MAX_BYTES = 1 << 30  # of one part of a zip file, unpacked
Layers = list[tuple[Tensor, Tensor]]  # weights [out,in] and biases [out], from the input on
ACTIVATIONS = {"Tanh": "tanh", "ReLU": "relu", "SiLU": "silu", "ELU": "elu", "GELU": "gelu"}
SETTINGS = {"gamma": "gamma", "learning_rate": "lr", "gae_lambda": "gae_lambda", "ent_coef": "entropy_coef"}
SETTINGS |= {"vf_coef": "value_coef", "tau": "tau", "batch_size": "batch_size"}


@dataclass
class ForeignAgent:
    """The networks of an agent in a form that both libraries share. Discrete Q-networks have only an actor."""

    algorithm: str
    activation: str
    actor: Layers
    critics: list[Layers] = field(default_factory=list)
    target_actor: Layers | None = None
    target_critics: list[Layers] = field(default_factory=list)
    log_std: Tensor | None = None
    log_alpha: Tensor | None = None
    obs_space: gym.Space[Any] | None = None
    action_space: gym.Space[Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def hidden_sizes(self) -> list[int]:
        return [len(bias) for _, bias in self.actor[:-1]]


def read_agent(file: Path) -> ForeignAgent:
    """Return the agent in a zip file of Stable-Baselines3 or a state dict of CleanRL."""
    try:
        if zipfile.is_zipfile(file) and "data" in zipfile.ZipFile(file).namelist():
            return _read_stable_baselines3(file)
        return _read_cleanrl(torch.load(file, map_location="cpu", weights_only=True))
    except UserError as error:
        raise UserError(f"{file} can't be imported: {error}") from None
    except Exception as error:  # foreign bytes fail in many ways
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
        raise UserError(
            f"{file} can't be imported: it is damaged, or no agent of Stable-Baselines3 or CleanRL ({reason})"
        ) from None


# --- Stable-Baselines3 ---


def _read_stable_baselines3(file: Path) -> ForeignAgent:
    with zipfile.ZipFile(file) as archive:
        data = parse_json(_read(archive, "data"))  # its base64 texts hold pickles, which are never read
        state = torch.load(io.BytesIO(_read(archive, "policy.pth")), map_location="cpu", weights_only=True)
        variables: Any = {}
        if "pytorch_variables.pth" in archive.namelist():
            packed = io.BytesIO(_read(archive, "pytorch_variables.pth"))
            variables = torch.load(packed, map_location="cpu", weights_only=True) or {}
    other = [name for name in state if "features_extractor" in name or "lstm" in name]
    if other or data.get("use_sde"):
        raise UserError(
            f"it has {'state-dependent exploration' if not other else other[0]}; only networks of MlpPolicy are read"
        )
    kwargs = data.get("policy_kwargs") or {}
    algorithm = _algorithm_of(data, state)
    name = str(kwargs.get("activation_fn", "Tanh" if algorithm in ("ppo", "a2c") else "ReLU"))
    settings = {name: data[foreign] for foreign, name in SETTINGS.items() if type(data.get(foreign)) in (int, float)}
    agent = ForeignAgent(algorithm, _activation(name), [], settings=settings)
    agent.obs_space, agent.action_space = _space(data["observation_space"]), _space(data["action_space"])
    if algorithm in ("ppo", "a2c"):
        agent.actor = [*_layers(state, "mlp_extractor.policy_net."), _layer(state, "action_net")]
        agent.critics = [[*_layers(state, "mlp_extractor.value_net."), _layer(state, "value_net")]]
        agent.log_std = state.get("log_std")
    elif algorithm == "dqn":
        agent.actor, agent.target_actor = _layers(state, "q_net.q_net."), _layers(state, "q_net_target.q_net.")
    else:
        if algorithm == "sac":
            mean, log_std = _layer(state, "actor.mu"), _layer(state, "actor.log_std")
            head = (torch.cat([mean[0], log_std[0]]), torch.cat([mean[1], log_std[1]]))
            agent.actor = [*_layers(state, "actor.latent_pi."), head]
            alpha = data.get("ent_coef")
            fixed = torch.tensor(float(alpha)).log() if type(alpha) in (int, float) else None
            agent.log_alpha = variables.get("log_ent_coef", fixed)
            if fixed is not None:
                agent.settings["alpha"] = float(alpha)
        else:
            agent.actor, agent.target_actor = _layers(state, "actor.mu."), _layers(state, "actor_target.mu.")
        count = len({name.split(".")[1] for name in state if name.startswith("critic.qf")})
        agent.critics = [_layers(state, f"critic.qf{i}.") for i in range(count)]
        agent.target_critics = [_layers(state, f"critic_target.qf{i}.") for i in range(count)]
    return agent


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).file_size > MAX_BYTES:
        raise UserError(f"its part {name} is larger than {MAX_BYTES:,} bytes")
    return archive.read(name)


def _algorithm_of(data: Mapping[str, Any], state: Mapping[str, Tensor]) -> str:
    if "mlp_extractor.policy_net.0.weight" in state or "action_net.weight" in state:
        return "ppo" if "clip_range" in data else "a2c"
    if "q_net.q_net.0.weight" in state:
        return "dqn"
    if "actor.latent_pi.0.weight" in state:
        return "sac"
    if "actor.mu.0.weight" in state:
        return "td3" if "critic.qf1.0.weight" in state else "ddpg"
    raise UserError("its algorithm is unknown; ppo, a2c, dqn, sac, td3 and ddpg of Stable-Baselines3 are read")


def _space(data: Mapping[str, Any]) -> gym.Space[Any] | None:
    """Return a space from its printed attributes, or None if these are incomplete."""
    kind = re.search(r"(\w+)'>$", str(data.get(":type:")))
    name = kind[1] if kind else ""
    if name == "Discrete":
        return Discrete(int(data["n"]), start=int(data.get("start", 0)))
    if name == "MultiDiscrete":
        return MultiDiscrete(_numbers(data["nvec"]).astype(np.int64))
    if name != "Box":
        return None
    shape, dtype = tuple(data["_shape"]), np.dtype(str(data["dtype"]))
    low, high = (_numbers(data.get(f"{side}_repr") or data[side]) for side in ("low", "high"))
    if any(bound.size not in (1, int(np.prod(shape))) for bound in (low, high)):
        return None  # NumPy prints only the ends of long arrays
    low, high = (np.broadcast_to(b, shape) if b.size == 1 else b.reshape(shape) for b in (low, high))
    return Box(low.astype(dtype), high.astype(dtype), shape, dtype.type)


def _numbers(text: Any) -> np.ndarray[Any, Any]:
    return np.array([float(word) for word in re.findall(r"-?inf|-?\d+\.?\d*(?:e[+-]?\d+)?", str(text))])


# --- CleanRL ---


def _read_cleanrl(state: Any) -> ForeignAgent:
    parts = list(state) if isinstance(state, (list, tuple)) else [state]
    first = parts[0]
    if not all(isinstance(part, Mapping) for part in parts):
        raise UserError("it holds no state dict")
    if "fc_mu.weight" in first:  # of td3 and ddpg: the actor, then its critics
        actor = [_layer(first, name) for name in ("fc1", "fc2", "fc_mu")]
        critics = [[_layer(part, name) for name in ("fc1", "fc2", "fc3")] for part in parts[1:]]
        return ForeignAgent("td3" if len(critics) > 1 else "ddpg", "relu", actor, critics)
    if "actor_logstd" in first:
        log_std = first["actor_logstd"].reshape(-1)
        return ForeignAgent("ppo", "tanh", _layers(first, "actor_mean."), [_layers(first, "critic.")], log_std=log_std)
    if "actor.0.weight" in first and "critic.0.weight" in first:
        return ForeignAgent("ppo", "tanh", _layers(first, "actor."), [_layers(first, "critic.")])
    if "network.0.weight" in first and first["network.0.weight"].ndim == 2:
        return ForeignAgent("dqn", "relu", _layers(first, "network."))
    raise UserError(f"its tensors {', '.join(list(first)[:4])}, ... are not those of ppo, dqn, td3 or ddpg of CleanRL")


# --- layers ---


def _layer(state: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    return state[f"{name}.weight"].float(), state[f"{name}.bias"].float()


def _layers(state: Mapping[str, Tensor], prefix: str) -> Layers:
    """Return the linear layers of an `nn.Sequential`, in order."""
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.weight")
    numbers = sorted(int(match[1]) for name in state if (match := pattern.fullmatch(name)))
    return [_layer(state, f"{prefix}{number}") for number in numbers]


def _activation(name: str) -> str:
    match = re.search(r"(\w+)(?:'>)?$", name)
    if match is None or match[1] not in ACTIVATIONS:
        raise UserError(f"its activation {name[:80]} is unknown; allowed are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[match[1]]
