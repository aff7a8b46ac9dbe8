"""An update of PPO from pictures: forward, backward, optimizer; ours and Stable-Baselines3's, taking turns.

    python benchmarks/pictures.py [--repeats 7] [--rows nature,simple] [--quick]

Both learn 4 epochs from the same 256 stacks of 4 x 84 x 84, in one minibatch, with one network for actor and critic.
Acting is no part of it. Rates are per second of the CPU's time, on one thread. `--as WHO ROW` is one of those who take
turns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    Party,
    answer,
    asked,
    asked_as,
    compared,
    made,
    made_line,
    median_of,
    peer_python,
    publish,
    spread,
    table,
    take_turns,
    versions,
)
from peers import sb3

ROWS: dict[str, dict[str, Any]] = {
    "nature": {"title": "Nature CNN: three convolutions and 512 units", "cnn": "nature"},
    "simple": {"title": "simple CNN: four 3x3 convolutions of stride 2 and 512 units", "cnn": "simple"},
}
STEPS, ENVS, EPOCHS, ACTIONS, SHAPE = 32, 8, 4, 6, (4, 84, 84)
SETTINGS = {"gamma": 0.99, "gae_lambda": 0.95, "lr": 2.5e-4, "clip_range": 0.1, "max_grad_norm": 0.5}
Measure = Callable[[], dict[str, float]]


def rollout() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "obs": rng.integers(0, 256, (STEPS + 1, ENVS, *SHAPE), dtype=np.uint8),
        "action": rng.integers(0, ACTIONS, (STEPS, ENVS)),
        "reward": rng.normal(size=(STEPS, ENVS)).astype(np.float32),
        "logp": np.full((STEPS, ENVS), -np.log(ACTIONS), np.float32),
        "value": np.zeros((STEPS, ENVS), np.float32),
    }


def of_ours(row: Mapping[str, Any]) -> tuple[Callable[[], object], int]:
    import torch
    from gymnasium.spaces import Box, Discrete

    import zhixing as zx
    from zhixing.algorithms.ppo import PPO
    from zhixing.core.spaces import Spaces
    from zhixing.utils.memory import keep_freed_memory

    keep_freed_memory()  # as every run does
    cfg = zx.config.load(
        algorithm="ppo",
        env="CartPole-v1",  # only names the settings: nothing is acted
        **SETTINGS,
        epochs=EPOCHS,
        minibatch_size=STEPS * ENVS,
        rollout_steps=STEPS,
        num_envs=ENVS,
        shared_network=True,
        net={"cnn": row["cnn"], "hidden_sizes": [], "activation": "relu"},
    )
    learner = PPO(cfg, Spaces(Box(0, 255, SHAPE, np.uint8), Discrete(ACTIONS)))
    arrays = {name: torch.from_numpy(array) for name, array in rollout().items()}
    obs, end = arrays.pop("obs"), torch.zeros(STEPS, ENVS, dtype=torch.bool)
    batch = zx.Batch(obs=obs[:-1], next_obs=obs[1:], terminated=end, truncated=end, **arrays)
    return lambda: learner.update(batch), sum(p.numel() for p in learner.net.parameters())


def of_sb3(row: Mapping[str, Any]) -> tuple[Callable[[], object], int]:
    import gymnasium as gym
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.logger import configure
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, NatureCNN
    from torch import nn

    class Seen(gym.Env):
        observation_space, action_space = gym.spaces.Box(0, 255, SHAPE, np.uint8), gym.spaces.Discrete(ACTIONS)

    class Simple(BaseFeaturesExtractor):
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
        Seen(),
        learning_rate=SETTINGS["lr"],
        n_steps=STEPS * ENVS,
        batch_size=STEPS * ENVS,
        n_epochs=EPOCHS,
        gamma=SETTINGS["gamma"],
        gae_lambda=SETTINGS["gae_lambda"],
        clip_range=SETTINGS["clip_range"],
        max_grad_norm=SETTINGS["max_grad_norm"],
        policy_kwargs={"net_arch": [], "features_extractor_class": Simple if row["cnn"] == "simple" else NatureCNN},
        device="cpu",
    )
    model.set_logger(configure(None, []))
    arrays, buffer = rollout(), model.rollout_buffer
    flat = {name: array[:STEPS].reshape(STEPS * ENVS, 1, *array.shape[2:]) for name, array in arrays.items()}
    for t in range(STEPS * ENVS):
        value, logp = torch.from_numpy(flat["value"][t]), torch.from_numpy(flat["logp"][t])
        buffer.add(flat["obs"][t], flat["action"][t][:, None], flat["reward"][t], np.zeros(1), value, logp)

    def update() -> None:
        buffer.compute_returns_and_advantage(torch.zeros(1), np.zeros(1))
        model.train()

    return update, sum(p.numel() for p in model.policy.parameters())


WHO = {"ours": (of_ours, "numpy"), "sb3": (of_sb3, "stable-baselines3")}


def ready(who: str, row: Mapping[str, Any]) -> tuple[Measure, dict[str, Any]]:
    import torch

    torch.set_num_threads(1)
    make, package = WHO[who]
    update, parameters = make(row)

    def measure() -> dict[str, float]:
        start = time.process_time()
        for _ in range(row["updates"]):
            update()
        return {"minibatches": row["updates"] * EPOCHS / (time.process_time() - start)}

    return measure, {"parameters": parameters, **versions("torch", package)}


def compare(row: Mapping[str, Any], repeats: int) -> dict[str, Any]:
    pythons = {"ours": Path(sys.executable), "sb3": peer_python("sb3", sb3.REQUIREMENTS)}
    with Party(pythons["ours"], __file__, "ours", row) as ours, Party(pythons["sb3"], __file__, "sb3", row) as peer:
        told = {"ours": ours.told, "sb3": peer.told}
        assert told["ours"]["parameters"] == told["sb3"]["parameters"], told
        assert told["ours"]["torch"] == told["sb3"]["torch"], told
        runs = take_turns({"ours": ours, "sb3": peer}, repeats)
    rates = {who: [run["minibatches"] for run in its] for who, its in runs.items()}
    return {
        "title": row["title"],
        **told,
        **{f"{who}_per_second": median_of(its, 3) for who, its in rates.items()},
        **compared(rates["ours"], rates["sb3"]),
    }


def tell(results: Mapping[str, Any]) -> str:
    lines = [
        [row["title"], f"{row['ours_per_second']:.2f}", f"{row['sb3_per_second']:.2f}", *spread(row)]
        for row in results["rows"].values()
    ]
    head = ["network", "zhixing, minibatches/s", f"{sb3.TITLE}, minibatches/s", "ratio", "range over rounds"]
    return "\n".join([table(head, lines, 1), "", made_line(results["repeats"], results["made"])])


def main() -> None:
    options = asked(__doc__, list(ROWS), repeats=7)
    found = {}
    for name in options.rows:
        found[name] = compare({**ROWS[name], "updates": 1 if options.quick else 3}, options.repeats)
        print(f"{name}: {found[name]}", flush=True)
    results = {"rows": found, "repeats": options.repeats, "made": made()}
    publish("pictures", results, tell(results), options.quick)


if __name__ == "__main__":
    if (call := asked_as()) is not None:
        answer(lambda: ready(*call))
    else:
        main()
