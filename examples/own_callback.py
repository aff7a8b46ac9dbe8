"""Your own callback: told what happens during training, it may look at everything and ask for the end.

Run it with `python own_callback.py`.
"""

from typing import Any

import zhixing as zx

GOAL = 9.0  # of 10 right answers per episode; guessing finds 2.5


class Patience(zx.Callback):
    """Ends training when so many evaluations in a row were no better than the best before them."""

    def __init__(self, evaluations: int) -> None:
        self.evaluations = evaluations
        self.best, self.since = float("-inf"), 0

    def evaluation_end(self, loop: zx.TrainingLoop, evaluation: zx.Evaluation) -> None:
        self.since = 0 if evaluation.mean_return > self.best else self.since + 1
        self.best = max(self.best, evaluation.mean_return)
        print(f"{loop.env_steps:>6} steps, {loop.updates} updates: {evaluation.mean_return:.2f} (best {self.best:.2f})")
        if self.since == self.evaluations:
            loop.stop(f"no better for {self.evaluations} evaluations")

    # what a resumed run must not forget
    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.since = state["best"], state["since"]


def main() -> dict:
    cfg = zx.config.load(
        algorithm="ppo", env="toy/match", env_steps=100_000, eval_every_steps=500, eval_episodes=20, lr=3e-3
    )
    session = zx.Session(cfg, callbacks=[Patience(evaluations=3)], quiet=True)
    result = session.run()
    print(f"stopped at {result['env_steps']:,} of {cfg.env_steps:,} steps: {session.loop.stop_reason}")
    return result


if __name__ == "__main__":
    main()
