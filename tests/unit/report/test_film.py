"""Runs that film and draw themselves: what is shown, and that nothing else changes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import pytest
from conftest import differing_tensors, metrics_rows
from matplotlib.image import imread
from PIL import Image
from test_video import greys

import zhixing as zx
from zhixing.training.callbacks import Callback
from zhixing.training.callbacks.tensorboard import as_gif
from zhixing.training.loop import TrainingLoop

SHORT = {"env_steps": 256, "num_envs": 2, "eval_every_steps": 128, "eval_episodes": 3, "log_every_steps": 64}
SHORT |= {"vector__backend": "serial", "tensorboard": False, "checkpoint_every_steps": 64}
ROLLOUT = {"rollout_steps": 32, "minibatch_size": 64}


class StopAt(Callback):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def iteration_end(self, loop: TrainingLoop, metrics: Any) -> None:
        if loop.steps >= self.steps:
            loop.stop("interrupted")


def videos(run: Path) -> dict[str, int]:
    """The number of frames of each."""
    return {file.stem: imageio_ffmpeg.count_frames_and_secs(str(file))[0] for file in (run / "videos").iterdir()}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ppo", {"env": "CartPole-v1", **ROLLOUT, "eval_stochastic": True}),  # whose evaluations draw random numbers
        ("dqn", {"env": "CartPole-v1", "learning_starts": 64, "net__recurrent": "gru", "updates_per_step": 0.05}),
        ("mcts", {"env": "toy/match", "simulations": 3, "eval_every_steps": 256}),
    ],
)
def test_a_run_that_films_is_bit_for_bit_the_one_that_does_not(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    for film in (False, True):
        zx.train(name, out=tmp_path / str(film), quiet=True, **{**SHORT, **settings}, eval_video=film)
    assert differing_tensors(tmp_path / "True", tmp_path / "False") == []
    assert metrics_rows(tmp_path / "True") == metrics_rows(tmp_path / "False")
    results = [json.loads((tmp_path / run / "result.json").read_text()) for run in ("True", "False")]
    assert results[0]["final_return"] == results[1]["final_return"]
    assert not (tmp_path / "False" / "videos").exists()
    assert all(frames > 1 for frames in videos(tmp_path / "True").values())


def test_each_evaluation_is_one_whole_episode(tmp_path: Path) -> None:
    """The task's picture grows brighter by 40 at each of five steps; a black line and column pad it."""
    zx.train("ppo", "test_video:Clock", out=tmp_path / "run", quiet=True, eval_video=True, **SHORT, **ROLLOUT)
    assert videos(tmp_path / "run") == {"000000000128": 6, "000000000256": 6}
    bright = 33 * 47 / (34 * 48)
    shown = greys(tmp_path / "run" / "videos" / "000000000256.mp4")
    assert shown == pytest.approx([40 * t * bright for t in range(6)], abs=6)


def test_tensorboard_shows_the_videos_as_moving_images(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = {**SHORT, **ROLLOUT, "tensorboard": True, "eval_video": True}
    zx.train("ppo", "test_video:Clock", out=tmp_path / "run", quiet=True, **settings)
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    images = events.Images("eval/video")
    assert [image.step for image in images] == [128, 256]
    for image in images:
        with Image.open(io.BytesIO(image.encoded_image_string)) as gif:
            assert gif.format == "GIF"
            assert gif.size == (image.width, image.height)
            assert gif.n_frames > 1
    assert as_gif(tmp_path / "run" / "config.yaml") is None  # no video


def test_a_resumed_run_films_the_same_episodes(tmp_path: Path) -> None:
    cfg = zx.config.load(algorithm="ppo", env="toy/match", eval_video=True, **SHORT, **ROLLOUT)
    zx.Session(cfg, tmp_path / "whole", quiet=True).run()
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "parts", [StopAt(192)], quiet=True).run()
    zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert videos(tmp_path / "whole") == videos(tmp_path / "parts")
    for file in (tmp_path / "whole" / "videos").iterdir():
        assert file.read_bytes() == (tmp_path / "parts" / "videos" / file.name).read_bytes()


class InterruptFilm(Callback):
    """Presses Ctrl-C in the film of the evaluation at `steps`, whose own episodes take 11 looks."""

    def __init__(self, steps: int) -> None:
        self.steps, self.looks = steps, 0

    def evaluation_step(self, loop: TrainingLoop) -> None:
        self.looks += loop.steps == self.steps
        if self.looks == 15:
            loop.stop("interrupted")


@pytest.mark.parametrize("steps", [128, 256])
def test_a_film_that_was_interrupted_is_made_when_the_run_is_resumed(steps: int, tmp_path: Path) -> None:
    cfg = zx.config.load(algorithm="ppo", env="toy/match", eval_video=True, **SHORT, **ROLLOUT)
    zx.Session(cfg, tmp_path / "whole", quiet=True).run()
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "parts", [InterruptFilm(steps)], quiet=True).run()
    assert f"{steps:012d}" not in videos(tmp_path / "parts")
    zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert videos(tmp_path / "whole") == videos(tmp_path / "parts")
    assert metrics_rows(tmp_path / "whole") == metrics_rows(tmp_path / "parts")
    assert differing_tensors(tmp_path / "whole", tmp_path / "parts") == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"env": "test_video:Blind", "eval_video": True}, "can't be filmed"),
        ({"env": "toy/match", "plot": "entropie"}, "unknown column 'entropie': did you mean 'entropy'"),
    ],
)
def test_what_cannot_be_shown_is_told_before_anything_is_trained(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(zx.UserError, match=words):
        zx.train("ppo", out=tmp_path / "run", quiet=True, **settings)
    assert not (tmp_path / "run").exists()


def test_numbers_of_the_task_are_logged_for_evaluations_too(tmp_path: Path) -> None:
    cfg = zx.config.load(algorithm="vdn", env="skirmish/3m", plot="win_rate", learning_starts=64, **SHORT)
    zx.Session(cfg, tmp_path / "run", quiet=True).run()
    header, *rows = metrics_rows(tmp_path / "run")
    column, evaluated = header.index("eval_win_rate"), header.index("eval_return_mean")
    assert "win_rate" in header
    assert [bool(row[column]) for row in rows] == [bool(row[evaluated]) for row in rows]
    assert all(0.0 <= float(row[column]) <= 1.0 for row in rows if row[column])
    assert imread(tmp_path / "run" / "plot.png").shape[2] == 4


def test_a_file_of_metrics_that_was_begun_without_a_column_goes_on_without_it(tmp_path: Path) -> None:
    """As a run of an older version, which logged fewer."""
    cfg = zx.config.load(algorithm="ppo", env="toy/match", **SHORT, **ROLLOUT)
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "run", [StopAt(64)], quiet=True).run()
    file = tmp_path / "run" / "metrics.csv"
    before = file.read_text()
    renamed = before.replace(",entropy,", ",entropi,")  # as long: the file's length is known to the checkpoint
    assert renamed != before
    file.write_text(renamed)
    zx.Session.resume(tmp_path / "run", quiet=True).run()
    header, *rows = metrics_rows(tmp_path / "run")
    assert {len(row) for row in rows} == {len(header)}
    assert [row[header.index("entropi")] == "" for row in rows] == [False, True, True, True]
    assert all(row[header.index("kl")] for row in rows)
