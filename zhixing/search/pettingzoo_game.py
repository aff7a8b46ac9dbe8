"""PettingZoo's games of perfect information without rules of our own: chess and go, played by copies of PettingZoo's.

A state is the number of moves and the moves of the game so far, `[N,1+max_moves]`. PettingZoo's environments in recent
states are kept, and copied for the next moves.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np

from zhixing.envs.adapters.pettingzoo_envs import import_newest
from zhixing.envs.options import construct_env
from zhixing.envs.vector.step_buffers import Array
from zhixing.search.board_game import BoardGame, random_action

MAX_KEPT = 10_000  # environments
PLAYOUT_MOVES = 50  # after which a random playout counts as a draw
# attributes that no move changes, which copies share
SHARED = ("observation_spaces", "action_spaces", "possible_agents", "_go", "metadata")


class PettingZooGame(BoardGame):
    """A game that PettingZoo plays. Unfinished games are draws after `max_moves` moves.

    Its observations don't determine the state, so agents only play matches.
    """

    cache_results = False  # states are too long

    def __init__(self, name: str, options: Mapping[str, Any], max_moves: int) -> None:
        self.name, self.max_moves = name, max_moves
        env = construct_env(name, import_newest(name).raw_env, options)
        env.reset(seed=0)
        agent = env.possible_agents[0]
        self.num_actions = int(env.action_space(agent).n)
        self.obs_shape = env.observation_space(agent)["observation"].shape
        self._envs: OrderedDict[bytes, Any] = OrderedDict({b"": env})

    def initial_states(self, num: int) -> Array:
        states = np.full((num, 1 + self.max_moves), -1, np.int16)
        states[:, 0] = 0
        return states

    def legal_actions(self, state: Array) -> Array:
        observed = [env.observe(env.agent_selection) for env in map(self._env, state)]
        return np.array([obs["action_mask"] for obs in observed], bool).reshape(-1, self.num_actions)

    def play(self, state: Array, action: Array) -> tuple[Array, Array, Array]:
        after, reward = state.copy(), np.zeros(len(state), np.float32)
        rows = np.arange(len(state))
        after[:, 0] += 1
        after[rows, after[:, 0]] = action
        for row, mover in enumerate(self.current_player(state)):
            env = self._env(after[row])
            reward[row] = env.rewards[env.possible_agents[mover]]
        return after, reward, self.is_over(after)

    def is_over(self, state: Array) -> Array:
        ended = [any(self._env(row).terminations.values()) for row in state]
        return np.array(ended, bool) | (state[:, 0] == self.max_moves)

    def current_player(self, state: Array) -> Array:
        return (state[:, 0] % 2).astype(np.int64)

    def observe(self, state: Array) -> Array:
        observed = [env.observe(env.agent_selection)["observation"] for env in map(self._env, state)]
        return np.array(observed, np.int8).reshape(-1, *self.obs_shape)

    def seat_obs(self, state: Array) -> Array:
        """Return the observations of both seats, as in PettingZoo."""
        seats = [[env.observe(agent)["observation"] for agent in env.possible_agents] for env in map(self._env, state)]
        return np.array(seats, np.int8)

    @property
    def seat_obs_shape(self) -> tuple[int, ...]:
        return self.obs_shape

    def playout(self, state: Array, rng: np.random.Generator) -> Array:
        """Play randomly, for at most `PLAYOUT_MOVES` moves."""
        returns = np.zeros(len(state))
        for row, player in enumerate(self.current_player(state)):
            env = copy_env(self._env(state[row]))
            for _ in range(PLAYOUT_MOVES):
                if any(env.terminations.values()):
                    break
                mask = env.observe(env.agent_selection)["action_mask"][None].astype(bool)
                env.step(int(random_action(mask, rng)[0]))
            returns[row] = env.rewards[env.possible_agents[player]]
        return returns

    def _env(self, state: Array) -> Any:
        """Return PettingZoo's environment in a state. It must not be changed."""
        moves = state[1 : 1 + state[0]]
        key = moves.tobytes()
        env = self._envs.get(key)
        if env is None:
            known = len(moves) - 1
            while moves[:known].tobytes() not in self._envs:
                known -= 1
            env = self._envs[moves[:known].tobytes()]
            for count in range(known, len(moves)):
                env = copy_env(env)
                env.step(int(moves[count]))
                self._envs[moves[: count + 1].tobytes()] = env
            while len(self._envs) > MAX_KEPT + 1:
                start = self._envs.pop(b"")
                self._envs.popitem(last=False)
                self._envs[b""] = start
        return env


def copy_env(env: Any) -> Any:
    """Copy a PettingZoo game in the middle of an episode. `copy.deepcopy` would return a new game."""
    memo: dict[int, Any] = {id(vars(env)[name]): vars(env)[name] for name in SHARED if name in vars(env)}
    if hasattr(env, "board"):
        memo[id(env.board)] = env.board.copy()  # python-chess copies faster
    new = object.__new__(type(env))
    vars(new).update({name: copy.deepcopy(value, memo) for name, value in vars(env).items()})
    return new
