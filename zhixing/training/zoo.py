"""Export trained agents to folders with their configuration, weights and measured returns, and list them."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any, Literal, get_args

from zhixing import algorithms, config
from zhixing.config import RunConfig, flat_settings
from zhixing.config.display import WITHOUT_EFFECT, format_value
from zhixing.core import space_json
from zhixing.errors import UserError
from zhixing.nets.joint_policy import JointPolicy
from zhixing.training.agent import Agent, load_agent, load_state, open_source, read_spaces, restricted
from zhixing.training.resolve import NO_ENV
from zhixing.training.run import evaluate, make_greedy
from zhixing.training.run_folder import RunFolder, RunPath
from zhixing.utils.files import bundled_agents

Format = Literal["folder", "onnx", "torch"]


def export(
    run: RunPath | Agent,
    out: str | os.PathLike[str],
    format: Format = "folder",
    episodes: int = 100,
    seed: int = 0,
    checkpoint: str | int = "last",
    *,
    trust: bool = False,
    env: Any = None,
    net: Any = None,
) -> dict[str, Any]:
    """Write what is needed to act to a new folder, and return what is known of it.

    `folder` writes weights and configuration, which commands take as a run; it plays `episodes` first and keeps their
    results in `agent.json`. `onnx` and `torch` write a network that runs without zhixing, `agent.onnx` or `agent.pt2`,
    and its inputs and outputs in `interface.json`. They need no environment. The other arguments are those of
    `evaluate`.
    """
    if format not in get_args(Format):
        raise UserError(f"format={format!r}: allowed are {', '.join(get_args(Format))}")
    source = run.folder if isinstance(run, Agent) else RunFolder.open(run)
    target = RunFolder(Path(out))
    target.check_free()
    if format != "folder":
        agent = _greedy_agent(run, checkpoint, trust, env, net)
        return _export_network(agent, target.path, format)
    cfg, _ = open_source(run, trust, env, net)
    state = load_state(run, source, checkpoint)
    with restricted(source):
        saved = read_spaces(source, cfg) if source is not None else None
    if saved is None:
        assert isinstance(run, Agent)
        saved = run.spaces, None
    no_env = cfg.env.name == NO_ENV
    evaluation = None if no_env else evaluate(run, episodes, seed, checkpoint, trust=trust, env=env, net=net)
    summary = {} if evaluation is None else evaluation.summary()
    card = {
        "algorithm": cfg.algorithm,
        "env": cfg.env.name,
        "steps": state["steps"],
        "trained_by": train_command(cfg),
        "eval_seed": seed,
        **{name: round(value, 4) for name, value in summary.items()},
    }
    # the agent may run on another machine
    target.write_agent(cfg.model_copy(update={"device": "auto", "wandb": None, "mlflow": None}), state, card)
    target.write_spaces(*saved)
    return card


def _greedy_agent(run: RunPath | Agent, checkpoint: str | int, trust: bool, env: Any, net: Any) -> Agent:
    """Return an agent on the CPU that takes greedy actions."""
    if isinstance(run, Agent):
        acting = make_greedy(run.cfg.model_copy(update={"compile": False}))
        policy = algorithms.get(acting.algorithm).make(acting, run.spaces, "cpu").policy
        policy.load_state_dict(run.policy.state_dict())
        return Agent(policy, run.spaces, acting)
    source = RunFolder.open(run)
    cfg = source.read_config(trust, env, net, without_env=source.spaces_file.is_file())
    return load_agent(source, make_greedy(cfg), checkpoint)


def _export_network(agent: Agent, out: Path, format: str) -> dict[str, Any]:
    from zhixing.training.deploy import ActionModule, write_onnx, write_torch  # slow to import

    file = out / ("agent.onnx" if format == "onnx" else "agent.pt2")
    if file.exists():
        raise UserError(f"{file} exists already; choose another folder")
    cfg = agent.cfg
    policy = agent.policy.member(agent.policy.main()) if isinstance(agent.policy, JointPolicy) else agent.policy
    module = ActionModule(policy, policy.spaces)
    about = {"algorithm": cfg.algorithm, "env": cfg.env.name, **module.interface()}
    about |= {"spaces": space_json.encode(policy.spaces)}
    try:
        out.mkdir(parents=True, exist_ok=True)
        if format == "onnx":
            write_onnx(module, file, about)
        else:
            write_torch(module, file)
        (out / "interface.json").write_text(json.dumps(about, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"the folder {out} can't be written: {error.strerror or error}") from None
    return about


def train_command(cfg: RunConfig) -> str:
    """Return a command that repeats a run, with the settings that differ from the defaults and the preset."""
    base = config.build([{"algorithm": cfg.algorithm, "env": cfg.env.name, "preset": cfg.preset}], {})
    defaults = {**flat_settings(base.model_dump(mode="json")), "preset": True}
    settings = [
        f"{name}={_format(value)}"
        for name, value in flat_settings(cfg.model_dump(mode="json")).items()
        # a setting that is `auto` by default was only resolved
        if defaults.get(name) not in (value, "auto") and name not in {*WITHOUT_EFFECT, "init_from"}
    ]
    options = ["--seed", str(cfg.seed), *(["--init-from", _format(cfg.init_from)] if cfg.init_from else [])]
    return shlex.join(["zhixing", "train", cfg.algorithm, "--env", cfg.env.name, *options, *settings])


def _format(value: Any) -> str:
    """Return a value as on the command line. Absolute paths in the working directory become relative."""
    if isinstance(value, str) and os.path.isabs(value) and Path(value).is_relative_to(Path.cwd()):
        return os.path.relpath(value)
    return "null" if value is None else json.dumps(value) if isinstance(value, (list, dict)) else format_value(value)


def agents(folder: str | Path | None = None) -> dict[str, dict[str, Any]]:
    """Return the `agent.json` of each exported agent in a folder, by name; by default, of the bundled agents."""
    folder = bundled_agents() if folder is None else Path(folder)
    files = sorted(folder.glob("*/agent.json"))
    if not files:
        raise UserError(f"{folder} contains no exported agents; export one with `zhixing export RUN -o {folder}/NAME`")
    return {file.parent.name: RunFolder(file.parent).read_card() for file in files}
