"""The base class of games that can be searched, the environment of a game, and the check of users' games."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from zhixing.envs.env_spec import MASK
from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import UserError

NUM_GAMES = 16  # that the check plays
MAX_MOVES_CHECKED = 200


def random_action(legal: Array, rng: np.random.Generator) -> Array:
    """Sample one legal action per row of a mask `[N,n]`, uniformly."""
    return np.where(legal, rng.random(legal.shape), -1.0).argmax(-1)


class BoardGame(ABC):
    """A deterministic game of two alternating players with perfect information, for many games at once.

    States are integer arrays `[N,...]`, one row per game, which nothing changes in place. `cell_symmetries [K,H*W]` and
    `action_symmetries [K,n]` are the source of each cell and action when the board is rotated or mirrored; the first is
    the identity.
    """

    name = ""  # of the environment
    num_players = 2
    gamma = 1.0
    cache_results = True  # whether self-play caches the network's results per state

    num_actions: int
    obs_shape: tuple[int, ...]
    """Shape `(H, W, planes)` of an observation."""
    max_moves: int
    """Number of moves after which every game is over."""

    @abstractmethod
    def initial_states(self, num: int) -> Array:
        """Return the states `[num,...]` of new games. Player 0 is to move."""

    @abstractmethod
    def legal_actions(self, state: Array) -> Array:
        """Return a mask `[N,n]` of the legal actions."""

    @abstractmethod
    def play(self, state: Array, action: Array) -> tuple[Array, Array, Array]:
        """Take legal actions `[N]`. Return the next states, the rewards `[N]` of the players who moved, from -1 to 1,
        and whether the games are over `[N]`."""

    @abstractmethod
    def is_over(self, state: Array) -> Array:
        """Return whether the games are over `[N]`."""

    @abstractmethod
    def current_player(self, state: Array) -> Array:
        """Return the index `[N]` of the player to move, 0 or 1."""

    @abstractmethod
    def observe(self, state: Array) -> Array:
        """Return the observations `[N,H,W,planes]` of the players to move."""

    def from_obs(self, obs: Array) -> Array:
        """Return the states in which the players to move have these observations. Agents need it to act outside matches
        and self-play, such as in videos."""
        raise UserError(
            f"{self.name} can't compute states from observations, so its agents only play matches; implement from_obs"
        )

    def render(self, state: Array) -> Array | None:
        """Return an image `[H,W,3]` of uint8 of one game, or None if the game has no images."""
        return None

    @property
    def cell_symmetries(self) -> Array:
        return np.arange(self.obs_shape[0] * self.obs_shape[1])[None]

    @property
    def action_symmetries(self) -> Array:
        return np.arange(self.num_actions)[None]

    def playout(self, state: Array, rng: np.random.Generator) -> Array:
        """Play randomly to the end. Return the returns `[N]` of the players to move."""
        returns, rows, first = np.zeros(len(state)), np.arange(len(state)), self.current_player(state)
        discount = 1.0
        running = ~self.is_over(state)
        state, rows = state[running], rows[running]
        while len(rows):
            mover = self.current_player(state)
            state, reward, over = self.play(state, random_action(self.legal_actions(state), rng))
            returns[rows] += discount * np.where(mover == first[rows], reward, -reward)
            discount *= self.gamma
            state, rows = state[~over], rows[~over]
        return returns

    # --- observations of both seats, as in the game's environment ---

    @property
    def seat_obs_shape(self) -> tuple[int, ...]:
        return (*self.obs_shape[:-1], self.obs_shape[-1] + 1)

    def seat_obs(self, state: Array) -> Array:
        """Return the observations `[N,2,...]` of both seats: the mover's, with a plane that is 1 for the mover."""
        planes = self.observe(state)
        turn = np.arange(2) == self.current_player(state)[:, None]  # [N,2]
        both = np.broadcast_to(planes[:, None], (len(planes), 2, *planes.shape[1:]))
        plane = np.broadcast_to(turn[:, :, None, None, None], (*both.shape[:-1], 1)).astype(planes.dtype)
        return np.concatenate([both, plane], -1)

    def seat_to_move(self, obs: Array) -> Array:
        """Return the seat to move `[N]` from the observations of both seats."""
        return obs[:, 1, 0, 0, -1].astype(np.int64)

    def from_seat_obs(self, obs: Array) -> tuple[Array, Array]:
        """Return the seat to move `[N]` and the states, from the observations of both seats."""
        seat = self.seat_to_move(obs)
        return seat, self.from_obs(obs[np.arange(len(obs)), seat][..., : self.obs_shape[-1]])

    def as_env(self, render_mode: str | None = None) -> GameEnv:
        """Return the game as an environment of two agents."""
        return GameEnv(self, render_mode)


