"""Videos of evaluations: how the agent plays by now."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zhixing.actor import Actor
from zhixing.callbacks.base import Callback
from zhixing.ops.seeding import stream
from zhixing.video import Video, filmed, without_screen

if TYPE_CHECKING:
    from zhixing.actor import Evaluation
    from zhixing.policy import Policy
    from zhixing.trainer import Loop


class Film(Callback):
    """At each evaluation writes `videos/STEPS.mp4`: one more episode, played as those of the evaluation are.

    It has a copy of the task and random numbers of its own, so that training and evaluations stay as they are without
    it. The same steps give the same film, also after a resume.
    """

    def __init__(
        self, run: Path, policy: Policy, env: str, options: dict[str, Any], device: torch.device | str = "cpu"
    ) -> None:
        """A task that can't be drawn is refused here, before anything is trained."""
        without_screen()
        self.folder, self.ends = run / "videos", list[Any]()
        self.env = filmed(env, options, self.ends)
        try:
            self.actor = Actor(policy, self.env, device=device)
            self.env.reset(seed=0)
            self.env.render()
        except BaseException:
            self.env.close()
            raise

    def evaluation_end(self, loop: Loop, evaluation: Evaluation) -> None:
        self.ends.clear()
        path = self.folder / f"{loop.steps:012d}.mp4"
        with loop.paused(), Video(path, float(self.env.metadata["render_fps"])) as video:

            def look() -> None:
                video.add(self.ends.pop() if self.ends else self.env.render())

            self.actor.evaluate(1, stream(loop.cfg.seed, "film", loop.steps), look)
        loop.video_recorded(path)

    def close(self) -> None:
        self.env.close()
