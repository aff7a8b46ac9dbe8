"""Train a row with MindRL: `python mindrl.py ROW`, with the row as JSON. Prints one line of JSON.

MindRL only runs its own examples, here DQN in graph mode: an episode is one compiled graph that calls back into Python
for each environment step. Of MindSpore's wheels for Python 3.9, 2.0.0 works; with 2.7.0 MindRL can't create its replay
buffer. The other pinned versions are needed because MindSpore accepts newer ones that break it.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import version
from typing import Any

TITLE = "MindRL"
PYTHON = "3.9"
CONSTRAINED = False
REQUIREMENTS = [
    "mindspore==2.0.0",
    "mindspore-rl==0.7.0",
    "gym==0.26.2",
    "numpy==1.23.5",
    "scipy==1.10.1",
    "pillow==9.5.0",
    "protobuf==3.20.3",
]
ALGORITHMS: tuple[str, ...] = ()  # supports only rows with `example_of`


def make_session(row: dict[str, Any], folder: str) -> Any:
    """Make its DQN example without evaluations and checkpoints.

    It has no settings for the 1,000 random steps, the loss, and the target update (tau 0.05 every 5 steps).
    """
    from mindspore_rl.algorithm.dqn import DQNSession, config

    config.collect_env_params["GymEnvironment"]["name"] = row["env"]
    config.learner_params.update(lr=row["lr"], gamma=row["gamma"])
    config.policy_params.update(hidden_size=row["hidden_sizes"][0], epsi_high=row["epsilon"], epsi_low=row["epsilon"])
    config.algorithm_config["replay_buffer"]["params"].update(
        capacity=row["replay_capacity"], sample_size=row["batch_size"]
    )
    config.trainer_params.update(save_per_episode=0, eval_per_episode=0, ckpt_path=folder)
    return DQNSession()


def main() -> None:
    from measurement import Snapshot, print_measurement, take_snapshot, use_one_core

    row = json.loads(sys.argv[1])
    os.environ["GLOG_v"] = "3"  # noqa: SIM112 - log only errors
    if row["one_core"]:
        use_one_core()
    import gym
    import mindspore
    import numpy as np
    from mindspore_rl.algorithm.dqn import DQNTrainer
    from mindspore_rl.utils.callback import Callback

    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU", runtime_threads=1)
    mindspore.set_seed(row["seed"])
    total = row["warmup_steps"] + row["measured_steps"]
    snapshots: list[Snapshot] = []

    class StepCounter(gym.Wrapper):
        """Counts steps and truncates the episode at the end of the warm-up and of training."""

        steps = 0

        def step(self, action: Any) -> Any:
            self.steps += 1
            obs, reward, terminated, truncated, info = self.env.step(action)
            return obs, reward, terminated, truncated or self.steps in (row["warmup_steps"], total), info

    class Stopwatch(Callback):
        def episode_end(self, params: Any) -> None:
            params.loss.asnumpy()  # waits for the update
            if env.steps in (row["warmup_steps"], total):
                snapshots.append(take_snapshot(env.steps, optimizer_steps()))
            if env.steps >= total:
                raise StopIteration  # the budget of `session.run` is in episodes

    with tempfile.TemporaryDirectory() as folder:
        session = make_session(row, folder)
        gym_environment = session.msrl.collect_environment.environment
        env = gym_environment._env = StepCounter(gym_environment._env)
        optimizer = session.msrl.learner.policy_network_train.optimizer

        def optimizer_steps() -> int:
            """Compute the number of steps from the power of beta, which is all that its Adam keeps."""
            return round(float(np.log(optimizer.beta2_power.asnumpy()) / np.log(np.float32(0.999))))

        session.callbacks = [Stopwatch()]
        with suppress(StopIteration):
            session.run(class_type=DQNTrainer, episode=total)
    parameters = sum(parameter.size for parameter in optimizer.parameters)
    text = f"{version('mindspore-rl')} (MindSpore {version('mindspore')}, Python {platform.python_version()})"
    print_measurement(snapshots, parameters, {TITLE: text}, ("gym",), threads=1)


if __name__ == "__main__":
    main()
