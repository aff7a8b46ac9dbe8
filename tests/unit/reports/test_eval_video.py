"""Tests of the settings `eval_video` and `plot`, which must not change the training."""

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
from test_video import gray_levels

import zhixing as zx
from zhixing.training.callbacks import Callback
from zhixing.training.callbacks.tensorboard import to_gif
from zhixing.training.loop import TrainingLoop

SHORT = {"env_steps": 256, "num_envs": 2, "eval_every": 128, "eval_episodes": 3, "log_every": 64}
SHORT |= {"vector__backend": "serial", "tensorboard": False, "checkpoint_every": 64}
ROLLOUT = {"rollout_steps": 32, "minibatch_size": 64}


class StopAt(Callback):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def iteration_end(self, loop: TrainingLoop, metrics: Any) -> None:
        if loop.steps >= self.steps:
            loop.stop("interrupted")


def videos(run: Path) -> dict[str, int]:
    """Return the number of frames of each video."""
    return {file.stem: imageio_ffmpeg.count_frames_and_secs(str(file))[0] for file in (run / "videos").iterdir()}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ppo", {"env": "CartPole-v1", **ROLLOUT, "eval_stochastic": True}),  # its evaluations use random numbers
        ("dqn", {"env": "CartPole-v1", "learning_starts": 64, "net__recurrent": "gru", "updates_per_step": 0.05}),
        ("mcts", {"env": "toy/match", "simulations": 3, "eval_every": 256}),
    ],
)
def test_recording_does_not_change_the_run(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    for eval_video in (False, True):
        zx.train(name, out=tmp_path / str(eval_video), quiet=True, **{**SHORT, **settings}, eval_video=eval_video)
    assert differing_tensors(tmp_path / "True", tmp_path / "False") == []
    assert metrics_rows(tmp_path / "True") == metrics_rows(tmp_path / "False")
    results = [json.loads((tmp_path / run / "result.json").read_text()) for run in ("True", "False")]
    assert results[0]["final_return"] == results[1]["final_return"]
    assert not (tmp_path / "False" / "videos").exists()
    assert all(frames > 1 for frames in videos(tmp_path / "True").values())


def test_each_evaluation_records_one_complete_episode(tmp_path: Path) -> None:
    """The image gets brighter by 40 at each of five steps; a black row and column pad it."""
    zx.train("ppo", "test_video:BrighteningEnv", out=tmp_path / "run", quiet=True, eval_video=True, **SHORT, **ROLLOUT)
    assert videos(tmp_path / "run") == {"000000000128": 6, "000000000256": 6}
    padding = 33 * 47 / (34 * 48)
    actual = gray_levels(tmp_path / "run" / "videos" / "000000000256.mp4")
    assert actual == pytest.approx([40 * t * padding for t in range(6)], abs=6)


def test_tensorboard_shows_the_videos_as_animated_images(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = {**SHORT, **ROLLOUT, "tensorboard": True, "eval_video": True}
    zx.train("ppo", "test_video:BrighteningEnv", out=tmp_path / "run", quiet=True, **settings)
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    images = events.Images("eval/video")
    assert [image.step for image in images] == [128, 256]
    for image in images:
        with Image.open(io.BytesIO(image.encoded_image_string)) as gif:
            assert gif.format == "GIF"
            assert gif.size == (image.width, image.height)
            assert gif.n_frames > 1
    assert to_gif(tmp_path / "run" / "config.yaml") is None  # not a video


def test_resumed_run_records_the_same_episodes(tmp_path: Path) -> None:
    cfg = zx.config.load(algorithm="ppo", env="toy/match", eval_video=True, **SHORT, **ROLLOUT)
    zx.Session(cfg, tmp_path / "uninterrupted", quiet=True).run()
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "resumed", [StopAt(192)], quiet=True).run()
    zx.Session.resume(tmp_path / "resumed", quiet=True).run()
    assert videos(tmp_path / "uninterrupted") == videos(tmp_path / "resumed")
    for file in (tmp_path / "uninterrupted" / "videos").iterdir():
        assert file.read_bytes() == (tmp_path / "resumed" / "videos" / file.name).read_bytes()


class InterruptVideo(Callback):
    """Stop the run while it records the evaluation at `steps`. The evaluation itself has 11 evaluation steps."""

    def __init__(self, steps: int) -> None:
        self.steps, self.num_calls = steps, 0

    def evaluation_step(self, loop: TrainingLoop) -> None:
        self.num_calls += loop.steps == self.steps
        if self.num_calls == 15:
            loop.stop("interrupted")


@pytest.mark.parametrize("steps", [128, 256])
def test_interrupted_video_is_recorded_on_resume(steps: int, tmp_path: Path) -> None:
    cfg = zx.config.load(algorithm="ppo", env="toy/match", eval_video=True, **SHORT, **ROLLOUT)
    zx.Session(cfg, tmp_path / "uninterrupted", quiet=True).run()
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "resumed", [InterruptVideo(steps)], quiet=True).run()
    assert f"{steps:012d}" not in videos(tmp_path / "resumed")
    zx.Session.resume(tmp_path / "resumed", quiet=True).run()
    assert videos(tmp_path / "uninterrupted") == videos(tmp_path / "resumed")
    assert metrics_rows(tmp_path / "uninterrupted") == metrics_rows(tmp_path / "resumed")
    assert differing_tensors(tmp_path / "uninterrupted", tmp_path / "resumed") == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env": "test_video:NoRenderEnv", "eval_video": True}, "can't be recorded"),
        ({"env": "toy/match", "plot": "entropie"}, "unknown column 'entropie': did you mean 'entropy'"),
    ],
)
def test_unrecordable_env_and_unknown_column_are_rejected_before_training(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(zx.UserError, match=message):
        zx.train("ppo", out=tmp_path / "run", quiet=True, **settings)
    assert not (tmp_path / "run").exists()


def test_info_keys_are_logged_for_evaluations(tmp_path: Path) -> None:
    cfg = zx.config.load(algorithm="vdn", env="skirmish/3m", plot="win_rate", learning_starts=64, **SHORT)
    zx.Session(cfg, tmp_path / "run", quiet=True).run()
    header, *rows = metrics_rows(tmp_path / "run")
    win_rate, mean_return = header.index("eval_win_rate"), header.index("eval_return_mean")
    assert "win_rate" in header
    assert [bool(row[win_rate]) for row in rows] == [bool(row[mean_return]) for row in rows]
    assert all(0.0 <= float(row[win_rate]) <= 1.0 for row in rows if row[win_rate])
    assert imread(tmp_path / "run" / "plot.png").shape[2] == 4


def test_resumed_metrics_file_keeps_its_columns(tmp_path: Path) -> None:
    """The file may come from an older version that logged fewer metrics."""
    cfg = zx.config.load(algorithm="ppo", env="toy/match", **SHORT, **ROLLOUT)
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "run", [StopAt(64)], quiet=True).run()
    file = tmp_path / "run" / "metrics.csv"
    before = file.read_text()
    renamed = before.replace(",entropy,", ",entropi,")  # same length: the checkpoint stores the file's length
    assert renamed != before
    file.write_text(renamed)
    zx.Session.resume(tmp_path / "run", quiet=True).run()
    header, *rows = metrics_rows(tmp_path / "run")
    assert {len(row) for row in rows} == {len(header)}
    assert [row[header.index("entropi")] == "" for row in rows] == [False, True, True, True]
    assert all(row[header.index("kl")] for row in rows)
