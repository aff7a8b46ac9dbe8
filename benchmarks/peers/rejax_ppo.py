"""PPO by rejax, one compiled JAX program: `python rejax_ppo.py ROW`, the row as JSON. Prints one line of JSON.

Named otherwise than the library, which would else import this file.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from importlib.metadata import version
from typing import Any

TITLE = "rejax"
REQUIREMENTS = ["rejax==0.1.3", "gymnax==0.0.9"]  # it can't step the environments of newer ones
ALGORITHMS = ()  # of fixed_work.py: it has a study of its own, torch_tasks.py
ACTIVATIONS = {"silu": "swish"}  # as flax calls them


def make(row: dict[str, Any]) -> Any:
    from rejax import PPO

    assert row["clip_range"] == row["value_clip_range"], "rejax clips ratios and values alike"
    assert row["max_grad_norm"] is None, "rejax clips gradients number by number"
    rollout = row["num_envs"] * row["rollout_steps"]
    algorithm = PPO.create(
        env=row["env"],
        num_envs=row["num_envs"],
        num_steps=row["rollout_steps"],
        num_minibatches=rollout // row["minibatch_size"],
        num_epochs=row["epochs"],
        learning_rate=row["lr"],
        gamma=row["gamma"],
        gae_lambda=row["gae_lambda"],
        clip_eps=row["clip_range"],
        vf_coef=2 * row["value_coef"],  # of half the square
        ent_coef=row["entropy_coef"],
        total_timesteps=rollout,  # a call is one iteration, and what it ends with is no evaluation
        eval_freq=rollout,
        skip_initial_evaluation=True,
        agent_kwargs={
            "activation": ACTIVATIONS.get(row["activation"], row["activation"]),
            "hidden_layer_sizes": tuple(row["hidden_sizes"]),
        },
    )
    return algorithm.replace(eval_callback=lambda algorithm, state, rng: ())


def main() -> None:
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    import jax

    row = json.loads(sys.argv[1])
    algorithm = make(row)
    state = algorithm.init_state(jax.random.PRNGKey(row["seed"]))
    begin = time.perf_counter()
    # the old state's memory is the new one's
    iterate = jax.jit(lambda state: algorithm.train(train_state=state)[0], donate_argnums=0).lower(state).compile()
    compile_seconds = time.perf_counter() - begin
    rollout = row["num_envs"] * row["rollout_steps"]
    for _ in range(row["warmup_steps"] // rollout):
        state = iterate(state)
    jax.block_until_ready(state)
    marks = [(time.perf_counter(), time.process_time(), int(state.global_step), int(state.actor_ts.step))]
    for _ in range(row["measured_steps"] // rollout):
        state = iterate(state)
    jax.block_until_ready(state)
    marks.append((time.perf_counter(), time.process_time(), int(state.global_step), int(state.actor_ts.step)))
    seconds, cpu_seconds, env_steps, optimizer_steps = (end - begin for begin, end in zip(*marks, strict=True))
    weights = jax.tree.leaves((state.actor_ts.params, state.critic_ts.params))
    told = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "env_steps": env_steps,
        "optimizer_steps": optimizer_steps,
        "compile_seconds": compile_seconds,
        "parameters": sum(leaf.size for leaf in weights),
        "versions": {name: version(name) for name in ("rejax", "gymnax", "jax")}
        | {"python": platform.python_version()},
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
