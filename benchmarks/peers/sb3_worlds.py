"""A long run by Stable-Baselines3, with the settings of RL Baselines3 Zoo: `python sb3_worlds.py WORK`, the work as
JSON. Prints one line of JSON: the final mean return, and the mean returns of evaluations on the way."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

# what the zoo tuned; tasks of DM Control have no settings there and take those of its default for MuJoCo
SETTINGS: dict[str, dict[str, Any]] = {
    "sac": {"learning_starts": 10_000},
    "ppo": {
        "batch_size": 64,
        "n_steps": 512,
        "gamma": 0.98,
        "learning_rate": 2.0633e-05,
        "ent_coef": 0.000401762,
        "clip_range": 0.1,
        "n_epochs": 20,
        "gae_lambda": 0.92,
        "max_grad_norm": 0.8,
        "vf_coef": 0.58096,
    },
}


def make(name: str) -> Any:
    import gymnasium as gym

    if not name.startswith("dmc/"):
        return gym.make(name)
    import shimmy  # noqa: F401  registers the tasks

    domain, task = name.removeprefix("dmc/").split("-", 1)
    return gym.wrappers.FlattenObservation(gym.make(f"dm_control/{domain}-{task}-v0"))


def main() -> None:
    import stable_baselines3 as sb3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    work = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    normalised = work["algorithm"] == "ppo"
    env = DummyVecEnv([lambda: Monitor(make(work["env"]))])
    test = DummyVecEnv([lambda: Monitor(make(work["env"]))])
    if normalised:
        env, test = VecNormalize(env), VecNormalize(test, training=False, norm_reward=False)
    kind = {"sac": sb3.SAC, "ppo": sb3.PPO}[work["algorithm"]]
    model = kind("MlpPolicy", env, seed=work["seed"], device="cpu", **SETTINGS[work["algorithm"]])
    curve: list[list[float]] = []

    def score(episodes: int) -> float:
        if normalised:
            test.obs_rms = env.obs_rms
        return float(evaluate_policy(model, test, episodes)[0])

    class Note(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps % (work["env_steps"] // 20) == 0:
                curve.append([self.num_timesteps, score(5)])
            return True

    begin = time.perf_counter()
    model.learn(work["env_steps"], callback=Note())
    seconds = time.perf_counter() - begin
    print(json.dumps({"final": score(20), "curve": curve, "seconds": seconds, "version": sb3.__version__}))


if __name__ == "__main__":
    main()
