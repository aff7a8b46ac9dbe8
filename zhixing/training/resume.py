"""Resuming a run: the settings that may change, and restoring its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zhixing.config import RunConfig
from zhixing.core.spaces import Spaces
from zhixing.envs.vector.action_log import max_recorded_actions
from zhixing.errors import UserError
from zhixing.training.run_folder import RunFolder

if TYPE_CHECKING:
    from zhixing.training.callbacks import Evaluate
    from zhixing.training.loop import TrainingLoop

CHANGEABLE = {
    "budgets": ("env_steps", "episodes", "duration", "stop_return", "offline_updates"),
    "evaluations": (
        *("eval_every", "eval_episodes", "eval_num_envs", "eval_max_steps"),
        *("eval_env", "eval_video", "opponent", "eval_agents"),
    ),
    "logs and checkpoints": (
        *("log_every", "plot", "tensorboard", "wandb", "mlflow"),
        *("checkpoint_every", "keep_checkpoints"),
    ),
    "hardware and processes": (
        *("device", "num_threads", "compile", "distributed.workers", "distributed.address"),
        *("vector.backend", "vector.workers", "vector.on_crash", "vector.step_timeout", "vector.call_timeout"),
    ),
    "locations of data and code": ("dataset", "demonstrations", "expert", "imports"),
}


def changes(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, as old and new values by dotted name."""
    old, new = _flat(before.model_dump(mode="json")), _flat(after.model_dump(mode="json"))
    return {
        name: (old.get(name), new.get(name))
        for name in [*old, *(name for name in new if name not in old)]
        if old.get(name) != new.get(name)
    }


def check_changes(cfg: RunConfig, changed: Mapping[str, tuple[Any, Any]], run: str) -> None:
    """Raise `UserError` if a setting was changed that a resumed run can't apply."""
    allowed = {name for names in CHANGEABLE.values() for name in names}
    rejected = [name for name in changed if name not in allowed]
    if not rejected:
        return
    wrong = ", ".join(f"{name} from {_format(changed[name][0])} to {_format(changed[name][1])}" for name in rejected)
    groups = "; ".join(
        f"{group} ({', '.join(name for name in names if _has_setting(cfg, name))})"
        for group, names in CHANGEABLE.items()
        if any(_has_setting(cfg, name) for name in names)
    )
    advice = "start a new run"
    if not any(name == "algorithm" or name.startswith("env.") for name in rejected):
        settings = " ".join(f"{name}={_format(changed[name][1])}" for name in rejected)
        command = f"zhixing train {cfg.algorithm} --env {cfg.env.name} --init-from {run} {settings}"
        advice = f"start a new run with the weights of this one: {command}"
    raise UserError(f"resume can't change {wrong}. It can change {groups}. For other settings, {advice}")


def _has_setting(cfg: RunConfig, name: str) -> bool:
    return name.partition(".")[0] in type(cfg).model_fields


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = prefix + key
        flat |= _flat(value, f"{name}.") if isinstance(value, Mapping) and name != "eval_env" else {name: value}
    return flat


def _format(value: Any) -> str:
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value)


def restore(loop: TrainingLoop, evaluate: Evaluate, folder: RunFolder, spaces: Spaces, state: dict[str, Any]) -> None:
    """Restore a run from a checkpoint; note how many environments can't continue their episode."""
    try:
        state = _restore_buffer(loop, folder, state)
        lost = loop.load_state_dict(state["loop"])
    except UserError:
        raise
    except Exception as error:  # a manipulated checkpoint fails in many ways
        raise UserError(f"the checkpoint of {folder.path} doesn't fit its configuration: {error}") from error
    cfg = loop.cfg
    if cfg.stop_return is None or evaluate.last_return < cfg.stop_return:
        evaluate.reached = False  # the resumed run has a higher stop_return, or none
    if lost:
        folder.notices.append(
            f"{len(lost)} of {cfg.num_envs} environments of {cfg.env.name} start a new episode: they can't restore "
            f"the interrupted one, or it was longer than the recorded {max_recorded_actions(spaces):,} steps"
        )


def _restore_buffer(loop: TrainingLoop, folder: RunFolder, state: dict[str, Any]) -> dict[str, Any]:
    """Fill the buffer and return the checkpoint that was used: an older one if files of the given one are damaged."""
    try:
        if loop.replay is not None:
            loop.replay.load(state["replay"], folder.replay)
    except UserError as error:
        older = folder.load_before(state["steps"])
        if older is None:
            raise
        folder.notices.append(f"{error}; continuing from the checkpoint of step {older['steps']:,}")
        return _restore_buffer(loop, folder, older)
    return state
