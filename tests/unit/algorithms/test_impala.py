"""IMPALA: its gradient at equal policies, its correction at others, and that it learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from probe import probe

import zhixing as zx
from zhixing.core.batch import Batch


def learners(*names: str, **settings: float) -> tuple[list[zx.Learner], Batch]:
    """Learners with equal networks, and a rollout of the first one's policy."""
    env = zx.envs.make_vector("CartPole-v1", 2, backend="serial")
    learner = []
    for name in names:
        plain = {"max_grad_norm": None} | ({"gae_lambda": 1.0} if name == "a2c" else {})
        cfg = zx.config.load(algorithm=name, env="CartPole-v1", **plain, **settings)
        learner.append(zx.algorithms.get(name).make(cfg, env.spaces))
    actor = zx.Actor(learner[0].policy, env, {**learner[0].extra_fields, **learner[-1].extra_fields})
    batch = actor.collect(steps=30).batch.map(np.array).to("cpu")
    env.close()
    return learner, batch


def test_of_its_own_steps_it_learns_what_a2c_learns() -> None:
    """π = μ: targets are n-step returns, advantages r + γ v' - V are these minus V."""
    (impala, a2c), batch = learners("impala", "a2c")
    mine = probe(impala, impala.add_bootstrap_values(batch), "gradient_step").gradients["optimizer"]
    theirs = a2c.compute_gradients(batch).tensors
    for one, other in zip(mine, theirs, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_steps_that_the_policy_would_hardly_take_hardly_count() -> None:
    """μ took actions with a chance e^5 times as high as π's: rho = e^-5, and the policy's gradient is as small."""
    (impala,), batch = learners("impala", value_coef=0.0, trace_lambda=0.0)
    usual = torch.cat(
        [g.flatten() for g in probe(impala, impala.add_bootstrap_values(batch), "gradient_step").gradients["optimizer"]]
    ).clone()
    other = batch.replace(logp=batch.logp + 5.0)
    result = probe(impala, impala.add_bootstrap_values(other), "gradient_step")
    assert result.metrics["ratio"].item() == pytest.approx(np.exp(-5.0), rel=1e-4)
    rare = torch.cat([g.flatten() for g in result.gradients["optimizer"]])
    # the next state's target, V + rho delta, is another too: so not exactly, but in size
    assert rare.norm().item() < 3 * np.exp(-5.0) * usual.norm().item()


def test_learns_cartpole_with_weights_that_are_old(tmp_path: Path) -> None:
    """Four actors with two environments each, so that rollouts are four updates old. Chance gives about 22."""
    result = zx.train(
        "impala", env="CartPole-v1", seed=1, actors=4, env_steps=16_000, eval_every_steps=0, eval_episodes=5,
        num_threads=1, vector__backend="serial", out=tmp_path / "run", quiet=True, tensorboard=False,
    )  # fmt: skip
    assert result["final_return"] > 200
