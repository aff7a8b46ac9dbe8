"""`zx.import_agent("model.zip")`: agents that Stable-Baselines3 or CleanRL trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from zhixing import algorithms, config, envs
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError
from zhixing.nets.actor_critic import ActorCritic
from zhixing.nets.mlp import MLP, EnsembleMLP
from zhixing.nets.torso import is_image
from zhixing.training.agent import Agent
from zhixing.training.foreign_agents import ForeignAgent, Layers, read_agent
from zhixing.training.resolve import NO_ENV
from zhixing.training.run_folder import RunFolder


def import_agent(file: str | Path, env: Any = None, *, out: str | Path | None = None, **settings: Any) -> Agent:
    """Return an agent of Stable-Baselines3 (`model.zip`) or CleanRL (`NAME.cleanrl_model`) as an agent of zhixing.

    Nothing in the file is executed. Its actions are those of the other library's deterministic policy.

    Args:
        file: An agent of ppo, a2c, dqn, sac, td3 or ddpg with fully connected networks.
        env: Environment that it was trained in. CleanRL saves no spaces, so it is needed there.
        out: New run folder, which commands such as `eval`, `video` and `train --init-from` take.
        settings: Settings of the run, for training further.
    """
    if not Path(file).is_file():
        raise UserError(f"there is no file {file}")
    foreign = read_agent(Path(file))
    target = None if out is None else RunFolder(Path(out))
    if target is not None:
        target.check_free()
    settings_class = algorithms.get(foreign.algorithm).settings
    known = {name: value for name, value in foreign.settings.items() if config.has_setting(settings_class, name)}
    network = {"hidden_sizes": foreign.hidden_sizes, "activation": foreign.activation}
    fixed: dict[str, Any] = {"net": network, "normalize_obs": False, "normalize_reward": False}
    if foreign.algorithm in ("td3", "ddpg", "sac") and foreign.critics:
        fixed["critics"] = len(foreign.critics)
    fixed = {name: value for name, value in fixed.items() if config.has_setting(settings_class, name)}
    values = {"algorithm": foreign.algorithm, "preset": False, "env": NO_ENV, **known, **fixed}
    overrides = config.from_keywords({**settings, **({} if env is None else {"env": env})})
    cfg = config.build([values], overrides)
    spaces = _spaces(foreign, cfg)
    learner = algorithms.get(foreign.algorithm).make(cfg.model_copy(update={"compile": False}), spaces)
    try:
        with torch.no_grad():
            _copy_networks(foreign, learner, spaces)
    except (RuntimeError, ValueError, IndexError, KeyError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"the networks in {file} don't fit {spaces.obs} and {spaces.action}: {reason}") from None
    if target is not None:
        parts = {name: part.state_dict() for name, part in vars(learner).items() if isinstance(part, nn.Module)}
        state = {"steps": 0, "policy": learner.policy.state_dict(), "longest_episode": 0, "learner": {"parts": parts}}
        card = {"algorithm": cfg.algorithm, "env": cfg.env.name, "steps": 0, "imported_from": Path(file).name}
        target.write_agent(cfg, state, card)
        target.write_spaces(spaces, None)
    return Agent(learner.policy, spaces, cfg)


def _spaces(foreign: ForeignAgent, cfg: config.RunConfig) -> Spaces:
    if cfg.env.name != NO_ENV:
        vector = envs.make_small_vector(envs.RegisteredEnv(cfg.env.name, cfg.env.options), 1, cfg.vector)
        vector.close()
        spaces = vector.spaces
    elif foreign.obs_space is None or foreign.action_space is None:
        raise UserError("the file doesn't hold its spaces; name the environment: zx.import_agent(file, env=...)")
    else:
        spaces = Spaces(foreign.obs_space, foreign.action_space)
    if is_image(spaces.obs):
        raise UserError("agents that learned from images can't be imported; only fully connected networks are read")
    return spaces


def _copy_networks(foreign: ForeignAgent, learner: Any, spaces: Spaces) -> None:
    if foreign.algorithm in ("ppo", "a2c"):
        _copy_actor_critic(foreign, learner.net, spaces)
    elif foreign.algorithm == "dqn":
        for net, layers in ((learner.net, foreign.actor), (learner.target_net, foreign.target_actor or foreign.actor)):
            _copy_mlp(layers[:-1], net.torso)
            _copy_linear(layers[-1], net.head)
    else:
        _copy_mlp(foreign.actor, learner.actor.layers)
        if foreign.critics:
            _copy_ensemble(foreign.critics, learner.critics.towers)
            _copy_ensemble(foreign.target_critics or foreign.critics, learner.target_critics.towers)
        if foreign.algorithm != "sac":
            _copy_mlp(foreign.target_actor or foreign.actor, learner.target_actor.layers)
        elif foreign.log_alpha is not None:
            learner.log_alpha[0].copy_(foreign.log_alpha.reshape(()))


def _copy_actor_critic(foreign: ForeignAgent, net: ActorCritic, spaces: Spaces) -> None:
    (critic,) = foreign.critics
    sizes = [len(bias) for _, bias in critic[:-1]]
    if sizes != foreign.hidden_sizes:
        raise UserError(
            f"its actor and critic have different hidden layers, {foreign.hidden_sizes} and {sizes}; an agent can be "
            f"imported if they are equal"
        )
    if hasattr(net, "towers"):
        _copy_ensemble([foreign.actor[:-1], critic[:-1]], net.towers)
    else:
        _copy_mlp(foreign.actor[:-1], net.actor)
        _copy_mlp(critic[:-1], net.critic)
    weight, bias = foreign.actor[-1]
    log_std = foreign.log_std
    space = spaces.action
    if isinstance(space, Box) and space.is_bounded():  # their means are in the environment's range, ours in [-1, 1]
        half = torch.from_numpy(np.asarray(0.5 * (space.high - space.low), np.float32))
        weight, bias = weight / half[:, None], (bias - torch.from_numpy(space.low)) / half - 1.0
        log_std = None if log_std is None else log_std - half.log()
    _copy_linear((weight, bias), net.policy_head.linear)
    _copy_linear(critic[-1], net.value_head.linear)
    if log_std is not None:
        net.policy_head.distribution.log_std.copy_(log_std.reshape(-1))


def _copy(source: Tensor, target: Tensor) -> None:
    if source.shape != target.shape:  # copy_ would broadcast
        raise ValueError(f"a tensor has shape {list(source.shape)}, expected {list(target.shape)}")
    target.copy_(source)


def _copy_linear(layer: tuple[Tensor, Tensor], linear: nn.Module) -> None:
    assert isinstance(linear, nn.Linear)
    _copy(layer[0], linear.weight)
    _copy(layer[1], linear.bias)


def _copy_mlp(layers: Layers, mlp: nn.Module) -> None:
    assert isinstance(mlp, MLP)
    for layer, linear in zip(layers, mlp.linears, strict=True):
        _copy_linear(layer, linear)


def _copy_ensemble(networks: list[Layers], ensemble: nn.Module) -> None:
    assert isinstance(ensemble, EnsembleMLP)
    columns = zip(*networks, strict=True)
    for column, weight, bias in zip(columns, ensemble.weights, ensemble.biases, strict=True):
        _copy(torch.stack([layer[0].T for layer in column]), weight)
        _copy(torch.stack([layer[1] for layer in column])[:, None], bias)
