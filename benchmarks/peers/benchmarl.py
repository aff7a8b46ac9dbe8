"""Train a row with BenchMARL: `python benchmarl.py ROW`, with the row as JSON. Prints one line of JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

TITLE = "BenchMARL"
REQUIREMENTS = [  # the newest torchrl that BenchMARL allows
    "torch==2.13.0",
    "benchmarl==1.5.2",
    "torchrl==0.11.1",
    "tensordict==0.11.0",
    "pettingzoo==1.27.0",
    "mpe2==1.1.1",
    "gymnasium==1.4.0",
]


def qmix(row: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the algorithm's settings, and its settings of the experiment."""
    from benchmarl.algorithms import QmixConfig

    return QmixConfig(mixing_embed_dim=row["mixer_size"], delay_value=True, loss_function="l2"), {
        "off_policy_collected_frames_per_batch": row["num_envs"] * row["rollout_steps"],
        "off_policy_n_envs_per_worker": row["num_envs"],
        "off_policy_n_optimizer_steps": row["updates_per_iteration"],
        "off_policy_train_batch_size": row["batch_episodes"] * row["episode_steps"],
        "off_policy_memory_size": row["replay_capacity"],
        "off_policy_init_random_frames": 0,
        "soft_target_update": False,
        "hard_target_update_frequency": row["target_update_interval"],
        "exploration_eps_init": row["epsilon"],
        "exploration_eps_end": row["epsilon"],
    }


ALGORITHMS = {"qmix": qmix}


def simple_spread(row: dict[str, Any]) -> Any:
    import mpe2
    import mpe2.all_modules
    from benchmarl.environments import PettingZooTask

    # BenchMARL imports the environments from pettingzoo.mpe, which has become the package mpe2
    sys.modules["pettingzoo.mpe"], sys.modules["pettingzoo.mpe.all_modules"] = mpe2, mpe2.all_modules
    options = {"max_cycles": row["episode_steps"], "N": row["num_agents"], "local_ratio": 0.5}
    return PettingZooTask.SIMPLE_SPREAD.get_task({"task": "simple_spread_v3", **options})


TASKS = {"mpe/simple_spread": simple_spread}


def make_experiment(row: dict[str, Any], folder: str) -> Any:
    from benchmarl.experiment import Experiment, ExperimentConfig
    from benchmarl.models import MlpConfig
    from torch import nn

    algorithm, settings = ALGORITHMS[row["algorithm"]](row)
    common = {
        "sampling_device": "cpu",
        "train_device": "cpu",
        "buffer_device": "cpu",
        "share_policy_params": True,
        "prefer_continuous_actions": False,
        "gamma": row["gamma"],
        "lr": row["lr"],
        "adam_eps": row["adam_epsilon"],
        "clip_grad_norm": True,
        "clip_grad_val": row["max_grad_norm"],
        "max_n_frames": row["warmup_steps"] + row["measured_steps"],
        "evaluation": False,
        "render": False,
        "loggers": [],
        "create_json": False,
        "save_folder": folder,
        "checkpoint_interval": 0,
        "checkpoint_at_end": False,
    }
    config = ExperimentConfig.get_from_yaml()  # defaults for all other settings
    for name, value in {**common, **settings}.items():
        assert hasattr(config, name), f"BenchMARL has no setting {name}"
        setattr(config, name, value)
    activation = {"tanh": nn.Tanh, "relu": nn.ReLU}[row["activation"]]
    model = MlpConfig(num_cells=row["hidden_sizes"], layer_class=nn.Linear, activation_class=activation)
    return Experiment(TASKS[row["env"]](row), algorithm, model, seed=row["seed"], config=config)


def main() -> None:
    from measurement import print_measurement, take_snapshot

    sys.path.remove(str(Path(__file__).resolve().parent))  # otherwise `import benchmarl` finds this file
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from benchmarl.experiment import Callback

    warnings.simplefilter("ignore")  # about environments that aren't installed, and deprecated names in torchrl
    row = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    ends = (row["warmup_steps"], row["warmup_steps"] + row["measured_steps"])
    snapshots: list[Any] = []

    with tempfile.TemporaryDirectory() as folder:
        experiment = make_experiment(row, folder)
        (optimizer,) = (one for group in experiment.optimizers.values() for one in group.values())
        parameters = [p for group in optimizer.param_groups for p in group["params"]]

        class Stopwatch(Callback):
            def on_train_end(self, training_td: Any, group: str) -> None:
                if experiment.total_frames in ends:
                    steps = int(optimizer.state[parameters[0]]["step"])
                    snapshots.append(take_snapshot(experiment.total_frames, steps))

        # arguments of the experiment are pickled, and a class in a function can't be
        experiment.callbacks.append(Stopwatch())
        experiment.run()
    packages = ("torchrl", "tensordict", "pettingzoo", "mpe2", "gymnasium")
    print_measurement(snapshots, sum(p.numel() for p in parameters), {TITLE: version("benchmarl")}, packages)


if __name__ == "__main__":
    main()
