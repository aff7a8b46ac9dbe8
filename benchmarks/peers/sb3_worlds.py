"""Train with Stable-Baselines3 and the settings of RL Baselines3 Zoo: `python sb3_worlds.py WORK`, the work as JSON.

Prints one line of JSON: the final mean return and the mean returns of evaluations during training.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

# tuned settings of the zoo; it has none for DM Control, which uses those for MuJoCo
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


def make_env(name: str) -> Any:
    import gymnasium as gym

    if not name.startswith("dmc/"):
        return gym.make(name)
    import shimmy  # noqa: F401  registers the environments

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
    normalize = work["algorithm"] == "ppo"
    env = DummyVecEnv([lambda: Monitor(make_env(work["env"]))])
    eval_env = DummyVecEnv([lambda: Monitor(make_env(work["env"]))])
    if normalize:
        env, eval_env = VecNormalize(env), VecNormalize(eval_env, training=False, norm_reward=False)
    model_class = {"sac": sb3.SAC, "ppo": sb3.PPO}[work["algorithm"]]
    model = model_class("MlpPolicy", env, seed=work["seed"], device="cpu", **SETTINGS[work["algorithm"]])
    curve: list[list[float]] = []

    def evaluate(episodes: int) -> float:
        if normalize:
            eval_env.obs_rms = env.obs_rms
        return float(evaluate_policy(model, eval_env, episodes)[0])

    class RecordCurve(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps % (work["env_steps"] // 20) == 0:
                curve.append([self.num_timesteps, evaluate(5)])
            return True

    begin = time.perf_counter()
    model.learn(work["env_steps"], callback=RecordCurve())
    seconds = time.perf_counter() - begin
    print(json.dumps({"final": evaluate(20), "curve": curve, "seconds": seconds, "version": sb3.__version__}))


if __name__ == "__main__":
    main()
