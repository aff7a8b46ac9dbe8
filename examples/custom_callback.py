"""A custom callback: stop training when evaluations no longer improve.

Run it with `python custom_callback.py`.
"""

from typing import Any

import zhixing as zx

GOAL = 9.0  # mean return; the best is 10, random actions get 2.5


class EarlyStopping(zx.Callback):
    """Stops training after `patience` evaluations in a row without a new best mean return."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.best, self.num_worse = float("-inf"), 0

    def evaluation_end(self, loop: zx.TrainingLoop, evaluation: zx.Evaluation) -> None:
        self.num_worse = 0 if evaluation.mean_return > self.best else self.num_worse + 1
        self.best = max(self.best, evaluation.mean_return)
        print(f"{loop.env_steps:>6} steps, {loop.updates} updates: {evaluation.mean_return:.2f} (best {self.best:.2f})")
        if self.num_worse == self.patience:
            loop.stop(f"no improvement in {self.patience} evaluations")

    # checkpoints store this state, so a resumed run continues the count
    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "num_worse": self.num_worse}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.num_worse = state["best"], state["num_worse"]


def main() -> dict:
    cfg = zx.config.load(algorithm="ppo", env="toy/match", env_steps=100_000, eval_every=500, eval_episodes=20, lr=3e-3)
    session = zx.Session(cfg, callbacks=[EarlyStopping(patience=3)], quiet=True)
    result = session.run()
    print(f"stopped after {result['env_steps']:,} of {cfg.env_steps:,} steps: {session.loop.stop_reason}")
    return result


if __name__ == "__main__":
    main()