class TwoPlaneGame(BoardGame):
    """A game whose observation has two planes, the pieces of each player. Both seats observe it, as in PettingZoo."""

    @property
    def seat_obs_shape(self) -> tuple[int, ...]:
        return self.obs_shape

    def seat_obs(self, state: Array) -> Array:
        planes = self.observe(state)
        seats = np.stack([planes, planes[..., ::-1]], 1)  # the player to move, then the other
        order = np.stack([self.current_player(state), 1 - self.current_player(state)], 1)
        return np.take_along_axis(seats, order.reshape(-1, 2, *[1] * (planes.ndim - 1)), 1)

    def seat_to_move(self, obs: Array) -> Array:
        return current_seat(obs)


def current_seat(obs: Array) -> Array:
    """Return the seat to move `[N]` from the observations of both seats, `[N,2,...,2]`.

    The second seat is to move if the first has more pieces.
    """
    pieces = obs[:, 0].reshape(len(obs), -1, 2).sum(1)  # [N,2] pieces of the first and of the second seat
    return (pieces[:, 0] > pieces[:, 1]).astype(np.int64)


class GameEnv(gym.Env[Any, Any]):
    """A game as an environment of two agents, of whom one acts in each step.

    The mask allows the other agent only action 0, which is ignored.
    """

    num_agents, reward_kind = 2, "opposed"

    def __init__(self, game: BoardGame, render_mode: str | None = None) -> None:
        self.game, self.render_mode = game, render_mode
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 2}
        self.state = game.initial_states(1)
        dtype = game.observe(self.state).dtype
        self.dtype = np.dtype(np.int8) if dtype.kind == "b" else dtype
        integers = self.dtype.kind in "iu"
        low, high = (np.iinfo(self.dtype).min, np.iinfo(self.dtype).max) if integers else (-np.inf, np.inf)
        self.observation_space = Box(low, high, game.seat_obs_shape, self.dtype.type)
        self.action_space = Discrete(game.num_actions)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self.state = self.game.initial_states(1)
        return self._obs()

    def step(self, action: Any) -> tuple[Array, Array, bool, bool, dict[str, Any]]:
        turn = int(self.game.current_player(self.state)[0])
        chosen = int(action[turn])
        if not self.game.legal_actions(self.state)[0, chosen]:
            raise ValueError(f"action {chosen} of player {turn} isn't legal; choose one that the mask allows")
        self.state, reward, over = self.game.play(self.state, np.array([chosen]))
        rewards = np.full(2, -reward[0], np.float32)
        rewards[turn] = reward[0]
        obs, info = self._obs()
        return obs, rewards, bool(over[0]), False, info

    def _obs(self) -> tuple[Array, dict[str, Any]]:
        turn = int(self.game.current_player(self.state)[0])
        mask = np.zeros((2, self.game.num_actions), bool)
        mask[turn] = self.game.legal_actions(self.state)[0]
        mask[:, 0] |= ~mask.any(1)  # a policy needs at least one action
        return self.game.seat_obs(self.state)[0].astype(self.dtype), {MASK: mask, "turn": turn}

    def render(self) -> Any:
        return self.game.render(self.state[0])

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = np.array(state["state"])


def check_game(game: BoardGame) -> None:
    """Play random games. Raise `UserError` if an attribute or a result is invalid."""
    _GameChecker(game).check()


