"""A custom game for tree search and self-play: a class that derives from `zhixing.search.BoardGame`.

All methods handle many games at once, as rows of arrays. The class is checked in random games before training starts.
Run it with `python custom_game.py`.

Or on the command line, in the folder of this file:

    zhixing train alphazero --env custom_game:TakeAway env.stones=15 env_steps=20000 --out runs/takeaway
    zhixing eval runs/takeaway --against mcts:200
"""

import numpy as np

import zhixing as zx
from zhixing.search import BoardGame

GOAL = 0.9  # mean return against random play: 1 for a win, -1 for a loss


class TakeAway(BoardGame):
    """Two players take 1, 2 or 3 stones from a heap in turn. Who takes the last one wins.

    Leaving a multiple of four wins. A state is the number of stones and the player to move, `[N,2]`.
    """

    num_actions = 3  # action i takes i + 1 stones

    def __init__(self, stones: int = 12) -> None:
        self.stones = stones  # options are set as env.stones=15
        self.max_moves = stones
        self.obs_shape = (1, stones + 1, 1)

    def initial_states(self, num: int) -> np.ndarray:
        return np.tile([self.stones, 0], (num, 1))

    def legal_actions(self, state: np.ndarray) -> np.ndarray:
        return np.arange(1, 4) <= state[:, :1]

    def play(self, state: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        after = np.stack([state[:, 0] - action - 1, 1 - state[:, 1]], 1)
        over = after[:, 0] == 0
        return after, over.astype(np.float32), over  # the reward of the player who moved

    def is_over(self, state: np.ndarray) -> np.ndarray:
        return state[:, 0] == 0

    def current_player(self, state: np.ndarray) -> np.ndarray:
        return state[:, 1]

    def observe(self, state: np.ndarray) -> np.ndarray:
        """A board of one row, with a piece at the number of stones."""
        return (np.arange(self.stones + 1) == state[:, :1]).astype(np.int8)[:, None, :, None]


def main() -> dict:
    return zx.train(
        "alphazero", env="custom_game:TakeAway", env_steps=12_000, simulations=16, net__blocks=1, net__channels=16,
        batch_size=64, updates_per_step=0.03, explore_moves=3, stop_return=GOAL, eval_every=3_000, eval_episodes=100,
    )  # fmt: skip


if __name__ == "__main__":
    result = main()
    print(f"mean return against random play: {result['final_return']:.2f}")
