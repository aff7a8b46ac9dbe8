"""A row of the benchmark done by MindRL: `python mindrl.py ROW`, the row as JSON. Prints one line of JSON.

It does its own examples only, here DQN in graph mode: an episode is one compiled graph, which calls back for each step
of the task. Of the wheels of MindSpore that are offered for Python 3.9, 2.0.0 suits it; with 2.7.0 its replay can't be
made. MindSpore doesn't limit the versions of what it needs, and later ones break it, so they are here.
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
ALGORITHMS: tuple[str, ...] = ()  # in settings of others


def session_of(row: dict[str, Any], folder: str) -> Any:
    """Its example, without evaluations, checkpoints and what it prints after each episode.

    A thousand random steps, the loss, and a target that moves by 0.05 every 5 steps aren't settings there.
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
    import telling

    row = json.loads(sys.argv[1])
    os.environ["GLOG_v"] = "3"  # noqa: SIM112 - errors only
    if row["one_core"]:
        telling.one_core()
    import gym
    import mindspore
    import numpy as np
    from mindspore_rl.algorithm.dqn import DQNTrainer
    from mindspore_rl.utils.callback import Callback

    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU", runtime_threads=1)
    mindspore.set_seed(row["seed"])
    total = row["warmup_steps"] + row["measured_steps"]
    marks: list[telling.Mark] = []

    class Counted(gym.Wrapper):
        """Counts steps and ends an episode where the clock starts or stops."""

        steps = 0

        def step(self, action: Any) -> Any:
            self.steps += 1
            obs, reward, terminated, truncated, info = self.env.step(action)
            return obs, reward, terminated, truncated or self.steps in (row["warmup_steps"], total), info

    class Stopwatch(Callback):
        def episode_end(self, params: Any) -> None:
            params.loss.asnumpy()  # so that it is done
            if task.steps in (row["warmup_steps"], total):
                marks.append(telling.mark(task.steps, optimizer_steps()))
            if task.steps >= total:
                raise StopIteration  # training is asked for in episodes, but has to end at a step

    with tempfile.TemporaryDirectory() as folder:
        session = session_of(row, folder)
        gym_environment = session.msrl.collect_environment.environment
        task = gym_environment._env = Counted(gym_environment._env)
        optimizer = session.msrl.learner.policy_network_train.optimizer

        def optimizer_steps() -> int:
            """Adam has no other count of them than the power of its beta."""
            return round(float(np.log(optimizer.beta2_power.asnumpy()) / np.log(np.float32(0.999))))

        session.callbacks = [Stopwatch()]
        with suppress(StopIteration):
            session.run(class_type=DQNTrainer, episode=total)
    parameters = sum(parameter.size for parameter in optimizer.parameters)
    told = f"{version('mindspore-rl')} (MindSpore {version('mindspore')}, Python {platform.python_version()})"
    telling.tell(marks, parameters, {TITLE: told}, ("gym",), threads=1)


if __name__ == "__main__":
    main()
