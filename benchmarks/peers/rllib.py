"""Train a row with RLlib: `python rllib.py ROW`, with the row as JSON. Prints one line of JSON.

It uses RLlib's new API stack, the default. Without `workers` in the row, RLlib collects and updates in one process; Ray
runs even then. Its number of steps per iteration is only approximate, because environments that start an episode skip a
step. Its Adam always has an epsilon of 1e-8.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import Any

TITLE = "RLlib"
REQUIREMENTS = ["torch==2.13.0", "ray[rllib]==2.60.0", "gymnasium==1.2.2", "numpy==2.4.6"]
CONSTRAINED = False  # requires one version of Gymnasium
TOLERANCE = {"env_steps": 0.03}  # allowed relative difference from zhixing's counts

LOOPBACK = "127.0.0.1"
Row = dict[str, Any]


def ppo(row: Row) -> Any:
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    size = row["num_envs"] * row["rollout_steps"]
    config = common(PPOConfig(), row, row["rollout_steps"])
    config.training(
        train_batch_size_per_learner=size,
        # it appends steps to bootstrap from, which would add minibatches that are mostly masked
        minibatch_size=None if row["minibatch_size"] == size else row["minibatch_size"],
        num_epochs=row["epochs"],
        lambda_=row["gae_lambda"],
        clip_param=row["clip_range"],
        vf_clip_param=math.inf,
        vf_loss_coeff=row["value_coef"],
        entropy_coeff=row["entropy_coef"],
        use_kl_loss=False,
    )
    model = DefaultModelConfig(
        fcnet_hiddens=row["hidden_sizes"], fcnet_activation=row["activation"], vf_share_layers=False
    )
    return config.rl_module(model_config=model)


def dqn(row: Row) -> Any:
    from ray.rllib.algorithms.dqn import DQNConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    config = common(DQNConfig(), row, 1)
    config.training(
        train_batch_size_per_learner=row["batch_size"],
        replay_buffer_config={"type": "EpisodeReplayBuffer", "capacity": row["replay_capacity"]},
        num_steps_sampled_before_learning_starts=row["random_steps"],
        target_network_update_freq=row["target_update_interval"],  # in environment steps; there is one per update
        tau=1.0,
        epsilon=row["epsilon"],
        n_step=1,
        double_q=False,
        dueling=False,
        td_error_loss_fn="huber",
    )
    # steps per call of `train`, chosen such that calls end where the measurement starts and ends
    config.reporting(min_sample_timesteps_per_iteration=math.gcd(row["warmup_steps"], row["measured_steps"]))
    first, last = row["hidden_sizes"]
    model = DefaultModelConfig(
        fcnet_hiddens=[first],
        head_fcnet_hiddens=[last],
        fcnet_activation=row["activation"],
        head_fcnet_activation=row["activation"],
    )
    return config.rl_module(model_config=model)


ALGORITHMS = {"ppo": ppo, "dqn": dqn}


def common(config: Any, row: Row, steps: int) -> Any:
    workers = row.get("workers", 0)
    config.environment(register(row["env"]) if ":" in row["env"] else row["env"])
    config.env_runners(
        num_env_runners=workers,
        num_envs_per_env_runner=row["num_envs"] // max(1, workers),
        rollout_fragment_length=steps,
    )
    config.learners(num_learners=0)
    config.debugging(seed=row["seed"], log_level="ERROR")
    return config.training(lr=row["lr"], gamma=row["gamma"], grad_clip=row["max_grad_norm"], grad_clip_by="global_norm")


def register(name: str) -> str:
    """Register one of our environments, `module:Class`, with RLlib. Return its name there."""
    from ray.tune.registry import register_env

    module, _, env_class = name.partition(":")
    make = getattr(import_module(module), env_class)
    register_env(env_class, lambda options: make())
    return env_class


@contextmanager
def local_ray(cpus: int) -> Iterator[None]:
    """Run Ray without dashboard and usage statistics, reachable only from this machine, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="rllib-", ignore_cleanup_errors=True) as folder:
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "HOME": folder}  # results are written to the home folder
        import ray
        from ray._private import ray_constants

        ray_constants.ENABLE_RAY_CLUSTER = False  # otherwise it requires an address reachable by other machines
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            logging_level="ERROR",
            log_to_driver=False,
            object_store_memory=256 << 20,
            _node_ip_address=LOOPBACK,
            _temp_dir=folder,
        )
        try:
            address = ray.util.get_node_ip_address()
            assert address == LOOPBACK, f"Ray listens on {address}, which other machines can reach"
            yield
        finally:
            ray.shutdown()


def main() -> None:
    import torch
    from measurement import Snapshot, print_measurement, take_snapshot

    row = json.loads(sys.argv[1])
    workers = row.get("workers", 0)
    torch.set_num_threads(1)
    with local_ray(max(1, workers)):
        algorithm = ALGORITHMS[row["algorithm"]](row).build_algo()
        learner = algorithm.learner_group._learner
        ((_, optimizer),) = learner.get_optimizers_for_module("default_policy")
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]

        def optimizer_steps() -> int:
            return int(optimizer.state[weights[0]]["step"])

        snapshots: list[Snapshot] = []
        size = row["num_envs"] * row.get("rollout_steps", 1)
        if row["algorithm"] == "dqn":
            size = math.gcd(row["warmup_steps"], row["measured_steps"])
        for steps in (row["warmup_steps"], row["measured_steps"]):
            for _ in range(steps // size):
                result = algorithm.train()
            env_steps = int(result["num_env_steps_sampled_lifetime"])
            snapshots.append(take_snapshot(env_steps, optimizer_steps(), workers))
        algorithm.stop()
    print_measurement(snapshots, sum(weight.numel() for weight in weights), {TITLE: version("ray")})


if __name__ == "__main__":
    main()
