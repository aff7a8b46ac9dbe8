"""Train PPO with rejax, one compiled JAX program: `python rejax_ppo.py ROW`, with the row as JSON.

Prints one line of JSON. The file isn't called rejax.py, so `import rejax` finds the library.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any

TITLE = "rejax"
REQUIREMENTS = ["rejax==0.1.3", "gymnax==0.0.9"]  # it can't step the environments of newer versions
ACTIVATIONS = {"silu": "swish"}  # names in flax


def make_algorithm(row: dict[str, Any]) -> Any:
    from rejax import PPO

    assert row["clip_range"] == row["value_clip_range"], "rejax uses one clip range for ratios and values"
    assert row["max_grad_norm"] is None, "rejax clips gradients elementwise"
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
        vf_coef=2 * row["value_coef"],  # rejax halves the squared error
        ent_coef=row["entropy_coef"],
        total_timesteps=rollout,  # one call of `train` is one iteration, without evaluation
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
    from measurement import print_measurement, take_snapshot

    row = json.loads(sys.argv[1])
    algorithm = make_algorithm(row)
    state = algorithm.init_state(jax.random.PRNGKey(row["seed"]))
    begin = time.perf_counter()
    # the new state reuses the memory of the old one
    iterate = jax.jit(lambda state: algorithm.train(train_state=state)[0], donate_argnums=0).lower(state).compile()
    compile_seconds = time.perf_counter() - begin
    rollout = row["num_envs"] * row["rollout_steps"]
    for _ in range(row["warmup_steps"] // rollout):
        state = iterate(state)
    jax.block_until_ready(state)
    snapshots = [take_snapshot(int(state.global_step), int(state.actor_ts.step))]
    for _ in range(row["measured_steps"] // rollout):
        state = iterate(state)
    jax.block_until_ready(state)
    snapshots.append(take_snapshot(int(state.global_step), int(state.actor_ts.step)))
    parameters = sum(leaf.size for leaf in jax.tree.leaves((state.actor_ts.params, state.critic_ts.params)))
    versions = {"rejax": version("rejax")}
    print_measurement(snapshots, parameters, versions, ("gymnax", "jax"), threads=1, compile_seconds=compile_seconds)


if __name__ == "__main__":
    main()
