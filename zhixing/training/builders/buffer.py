"""Build the replay buffer of a run."""

from __future__ import annotations

from zhixing.algorithms.multi_policy import MultiPolicy
from zhixing.buffers import HER, Buffer, BufferGroup, EpisodeView, NStep, Prioritized, SequenceView, Uniform, View
from zhixing.config import OffPolicyConfig, RunConfig, SelfPlayConfig
from zhixing.core.learner import Learner
from zhixing.core.spaces import Spaces
from zhixing.envs.wrappers.goals import goal_functions
from zhixing.errors import UserError
from zhixing.offline import Dataset
from zhixing.training.builders.env import FewEnvs
from zhixing.training.data import open_ring
from zhixing.training.run_folder import RunFolder


def build_buffer(
    cfg: RunConfig,
    learner: Learner,
    spaces: Spaces,
    folder: RunFolder,
    *,
    data: Dataset | None = None,
    goal_env: FewEnvs | None = None,
) -> Buffer | BufferGroup | None:
    """Build the buffer that updates sample from, or return None for on-policy algorithms.

    With `data` the buffer reads a dataset. `goal_env` computes the rewards of relabeled goals. Several learners get a
    group of buffers.
    """
    if isinstance(learner, MultiPolicy):
        parts = {
            name: build_buffer(learner.configs[name], part, part.spaces, folder)
            for name, part in learner.learners.items()
        }
        buffers = {name: buffer for name, buffer in parts.items() if isinstance(buffer, Buffer)}
        return BufferGroup(buffers) if buffers else None
    if isinstance(cfg, SelfPlayConfig):
        return Buffer(learner.extra_fields, cfg.capacity, 1, sampler=Uniform(), view=NStep(1, cfg.gamma))
    if not isinstance(cfg, OffPolicyConfig):
        return None if data is None else _data_buffer(cfg, learner, data, Uniform(), NStep(1, cfg.gamma))
    replay = cfg.replay
    sampler = Prioritized(replay.alpha, replay.beta_start) if replay.prioritized else Uniform()
    view = _view(cfg, learner, spaces)
    her = None if goal_env is None else HER(*goal_functions(goal_env), replay.her_ratio)
    if data is not None:
        return _data_buffer(cfg, learner, data, sampler, view, her)
    return Buffer(
        {**spaces.fields(), **learner.extra_fields},
        replay.capacity,
        cfg.num_envs,
        sampler=sampler,
        view=view,
        her=her,
        frame_stack=spaces.stack,
        device=cfg.device if replay.on_device else "cpu",
        folder=folder.path / "replay-memory" if replay.on_disk else None,
    )


def _view(cfg: OffPolicyConfig, learner: Learner, spaces: Spaces) -> View:
    """Return the view that makes samples of the learner's `sample_type`."""
    replay = cfg.replay
    views: dict[str, View] = {  # all are made, so invalid settings of any are rejected
        "transitions": NStep(replay.n_step, cfg.gamma, alive_only=spaces.individual_termination),
        "sequences": SequenceView(replay.sequence_length, replay.burn_in),
        "episodes": EpisodeView(),
    }
    return views[learner.sample_type]


def _data_buffer(
    cfg: RunConfig,
    learner: Learner,
    data: Dataset,
    sampler: Uniform | Prioritized,
    view: View,
    her: HER | None = None,
) -> Buffer:
    """Build a buffer that reads a dataset. Raise `UserError` if the learner needs fields that datasets don't have."""
    if learner.extra_fields:
        raise UserError(
            f"{cfg.algorithm} with these settings needs the fields {', '.join(learner.extra_fields)}, which datasets "
            f"don't have; set net.recurrent=none, or train in an environment"
        )
    return Buffer.from_ring(open_ring(data), sampler=sampler, view=view, her=her)
