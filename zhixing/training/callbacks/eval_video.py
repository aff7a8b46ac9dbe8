"""Record a video at each evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from zhixing.collectors.actor import Actor
from zhixing.collectors.evaluation import default_eval_steps
from zhixing.core.seeding import derive_seed
from zhixing.training.callbacks.base import Callback, EvaluationInterrupted

if TYPE_CHECKING:
    from zhixing.collectors.evaluation import Evaluation
    from zhixing.config import RunConfig
    from zhixing.core.policy import Policy
    from zhixing.training.loop import TrainingLoop
    from zhixing.training.run_folder import RunFolder


class EvalVideo(Callback):
    """Record one more episode at each evaluation, to `videos/STEPS.mp4`.

    It uses a separate environment and random stream, so it doesn't change training or evaluations. The same step gives
    the same video, also in a resumed run, which records an interrupted video again.
    """

    def __init__(self, run: RunFolder, policy: Policy, cfg: RunConfig, device: torch.device | str = "cpu") -> None:
        """Raise `UserError` if the environment can't be rendered."""
        from zhixing.reports.video import make_rendered_env, use_offscreen_rendering

        use_offscreen_rendering()
        self.folder = run.path / "videos"
        self.missing = False  # the last video was interrupted
        self.env = make_rendered_env(cfg.env.name, {**cfg.env.options, **cfg.eval_env}, cfg.vector, run.crashes)
        try:
            self.actor = Actor(policy, self.env, device=device)
            self.env.reset(seed=0)
            self.env.render()
        except BaseException:
            self.env.close()
            raise

    def train_begin(self, loop: TrainingLoop) -> None:
        if self.missing:
            self._record(loop)

    def evaluation_end(self, loop: TrainingLoop, evaluation: Evaluation) -> None:
        self._record(loop)

    def _record(self, loop: TrainingLoop) -> None:
        try:
            self._write(loop)
            self.missing = False
        except EvaluationInterrupted:
            self.missing = loop.interrupted = True

    def _write(self, loop: TrainingLoop) -> None:
        from zhixing.reports.video import VideoWriter

        path = self.folder / f"{loop.steps:012d}.mp4"
        with loop.paused(), VideoWriter(path, float(self.env.metadata["render_fps"])) as video:

            def on_step() -> None:
                loop.evaluation_step()
                video.add(self.env.render())

            max_steps = loop.cfg.eval_max_steps or default_eval_steps(self.env.max_episode_steps, loop.longest_so_far)
            self.actor.evaluate(1, derive_seed(loop.cfg.seed, "film", loop.steps), on_step, max_steps)
        loop.video_recorded(path)

    def state_dict(self) -> dict[str, Any]:
        return {"missing": self.missing}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.missing = bool(state.get("missing", False))

    def close(self) -> None:
        self.env.close()
