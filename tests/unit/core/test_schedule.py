"""Schedules of learning rates and coefficients: their values, in runs, resumed and with wrong functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import differing_tensors

import zhixing as zx
from zhixing.core.schedule import make_schedule
from zhixing.errors import UserError

COEFFICIENTS = {"lr_schedule": "linear", "clip_range_schedule": "cosine", "entropy_coef_schedule": f"{__name__}:square"}


def square(fraction: float) -> float:
    return (1.0 - fraction) ** 2


def negative(fraction: float) -> float:
    return 0.5 - fraction


def word(fraction: float) -> str:
    return "half"


def two_arguments(fraction: float, initial: float) -> float:
    return initial


def test_values_by_hand() -> None:
    fractions = (0.0, 0.25, 0.5, 1.0)
    expected = {
        "linear": (1.0, 0.75, 0.5, 0.0),
        "cosine": (1.0, 0.8535534, 0.5, 0.0),  # (1 + cos(pi / 4)) / 2
        f"{__name__}:square": (1.0, 0.5625, 0.25, 0.0),
    }
    for name, values in expected.items():
        schedule = make_schedule("lr_schedule", name)
        assert schedule is not None
        assert [schedule(fraction) for fraction in fractions] == pytest.approx(values)
    assert make_schedule("lr_schedule", "constant") is None


@pytest.mark.parametrize(("function", "message"), [("word", "'half'"), ("two_arguments", "'initial'")])
def test_wrong_function_is_rejected_before_training(
    function: str, message: str, short_config: Callable, tmp_path: Path
) -> None:
    cfg = short_config("ppo", entropy_coef_schedule=f"{__name__}:{function}")
    with pytest.raises(UserError, match=f"entropy_coef_schedule=.*{message}"):
        zx.Session(cfg, tmp_path / "run", quiet=True)


def test_negative_factor_is_an_error() -> None:
    schedule = make_schedule("lr_schedule", f"{__name__}:negative")
    assert schedule is not None
    with pytest.raises(UserError, match=r"returned -0\.25 for the fraction 0\.75"):
        schedule(0.75)


class Record(zx.Callback):
    """Records the used fraction of the budget and the scheduled values in each iteration."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, float, float]] = []

    def iteration_begin(self, loop: zx.TrainingLoop) -> None:
        ppo: Any = loop.learner
        self.rows.append((loop.progress, ppo.optimizer.lr, float(ppo.clip_range), float(ppo.entropy_coef)))


class Interrupt(zx.Callback):
    def iteration_end(self, loop: zx.TrainingLoop, metrics: Mapping[str, Any]) -> None:
        if loop.progress >= 0.5:
            loop.stop("interrupted")


def test_scheduled_run_has_the_values_of_its_progress_and_resumes_exactly(
    short_config: Callable, tmp_path: Path
) -> None:
    cfg = short_config("ppo", lr=1e-2, entropy_coef=0.1, clip_range=0.4, **COEFFICIENTS)
    record = Record()
    zx.Session(cfg, tmp_path / "whole", [record], quiet=True).run()
    assert len({row[0] for row in record.rows}) > 2
    cosine = make_schedule("", "cosine")
    assert cosine is not None
    for fraction, lr, clip_range, entropy_coef in record.rows:
        expected = (1e-2 * (1 - fraction), 0.4 * cosine(fraction), 0.1 * (1 - fraction) ** 2)
        assert (lr, clip_range, entropy_coef) == pytest.approx(expected)
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "parts", [Interrupt()], quiet=True).run()
    zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert differing_tensors(tmp_path / "whole", tmp_path / "parts") == []


@pytest.mark.parametrize("optimizer", ["sgd", "torch.optim:NAdam"])
def test_run_with_another_optimizer_resumes_exactly(optimizer: str, short_config: Callable, tmp_path: Path) -> None:
    cfg = short_config("ppo", optimizer=optimizer, lr_schedule="cosine")
    zx.Session(cfg, tmp_path / "whole", quiet=True).run()
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "parts", [Interrupt()], quiet=True).run()
    zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert differing_tensors(tmp_path / "whole", tmp_path / "parts") == []


def test_functions_and_optimizers_given_in_python(short_config: Callable, tmp_path: Path) -> None:
    import torch

    cfg = short_config("dqn", lr=0.5, lr_schedule=lambda fraction: 0.5, optimizer=torch.optim.RAdam)
    session = zx.Session(cfg, tmp_path / "run", quiet=True)
    session.learner.set_progress(0.1)
    (optimizer,) = session.learner.optimizers().values()
    assert optimizer.lr == 0.25
    assert optimizer.custom is not None
    assert type(optimizer.custom.optimizer) is torch.optim.RAdam
    session.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_schedule": "linaer"}, "lr_schedule='linaer': unknown name 'linaer': did you mean 'linear'"),
        ({"optimizer": "adm"}, "did you mean 'adam'"),
        ({"optimizer_momentum": 0.9}, "optimizer_momentum=0.9 is for optimizer=sgd, not for adam"),
        ({"optimizer": "sgd", "optimizer_betas": [0.5, 0.9]}, "is for optimizer=adam or adamw, not for sgd"),
        ({"optimizer": "torch.optim:NAdam", "weight_decay": 0.1}, "pass it in your class or function"),
        ({"optimizer_betas": [0.9]}, "at least 2 items"),
        ({"optimizer_betas": [0.9, 1.0]}, "less than 1"),
    ],
)
def test_wrong_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        zx.config.load(algorithm="ppo", env="CartPole-v1", **settings)


def test_workers_of_a3c_reject_an_entropy_schedule() -> None:
    settings = {"algorithm": "a3c", "env": "CartPole-v1", "entropy_coef_schedule": "linear"}
    assert zx.config.load(**settings).algorithm == "a3c"
    with pytest.raises(UserError, match="entropy_coef_schedule=constant"):
        zx.config.load(**settings, distributed__workers=2)
