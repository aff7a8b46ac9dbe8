"""A run of a study by Stable-Baselines3. Takes the work as JSON and prints its result as one line of JSON:

    PYTHONPATH=benchmarks python -m peers.sb3_study WORK

Settings are the library's defaults, or with `"settings": "zoo"` those of RL Baselines3 Zoo for the environment. Like
ours, evaluations are greedy and take place between updates.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from peers.sb3_threshold import linear_schedule, read_zoo_settings

REQUIREMENTS = [
    *("torch==2.13.0", "numpy==2.4.6", "stable-baselines3==2.9.2", "sb3-contrib==2.9.2", "rl_zoo3==2.9.2"),
    *("gymnasium[classic-control,box2d,toy-text,mujoco]==1.4.0", "mujoco==3.17.0"),
    *("minigrid==3.2.0", "minatar==1.0.15"),
]
EVAL_ENVS = 10


def zoo_settings(algorithm: str, env: str) -> dict[str, Any]:
    """Return the zoo's settings; an environment that it lacks has those of its version 4."""
    try:
        return read_zoo_settings(algorithm, env)
    except KeyError:
        return read_zoo_settings(algorithm, env.replace("-v5", "-v4"))


def build(work: dict[str, Any]) -> tuple[Any, Any]:
    """Return the model and the vector environment for evaluations."""
    import numpy as np
    import sb3_contrib
    import stable_baselines3
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.noise import NormalActionNoise
    from stable_baselines3.common.vec_env import VecNormalize
    from studies.envs import make
    from torch import nn

    name, seed = work["peer"], work["seed"]
    settings = zoo_settings(name.lower(), work["env"]) if work["settings"] == "zoo" else {}
    num_envs = work["num_envs"] or int(settings.get("n_envs", 1))
    policy = settings.pop("policy", "MlpLstmPolicy" if name == "RecurrentPPO" else "MlpPolicy")
    normalize = settings.pop("normalize", False)
    noise, std = settings.pop("noise_type", None), settings.pop("noise_std", 0.0)
    assert noise in (None, "normal"), noise
    for key in ("n_envs", "n_timesteps"):
        settings.pop(key, None)
    for key, value in settings.items():
        if isinstance(value, str) and value.startswith("lin_"):
            settings[key] = linear_schedule(float(value.removeprefix("lin_")))
    if isinstance(settings.get("policy_kwargs"), str):
        settings["policy_kwargs"] = eval(settings["policy_kwargs"], {"dict": dict, "nn": nn})
    kwargs = {"id": work["env"], "max_episode_steps": work["max_episode_steps"]}
    env = make_vec_env(make, num_envs, seed=seed, env_kwargs=kwargs)
    test = make_vec_env(make, EVAL_ENVS, seed=seed + 1_000, env_kwargs=kwargs)
    if noise:
        size = env.action_space.shape
        settings["action_noise"] = NormalActionNoise(np.zeros(size), std * np.ones(size))
    if normalize:
        env = VecNormalize(env, gamma=settings.get("gamma", 0.99))
        test = VecNormalize(test, training=False, norm_reward=False)
        test.obs_rms = env.obs_rms  # shared
    kind = getattr(stable_baselines3, name, None) or getattr(sb3_contrib, name)
    return kind(policy, env, seed=seed, device="cpu", verbose=0, **settings), test


def main() -> None:
    import stable_baselines3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.evaluation import evaluate_policy

    work = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    model, test = build(work)

    class Curve(BaseCallback):
        """Evaluates every `eval_every` steps."""

        def __init__(self) -> None:
            super().__init__()
            self.points, self.due = [], work["eval_every"]

        def _on_rollout_start(self) -> None:
            if self.num_timesteps >= self.due:
                self.evaluate()
                self.due = (self.num_timesteps // work["eval_every"] + 1) * work["eval_every"]

        def _on_step(self) -> bool:
            return True

        def _on_training_end(self) -> None:
            self.evaluate()

        def evaluate(self) -> None:
            self.points.append([self.num_timesteps, float(evaluate_policy(model, test, work["eval_episodes"])[0])])

    curve = Curve()
    model.learn(work["env_steps"], callback=curve, log_interval=10**9)
    mean, std = evaluate_policy(model, test, work["episodes"])
    result = {
        "env_steps": model.num_timesteps,
        "final": float(mean),
        "std": float(std),
        "curve": curve.points,
        "version": stable_baselines3.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
