"""PPO updates from images (forward, backward, optimizer step), compared with Stable-Baselines3.

    python benchmarks/image_updates.py [--repeats 7] [--rows nature,simple] [--quick]

Both libraries train 4 epochs on the same 256 stacks of 4 x 84 x 84, in one minibatch, with one network for actor and
critic. Collecting isn't measured. Rates are per second of CPU time, on one thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from common import peer_python, versions
from comparison import (
    Measurement,
    Side,
    compare_rows,
    compute_ratios,
    measure_rounds,
    parse_args,
    ratio_cells,
    results_table,
    rounded_median,
    run_script,
)
from peers import sb3

ROWS: dict[str, dict[str, Any]] = {
    "nature": {"title": "Nature CNN: three convolutions and 512 units", "cnn": "nature"},
    "simple": {"title": "simple CNN: four 3x3 convolutions of stride 2 and 512 units", "cnn": "simple"},
}
STEPS, ENVS, EPOCHS, ACTIONS, SHAPE = 32, 8, 4, 6, (4, 84, 84)
SETTINGS = {"gamma": 0.99, "gae_lambda": 0.95, "lr": 2.5e-4, "clip_range": 0.1, "max_grad_norm": 0.5}
UpdateSetup = tuple[Callable[[], object], int]  # the update, and the number of parameters


def random_rollout() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "obs": rng.integers(0, 256, (STEPS + 1, ENVS, *SHAPE), dtype=np.uint8),
        "action": rng.integers(0, ACTIONS, (STEPS, ENVS)),
        "reward": rng.normal(size=(STEPS, ENVS)).astype(np.float32),
        "logp": np.full((STEPS, ENVS), -np.log(ACTIONS), np.float32),
        "value": np.zeros((STEPS, ENVS), np.float32),
    }


def setup_ours(row: Mapping[str, Any]) -> UpdateSetup:
    import torch
    from gymnasium.spaces import Box, Discrete

    import zhixing as zx
    from zhixing.algorithms.ppo import PPO
    from zhixing.core.spaces import Spaces
    from zhixing.utils.memory import keep_freed_memory

    keep_freed_memory()  # as every run does
    cfg = zx.config.load(
        algorithm="ppo",
        env="CartPole-v1",  # required, but never stepped
        **SETTINGS,
        epochs=EPOCHS,
        minibatch_size=STEPS * ENVS,
        rollout_steps=STEPS,
        num_envs=ENVS,
        shared_network=True,
        net={"cnn": row["cnn"], "hidden_sizes": [], "activation": "relu"},
    )
    learner = PPO(cfg, Spaces(Box(0, 255, SHAPE, np.uint8), Discrete(ACTIONS)))
    arrays = {name: torch.from_numpy(array) for name, array in random_rollout().items()}
    obs, end = arrays.pop("obs"), torch.zeros(STEPS, ENVS, dtype=torch.bool)
    batch = zx.Batch(obs=obs[:-1], next_obs=obs[1:], terminated=end, truncated=end, **arrays)
    return lambda: learner.update(batch), sum(p.numel() for p in learner.net.parameters())


def setup_sb3(row: Mapping[str, Any]) -> UpdateSetup:
    import gymnasium as gym
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.logger import configure
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, NatureCNN
    from torch import nn

    class ImageEnv(gym.Env):
        observation_space, action_space = gym.spaces.Box(0, 255, SHAPE, np.uint8), gym.spaces.Discrete(ACTIONS)

    class SimpleCNN(BaseFeaturesExtractor):
        def __init__(self, space: Any) -> None:
            super().__init__(space, 512)
            layers: list[nn.Module] = []
            for channels in (SHAPE[0], 32, 32, 32):
                layers += [nn.Conv2d(channels, 32, 3, 2, 1), nn.ReLU()]
            self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 6 * 6, 512), nn.ReLU())

        def forward(self, obs: Any) -> Any:
            return self.layers(obs)

    model = PPO(
        "CnnPolicy",
        ImageEnv(),
        learning_rate=SETTINGS["lr"],
        n_steps=STEPS * ENVS,
        batch_size=STEPS * ENVS,
        n_epochs=EPOCHS,
        gamma=SETTINGS["gamma"],
        gae_lambda=SETTINGS["gae_lambda"],
        clip_range=SETTINGS["clip_range"],
        max_grad_norm=SETTINGS["max_grad_norm"],
        policy_kwargs={"net_arch": [], "features_extractor_class": SimpleCNN if row["cnn"] == "simple" else NatureCNN},
        device="cpu",
    )
    model.set_logger(configure(None, []))
    arrays, buffer = random_rollout(), model.rollout_buffer
    flat = {name: array[:STEPS].reshape(STEPS * ENVS, 1, *array.shape[2:]) for name, array in arrays.items()}
    for t in range(STEPS * ENVS):
        value, logp = torch.from_numpy(flat["value"][t]), torch.from_numpy(flat["logp"][t])
        buffer.add(flat["obs"][t], flat["action"][t][:, None], flat["reward"][t], np.zeros(1), value, logp)

    def update() -> None:
        buffer.compute_returns_and_advantage(torch.zeros(1), np.zeros(1))
        model.train()

    return update, sum(p.numel() for p in model.policy.parameters())


SETUPS = {"ours": (setup_ours, "numpy"), "sb3": (setup_sb3, "stable-baselines3")}


def setup(name: str, row: Mapping[str, Any]) -> Measurement:
    import torch

    torch.set_num_threads(1)
    setup_update, package = SETUPS[name]
    update, parameters = setup_update(row)

    def measure() -> dict[str, float]:
        start = time.process_time()
        for _ in range(row["updates"]):
            update()
        return {"minibatches": row["updates"] * EPOCHS / (time.process_time() - start)}

    return Measurement(measure, {"parameters": parameters, **versions("torch", package)})


def compare(row: Mapping[str, Any], repeats: int) -> dict[str, Any]:
    pythons = {"ours": Path(sys.executable), "sb3": peer_python("sb3", sb3.REQUIREMENTS)}
    sides = {name: Side(python, name, row) for name, python in pythons.items()}
    info, runs = measure_rounds(__file__, sides, repeats)
    assert info["ours"]["parameters"] == info["sb3"]["parameters"], info
    assert info["ours"]["torch"] == info["sb3"]["torch"], info
    rates = {name: [run["minibatches"] for run in measured] for name, measured in runs.items()}
    return {
        **info,
        **{f"{name}_per_second": rounded_median(values, 3) for name, values in rates.items()},
        **compute_ratios(rates["ours"], rates["sb3"]),
    }


def make_table(results: Mapping[str, Any]) -> str:
    rows = [
        [ROWS[name]["title"], f"{row['ours_per_second']:.2f}", f"{row['sb3_per_second']:.2f}", *ratio_cells(row)]
        for name, row in results["rows"].items()
    ]
    head = ["network", "zhixing, minibatches/s", f"{sb3.TITLE}, minibatches/s", "ratio", "range over rounds"]
    return results_table(results, head, rows, 1)


def main() -> None:
    options = parse_args(__doc__, list(ROWS), repeats=7)
    updates = 1 if options.quick else 3
    compare_rows(
        "image_updates",
        options,
        lambda name: compare({**ROWS[name], "updates": updates}, options.repeats),
        make_table,
    )


if __name__ == "__main__":
    run_script(main, setup)
