"""Train to a target return with Stable-Baselines3 or SBX: `python sb3_threshold.py WORK`, with the work as JSON.

Prints one line of JSON: whether 100 episodes averaged at least the target, and the seconds of training. Settings are
those of the installed RL Baselines3 Zoo. Evaluations follow the same rules as zhixing's: at regular intervals between
updates, with the clock stopped.
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
EVAL_EPISODES, CONFIRM_EPISODES = 10, 100


def read_zoo_settings(algorithm: str, env: str) -> dict[str, Any]:
    """Read the zoo's tuned settings without importing it."""
    import yaml

    spec = find_spec("rl_zoo3")
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent / "hyperparams" / f"{algorithm}.yml"
    settings: dict[str, Any] = yaml.safe_load(file.read_text())[env]
    return settings


def linear_schedule(initial: float) -> Any:
    return lambda remaining: initial * remaining


def make_model(library: Any, work: dict[str, Any]) -> tuple[Any, int]:
    """Return a model and its budget of steps."""
    import numpy as np
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.noise import NormalActionNoise

    settings = read_zoo_settings(work["algorithm"], work["env"])
    env = make_vec_env(work["env"], int(settings.pop("n_envs", 1)), seed=work["seed"])
    budget, policy = int(settings.pop("n_timesteps")), settings.pop("policy")
    for name, value in settings.items():
        if isinstance(value, str) and value.startswith("lin_"):
            settings[name] = linear_schedule(float(value.removeprefix("lin_")))
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
        from sbx import limit_threads  # the file in this folder, not the library

        limit_threads()
        del sys.modules["sbx"]
    sys.path.remove(str(Path(__file__).resolve().parent))  # from here on, `import sbx` finds the library
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    torch.set_num_threads(1)
    library = importlib.import_module({"sb3": "stable_baselines3", "sbx": "sbx"}[work["library"]])
    model, budget = make_model(library, work)
    eval_env = make_vec_env(work["env"], EVAL_EPISODES, seed=work["seed"] + 1_000)

    class StopAtThreshold(BaseCallback):
        def __init__(self) -> None:
            super().__init__()
            self.seconds, self.last_eval, self.reached = 0.0, 0, False

        def _on_training_start(self) -> None:
            self.clock_start = time.perf_counter()

        def _on_rollout_start(self) -> None:
            if self.num_timesteps - self.last_eval >= work["every"]:
                self._evaluate()

        def _on_step(self) -> bool:
            return not self.reached

        def _on_training_end(self) -> None:
            if not self.reached:
                self._evaluate()

        def _evaluate(self) -> None:
            self.seconds += time.perf_counter() - self.clock_start
            self.last_eval = self.num_timesteps
            self.reached = all(
                evaluate_policy(model, eval_env, episodes)[0] >= work["threshold"]
                for episodes in (EVAL_EPISODES, CONFIRM_EPISODES)
            )
            self.clock_start = time.perf_counter()

    callback = StopAtThreshold()
    model.learn(budget, callback=callback, log_interval=10**9)
    result = {"reached": callback.reached, "seconds": callback.seconds, "env_steps": callback.last_eval}
    print(json.dumps({**result, "version": library.__version__}))


if __name__ == "__main__":
    main()