class _GameChecker:
    def __init__(self, game: BoardGame) -> None:
        self.game = game

    def fail(self, problem: str, rule: str) -> NoReturn:
        raise UserError(f"{self.game.name}: {problem}; {rule}")

    def check(self) -> None:
        game, rng = self.game, np.random.default_rng(0)
        self.check_attributes()
        state = game.initial_states(NUM_GAMES)
        if not isinstance(state, np.ndarray) or len(state) != NUM_GAMES or state.dtype.kind not in "iu":
            self.fail(f"initial_states({NUM_GAMES}) isn't an integer array of {NUM_GAMES} rows", "return one")
        for move in range(min(game.max_moves, MAX_MOVES_CHECKED)):
            state = self.check_move(state, move, rng)
            if not len(state):
                return
        if game.max_moves <= MAX_MOVES_CHECKED:
            self.fail(f"a game wasn't over after max_moves={game.max_moves}", "raise max_moves, or end games earlier")

    def check_attributes(self) -> None:
        game = self.game
        for attribute in ("num_actions", "max_moves"):
            value = getattr(game, attribute, None)
            if not isinstance(value, int) or value < 1:
                self.fail(f"{attribute} is {value!r}", "set it to a positive number")
        shape = getattr(game, "obs_shape", None)
        if not isinstance(shape, tuple) or len(shape) != 3:
            self.fail(f"obs_shape is {shape!r}", "set it to (height, width, planes)")
        for attribute, size in (
            ("cell_symmetries", shape[0] * shape[1]),
            ("action_symmetries", game.num_actions),
        ):
            table = np.asarray(getattr(game, attribute))
            count = len(game.cell_symmetries)
            if table.shape != (count, size) or not (np.sort(table, 1) == np.arange(size)).all():
                self.fail(
                    f"{attribute} has shape {table.shape}", f"it must hold {count} permutations of {size} numbers"
                )

    def check_move(self, state: Array, move: int, rng: np.random.Generator) -> Array:
        """Check a move of all games. Return the states of those that aren't over after it."""
        game, num = self.game, len(state)
        legal = self.array("legal_actions(state)", game.legal_actions(state), (num, game.num_actions), "b")
        if not legal.any(-1).all():
            self.fail(
                "legal_actions(state) allows no action in a game that isn't over", "allow at least one, or end it"
            )
        player = self.array("current_player(state)", game.current_player(state), (num,), "iu")
        if (player != move % 2).any():
            self.fail(f"player {player[player != move % 2][0]} is to move after {move} moves", "players must alternate")
        obs = self.array("observe(state)", game.observe(state), (num, *game.obs_shape), "biuf")
        self.check_from_obs(obs, state)
        action, before = random_action(legal, rng), state.copy()
        after, reward, over = game.play(state, action)
        if not np.array_equal(before, state):
            self.fail("play(state, action) changed the states in place", "return new arrays")
        self.array("the states of play(state, action)", after, state.shape, "iu")
        self.array("the rewards of play(state, action)", reward, (num,), "iuf")
        self.array("the ends of play(state, action)", over, (num,), "b")
        if (np.abs(reward) > 1).any():
            self.fail(f"a reward is {reward[np.abs(reward) > 1][0]}", "rewards must be from -1 to 1")
        alone, reward_alone, _ = game.play(state[:1], action[:1])
        if not np.array_equal(alone, after[:1]) or reward_alone[0] != reward[0]:
            self.fail("play(state, action) of one game depends on the others", "compute each game from its own row")
        if not np.array_equal(game.is_over(after), over):
            self.fail("is_over(state) and the ends of play(state, action) differ", "return the same")
        return after[~over]

    def check_from_obs(self, obs: Array, state: Array) -> None:
        if type(self.game).from_obs is BoardGame.from_obs:
            return
        if not np.array_equal(self.game.from_obs(obs), state):
            self.fail("from_obs(observe(state)) isn't state", "return the states that have these observations")

    def array(self, what: str, value: Any, shape: tuple[int, ...], kinds: str) -> Array:
        if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype.kind not in kinds:
            is_array = isinstance(value, np.ndarray)
            actual = f"an array {value.shape} of {value.dtype}" if is_array else f"a {type(value).__name__}"
            names = {"b": "bool", "iu": "integers", "biuf": "numbers", "iuf": "numbers"}
            self.fail(f"{what} is {actual}", f"return an array {shape} of {names[kinds]}")
        return value
