"""From nothing to a return, by Stable-Baselines3 or SBX: `python sb3_threshold.py WORK`, the work as JSON. Prints one
line of JSON: whether 100 fresh episodes averaged the threshold, and after how many seconds of training.

Settings are those of RL Baselines3 Zoo for the task, as its package has them. Evaluations are as ours: every so many
steps, at the first point where weights stand still, and outside of the clock.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

REQUIREMENTS = {
    "sb3": ["torch==2.13.0", "stable-baselines3==2.9.2", "rl_zoo3==2.9.2", "gymnasium==1.4.0"],
    "sbx": ["torch==2.13.0", "stable-baselines3==2.9.2", "sbx-rl==0.28.0", "rl_zoo3==2.9.2", "gymnasium==1.4.0"],
}
EPISODES, CONFIRM = 10, 100


def tuned(algorithm: str, env: str) -> dict[str, Any]:
    """The zoo's settings, read without its program."""
    import yaml

    found = find_spec("rl_zoo3")
    assert found is not None
    assert found.origin is not None
    file = Path(found.origin).parent / "hyperparams" / f"{algorithm}.yml"
    settings: dict[str, Any] = yaml.safe_load(file.read_text())[env]
    return settings


def falling(first: float) -> Any:
    return lambda left: first * left


def make(library: Any, work: dict[str, Any]) -> tuple[Any, int]:
    """A model and its budget of steps."""
    import numpy as np
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.noise import NormalActionNoise

    settings = tuned(work["algorithm"], work["env"])
    env = make_vec_env(work["env"], int(settings.pop("n_envs", 1)), seed=work["seed"])
    budget, policy = int(settings.pop("n_timesteps")), settings.pop("policy")
    for name, value in settings.items():
        if isinstance(value, str) and value.startswith("lin_"):
            settings[name] = falling(float(value.removeprefix("lin_")))
    if isinstance(settings.get("policy_kwargs"), str):
        settings["policy_kwargs"] = eval(settings["policy_kwargs"], {"dict": dict})
    if settings.pop("noise_type", None) == "normal":
        size = env.action_space.shape
        settings["action_noise"] = NormalActionNoise(np.zeros(size), settings.pop("noise_std") * np.ones(size))
    kind = getattr(library, work["algorithm"].upper())
    return kind(policy, env, seed=work["seed"], device="cpu", verbose=0, **settings), budget


def main() -> None:
    work = json.loads(sys.argv[1])
    if work["library"] == "sbx":
        from sbx import one_thread  # ours, of this folder

        one_thread()
        del sys.modules["sbx"]
    sys.path.remove(str(Path(__file__).resolve().parent))
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    torch.set_num_threads(1)
    library = importlib.import_module({"sb3": "stable_baselines3", "sbx": "sbx"}[work["library"]])
    model, budget = make(library, work)
    test = make_vec_env(work["env"], EPISODES, seed=work["seed"] + 1_000)

    class Watch(BaseCallback):
        def __init__(self) -> None:
            super().__init__()
            self.seconds, self.at, self.reached = 0.0, 0, False

        def _on_training_start(self) -> None:
            self.since = time.perf_counter()

        def _on_rollout_start(self) -> None:
            if self.num_timesteps - self.at >= work["every"]:
                self._look()

        def _on_step(self) -> bool:
            return not self.reached

        def _on_training_end(self) -> None:
            if not self.reached:
                self._look()

        def _look(self) -> None:
            self.seconds += time.perf_counter() - self.since
            self.at = self.num_timesteps
            good = evaluate_policy(model, test, EPISODES)[0] >= work["threshold"]
            self.reached = good and evaluate_policy(model, test, CONFIRM)[0] >= work["threshold"]
            self.since = time.perf_counter()

    watch = Watch()
    model.learn(budget, callback=watch, log_interval=10**9)
    found = {"seconds": watch.seconds, "env_steps": watch.at}
    print(json.dumps({"reached": bool(watch.reached), **found, "version": library.__version__}))


if __name__ == "__main__":
    main()
