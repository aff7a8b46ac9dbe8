"""Gradients of IMPALA with equal and different policies, and training with old weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from probe import probe

import zhixing as zx
from zhixing.core.batch import Batch


def make_learners(*names: str, **settings: float) -> tuple[list[zx.Learner], Batch]:
    """Return learners with equal networks, and a rollout of the first one's policy."""
    env = zx.envs.make_vector("CartPole-v1", 2, backend="serial")
    learners = []
    for name in names:
        base = {"max_grad_norm": None} | ({"gae_lambda": 1.0} if name == "a2c" else {})
        cfg = zx.config.load(algorithm=name, env="CartPole-v1", **base, **settings)
        learners.append(zx.algorithms.get(name).make(cfg, env.spaces))
    actor = zx.Actor(learners[0].policy, env, {**learners[0].extra_fields, **learners[-1].extra_fields})
    batch = actor.collect(steps=30).batch.map(np.array).to("cpu")
    env.close()
    return learners, batch


def test_gradient_on_policy_equals_that_of_a2c() -> None:
    # if π = μ, the targets are n-step returns, and the advantages r + γ v' - V are these minus V
    (impala, a2c), batch = make_learners("impala", "a2c")
    gradients = probe(impala, impala.add_bootstrap_values(batch), "gradient_step").gradients["optimizer"]
    for gradient, expected in zip(gradients, a2c.compute_gradients(batch).tensors, strict=True):
        assert torch.allclose(gradient, expected, atol=1e-5)


def test_policy_gradient_is_scaled_by_the_importance_ratio() -> None:
    # if μ takes the actions with e^5 times the probability of π, rho = e^-5 scales the policy gradient
    (impala,), batch = make_learners("impala", value_coef=0.0, trace_lambda=0.0)
    result = probe(impala, impala.add_bootstrap_values(batch), "gradient_step")
    on_policy = torch.cat([g.flatten() for g in result.gradients["optimizer"]])
    off_policy_batch = batch.replace(logp=batch.logp + 5.0)
    result = probe(impala, impala.add_bootstrap_values(off_policy_batch), "gradient_step")
    assert result.metrics["ratio"].item() == pytest.approx(np.exp(-5.0), rel=1e-4)
    off_policy = torch.cat([g.flatten() for g in result.gradients["optimizer"]])
    # only approximately, because the target of the next state, V + rho delta, changes as well
    assert off_policy.norm().item() < 3 * np.exp(-5.0) * on_policy.norm().item()


def test_learns_cartpole_with_old_weights(tmp_path: Path) -> None:
    # four actors alternate, so rollouts are four updates old. Random actions have a return of about 22
    result = zx.train(
        "impala", env="CartPole-v1", seed=1, actors=4, env_steps=16_000, eval_every=0, eval_episodes=5,
        num_threads=1, vector__backend="serial", out=tmp_path / "run", quiet=True, tensorboard=False,
    )  # fmt: skip
    assert result["final_return"] > 200
