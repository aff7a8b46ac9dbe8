"""The buffers of a run: the replay buffer, and the extra buffers that its learner declares."""

from __future__ import annotations

from zhixing.buffers import Buffer, Episode, Hindsight, NStep, Prioritized, Reservoir, Sequence, Uniform, View
from zhixing.config import OffPolicyConfig, RunConfig, SelfPlayConfig
from zhixing.core.learner import Learner
from zhixing.core.seeding import stream
from zhixing.core.spaces import Spaces
from zhixing.envs.wrappers.goals import goal_functions
from zhixing.errors import UserError
from zhixing.offline import Dataset
from zhixing.training.builders.env import FewEnvs
from zhixing.training.data import storage_of
from zhixing.training.run_folder import RunFolder

Sampler = Uniform | Prioritized


def build_buffers(
    cfg: RunConfig,
    learner: Learner,
    spaces: Spaces,
    folder: RunFolder,
    *,
    data: Dataset | None = None,
    goal_env: FewEnvs | None = None,
) -> dict[str, Buffer]:
    """Make the buffers by name; `replay` is the one that updates sample. On-policy algorithms have none.

    With `data` the replay buffer reads a dataset. `goal_env` computes the rewards of relabeled goals.
    """
    if isinstance(cfg, SelfPlayConfig):
        return {"replay": Buffer(learner.fields, cfg.capacity, 1, sampler=Uniform(), view=NStep(1, cfg.gamma))}
    if not isinstance(cfg, OffPolicyConfig):
        return {} if data is None else {"replay": _data_buffer(cfg, learner, data, Uniform(), NStep(1, cfg.gamma))}
    replay = cfg.replay
    sampler = Prioritized(replay.alpha, replay.beta_start) if replay.prioritized else Uniform()
    view, relabel = _view(cfg, learner, spaces), None
    if goal_env is not None:
        relabel = Hindsight(*goal_functions(goal_env), replay.her_ratio)
    if data is not None:
        return {"replay": _data_buffer(cfg, learner, data, sampler, view, relabel)}

    def build(name: str, sampler: Sampler | Reservoir, view: View, relabel: Hindsight | None = None) -> Buffer:
        return Buffer(
            {**spaces.fields(), **learner.fields},
            replay.capacity,
            cfg.num_envs,
            sampler=sampler,
            view=view,
            relabel=relabel,
            frame_stack=replay.frame_stack,
            device=cfg.device if replay.on_device else "cpu",
            folder=folder.path / "replay-memory" / name if replay.on_disk else None,
        )

    buffers = {"replay": build("replay", sampler, view, relabel)}
    for name, kind in learner.further_buffers.items():
        extra = Uniform() if kind == "uniform" else Reservoir(stream(cfg.seed, name))
        buffers[name] = build(name, extra, NStep(1, cfg.gamma))
    return buffers


def _view(cfg: OffPolicyConfig, learner: Learner, spaces: Spaces) -> View:
    """Return the view that gives samples of the kind that the learner reads."""
    replay = cfg.replay
    views: dict[str, View] = {  # all are made, so wrong settings of any are rejected
        "transitions": NStep(replay.n_step, cfg.gamma, alive_only=spaces.individual_ends),
        "sequences": Sequence(replay.sequence_length, replay.burn_in),
        "episodes": Episode(),
    }
    return views[learner.reads]


def _data_buffer(
    cfg: RunConfig, learner: Learner, data: Dataset, sampler: Sampler, view: View, relabel: Hindsight | None = None
) -> Buffer:
    """Make a buffer that reads a dataset; raise `UserError` if the learner needs fields that datasets lack."""
    missing = [*learner.fields, *learner.further_buffers]
    if missing:
        raise UserError(
            f"{cfg.algorithm} with these settings needs what no data records ({', '.join(missing)}); set "
            f"net.recurrent=none, or learn in an environment"
        )
    return Buffer.over(storage_of(data), sampler=sampler, view=view, relabel=relabel)
