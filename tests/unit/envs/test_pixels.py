"""Image preprocessing wrappers, on a game whose frames are known."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from gymnasium.utils.env_checker import check_env

from zhixing.buffers import Buffer
from zhixing.core.batch import Batch
from zhixing.core.tree import Field
from zhixing.envs.vector.serial import SerialVectorEnv
from zhixing.envs.wrappers import resize
from zhixing.envs.wrappers.frames import make_processor, select_frame_options
from zhixing.envs.wrappers.pixels import PIXEL_OPTIONS, noop, split_options, wrap_pixels
from zhixing.errors import UserError

PLAIN = {"action_repeat": 1, "pool": "last", "grayscale": False, "size": None, "stack": 1}


class CountingGame(gym.Env):
    """A game whose frame t is gray: 20 t, and 255 - 20 t in its left half. The reward equals the action. The game
    terminates at frame `length`; lives are lost at the frames `losses`."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 60}  # noqa: RUF012  (as in gym.Env)

    def __init__(self, length: int = 10**6, losses: tuple[int, ...] = (), key: str = "lives", noise: bool = False):
        self.observation_space = Box(0, 255, (4, 6, 3), np.uint8)
        self.action_space = Discrete(5)
        self.length, self.losses, self.key, self.noise = length, losses, key, noise
        self.render_mode = "rgb_array"
        self.games, self.actions = 0, []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time, self.games, self.actions = 0, self.games + 1, []
        return self._obs(), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        self.actions.append(int(action))
        extra = float(self.np_random.random()) if self.noise else 0.0
        return self._obs(), action + extra, self.time >= self.length, False, self._info()

    def _obs(self) -> np.ndarray:
        return frame(self.time)

    def _info(self) -> dict[str, Any]:
        return {
            self.key: 3 - sum(self.time >= loss for loss in self.losses),
            "time": self.time,
            "odd": ("not", "a number"),
        }

    def render(self) -> np.ndarray:
        return self._obs()


class RestorableGame(CountingGame):
    def state_dict(self) -> dict[str, Any]:
        return {"time": self.time, "rng": dict(self.np_random.bit_generator.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.time = state["time"]
        self.np_random.bit_generator.state = state["rng"]


class OnDemandGame(CountingGame):
    """Draws images only when `get_obs` is called."""

    num_drawn = 0

    def step_without_obs(self, action: Any) -> tuple[float, bool, bool, dict[str, Any]]:
        _, *rest = super().step(action)
        return tuple(rest)

    def get_obs(self) -> np.ndarray:
        self.num_drawn += 1
        return frame(self.time)


def frame(time: int) -> np.ndarray:
    image = np.full((4, 6, 3), 20 * time % 256, np.uint8)
    image[:, :3] = (255 - 20 * time) % 256
    return image


def channels_first(image: np.ndarray) -> np.ndarray:
    return image.transpose(2, 0, 1)


def double_reward(reward: float, info: dict[str, Any], previous_info: dict[str, Any], terminated: bool) -> float:
    return 2 * reward + (info["time"] - previous_info["time"]) + (100 if terminated else 0)


def test_without_options_only_channels_are_moved() -> None:
    env = wrap_pixels(CountingGame(), **PLAIN)
    obs, _ = env.reset(seed=0)
    assert env.observation_space == Box(0, 255, (3, 4, 6), np.uint8)
    np.testing.assert_array_equal(obs, channels_first(frame(0)))
    obs, reward, *_ = env.step(3)
    np.testing.assert_array_equal(obs, channels_first(frame(1)))
    assert reward == 3.0
    assert env.metadata["render_fps"] == 60


@pytest.mark.parametrize("game_class", [CountingGame, OnDemandGame])
def test_frame_skip_repeats_the_action(game_class: type[CountingGame]) -> None:
    game = game_class()
    env = wrap_pixels(game, **{**PLAIN, "action_repeat": 4, "pool": "max"})
    env.reset(seed=0)
    obs, reward, terminated, truncated, info = env.step(3)
    assert (reward, terminated, truncated, info["time"]) == (12.0, False, False, 4)
    # frames 3 and 4: left 195 and 175, right 60 and 80
    assert set(obs[:, :, :3].flat) == {195}
    assert set(obs[:, :, 3:].flat) == {80}
    last = wrap_pixels(game_class(), **{**PLAIN, "action_repeat": 4})
    last.reset(seed=0)
    np.testing.assert_array_equal(last.step(3)[0], channels_first(frame(4)))
    assert last.metadata["render_fps"] == 15
    if isinstance(game, OnDemandGame):
        assert game.num_drawn == 2  # skipped frames are not drawn


@pytest.mark.parametrize("game_class", [CountingGame, OnDemandGame])
def test_episode_end_within_a_skip_returns_the_last_frame(game_class: type[CountingGame]) -> None:
    env = wrap_pixels(game_class(length=6), **{**PLAIN, "action_repeat": 4, "pool": "max"})
    env.reset(seed=0)
    env.step(1)
    obs, reward, terminated, _, _ = env.step(1)
    assert (reward, terminated) == (2.0, True)  # frames 5 and 6
    np.testing.assert_array_equal(obs, channels_first(frame(6)))


def test_sticky_frames_repeat_the_previous_action() -> None:
    game = CountingGame()
    env = wrap_pixels(game, **{**PLAIN, "action_repeat": 3, "sticky": 0.4})
    env.reset(seed=5)
    actions = [1, 2, 3, 4, 1, 2] * 20
    for action in actions:
        env.step(action)
    draws, last, expected = np.random.default_rng(game.np_random_seed), 0, []
    for action in np.repeat(actions, 3).tolist():
        last = last if draws.random() < 0.4 else action
        expected.append(last)
    assert game.actions == expected
    assert 0.05 < np.mean(np.array(expected) != np.repeat(actions, 3)) < 0.4
    env.reset(seed=5)
    env.step(4)
    assert game.actions[0] in (0, 4)  # not the last action of the previous episode


def test_episode_starts_with_random_noops() -> None:
    env = wrap_pixels(CountingGame(), **{**PLAIN, "noops": 3})
    env.reset(seed=0)
    noops = [env.reset()[1]["time"] for _ in range(200)]
    assert set(noops) == {0, 1, 2, 3}
    assert min(noops.count(n) for n in range(4)) > 25  # of 50 expected
    game = CountingGame(length=2)
    env = wrap_pixels(game, **{**PLAIN, "noops": 9})
    env.reset(seed=0)
    assert {env.reset()[1]["time"] for _ in range(30)} == {0, 1}  # the game restarts if a no-op ends it


@pytest.mark.parametrize(("key", "remaining"), [("lives", [2, 1]), ("life", [2, 1, 0])])
def test_lost_life_ends_the_episode_but_not_the_game(key: str, remaining: list[int]) -> None:
    """`lives` includes the current life, so the game is over at 0. `life` doesn't, so the game continues at 0."""
    game = CountingGame(length=12, losses=(3, 6, 9), key=key)
    env = wrap_pixels(game, **PLAIN, end_on_life_loss=True)
    env.reset(seed=0)
    ends = []
    while game.games == 1:
        *_, terminated, _, info = env.step(1)
        if terminated:
            ends.append((info["time"], info[key]))
            env.reset()
    assert ends == [*((3 * (3 - left), left) for left in remaining), (12, 0)]
    env.step(1)
    env.reset(seed=1)
    assert game.games == 3  # a seed restarts the game


@pytest.mark.parametrize("outside", [False, True])
def test_truncation_restarts_the_game(outside: bool) -> None:
    """The limit is set by the option, or by an outer wrapper such as that of `gym.make`."""
    game = CountingGame(losses=(3,))
    env = wrap_pixels(game, **PLAIN, end_on_life_loss=True, max_episode_steps=None if outside else 5)
    if outside:
        env = gym.wrappers.TimeLimit(env, 5)
    env.reset(seed=0)
    assert [env.step(0)[2:4] for _ in range(3)] == [(False, False), (False, False), (True, False)]
    assert env.reset()[1]["time"] == 4  # a lost life: the game continues
    ends = [env.step(0)[2:4] for _ in range(5)]
    assert ends == [(False, False)] * 4 + [(False, True)]
    assert env.reset()[1] == {"lives": 3, "time": 0, "odd": ("not", "a number")}
    assert game.games == 2


def test_game_that_ends_in_a_reset_restarts() -> None:
    game = CountingGame(length=4, losses=(3,))
    env = wrap_pixels(game, **PLAIN, end_on_life_loss=True)
    env.reset(seed=0)
    assert [env.step(0)[2] for _ in range(3)] == [False, False, True]
    assert env.reset()[1]["time"] == 0
    assert game.games == 2


def test_rewards_are_shaped_then_clipped() -> None:
    env = wrap_pixels(CountingGame(length=4), **{**PLAIN, "action_repeat": 2}, shaping="test_pixels:double_reward")
    env.reset(seed=0)
    assert env.step(3)[1] == 2 * 6 + 2
    assert env.step(1)[1:3] == (2 * 2 + 2 + 100, True)
    clipped = wrap_pixels(CountingGame(), **PLAIN, shaping=lambda reward, *_: reward - 2.0, clip_reward=True)
    clipped.reset(seed=0)
    assert [clipped.step(action)[1] for action in (0, 2, 4)] == [-1.0, 0.0, 1.0]


def test_long_episodes_are_truncated() -> None:
    env = wrap_pixels(CountingGame(), **{**PLAIN, "action_repeat": 2}, max_episode_steps=3)
    for _ in range(2):
        env.reset(seed=0)
        assert [env.step(0)[2:4] for _ in range(3)] == [(False, False), (False, False), (False, True)]


@pytest.mark.parametrize("with_opencv", [True, False])
def test_grayscale_and_resizing_match_hand_computed_values(with_opencv: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if with_opencv:
        pytest.importorskip("cv2")
    else:
        monkeypatch.setattr(resize, "opencv", lambda: None)
    # 0.299, 0.587 and 0.114 of 255
    colors = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255], [0, 0, 0]]], np.uint8)
    assert resize.to_grayscale(colors).tolist() == [[76, 150, 29, 255, 0]]
    # three pixels in two: (0 + 90 / 2) / 1.5 and (90 / 2 + 180) / 1.5
    row = np.array([[0, 90, 180]], np.uint8)
    assert resize.make_resizer((1, 3), (1, 2))(row).tolist() == [[30, 150]]
    assert resize.make_resizer((3, 1), (2, 1))(row.T).tolist() == [[30], [150]]
    color_image = np.array([[[0, 10, 20], [10, 20, 30]], [[20, 30, 40], [30, 40, 50]]], np.uint8)
    assert resize.make_resizer((2, 2), (1, 1))(color_image).tolist() == [[[15, 25, 35]]]
    unchanged = resize.make_resizer((1, 3), (1, 3))(row)
    assert unchanged is not row
    assert unchanged.tolist() == row.tolist()


def test_opencv_and_numpy_resizing_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cv2")
    image = np.random.default_rng(0).integers(0, 256, (224, 240, 3), dtype=np.uint8)
    fast, fast_gray = resize.make_resizer((224, 240), (84, 84))(image), resize.to_grayscale(image)
    monkeypatch.setattr(resize, "opencv", lambda: None)
    for a, b in ((fast, resize.make_resizer((224, 240), (84, 84))(image)), (fast_gray, resize.to_grayscale(image))):
        assert a.shape == b.shape
        assert np.abs(a.astype(int) - b).max() <= 1


def test_grayscale_stacks_match_those_of_a_replay() -> None:
    env = wrap_pixels(CountingGame(length=9), action_repeat=1, size=[2, 3], stack=3)
    assert env.observation_space == Box(0, 255, (3, 2, 3), np.uint8)
    replay = Buffer({"obs": Field((3, 2, 3), np.dtype(np.uint8)), **FLAGS}, 50, frame_stack=3)
    stacks: list[np.ndarray] = []
    obs, _ = env.reset(seed=0)
    for _ in range(20):
        stacks.append(obs)
        next_obs, reward, terminated, truncated, _ = env.step(1)
        flags = {"reward": [reward], "terminated": [terminated], "truncated": [truncated], "action": [1]}
        replay.add(
            Batch(obs=obs[None], next_obs=next_obs[None], **{key: np.array(value) for key, value in flags.items()})
        )
        obs = env.reset()[0] if terminated else next_obs
    assert (stacks[0] == stacks[0][0]).all()  # the first image, three times
    # pixel (0, 2) is on the right: 20 t; the newest is the last
    assert [stack[:, 0, 2].tolist() for stack in stacks[:4]] == [[0, 0, 0], [0, 0, 20], [0, 20, 40], [20, 40, 60]]
    batch = replay.sample(100, np.random.default_rng(0))
    for row, index in enumerate(batch.index.tolist()):
        np.testing.assert_array_equal(batch.obs[row], stacks[index])


FLAGS: dict[str, Any] = {
    "reward": Field((), np.dtype(np.float32)),
    "terminated": Field((), np.dtype(bool)),
    "truncated": Field((), np.dtype(bool)),
    "action": Field((), np.dtype(np.int64)),
}


def test_color_images_stack_as_channels() -> None:
    env = wrap_pixels(CountingGame(), action_repeat=1, grayscale=False, size=None, stack=2)
    first, _ = env.reset(seed=0)
    second = env.step(0)[0]
    np.testing.assert_array_equal(first, np.concatenate([channels_first(frame(0))] * 2))
    np.testing.assert_array_equal(second, np.concatenate([channels_first(frame(0)), channels_first(frame(1))]))
    second[:] = 0
    np.testing.assert_array_equal(env.step(0)[0], np.concatenate([channels_first(frame(1)), channels_first(frame(2))]))


ALL = {"action_repeat": 3, "sticky": 0.3, "noops": 4, "end_on_life_loss": True, "size": [2, 3], "stack": 3}


def fully_wrapped(game_class: type[CountingGame]) -> Any:
    game = game_class(length=90, losses=(30, 60), noise=True)
    return wrap_pixels(game, **ALL, shaping=double_reward, max_episode_steps=25)


@pytest.mark.parametrize("when", [1, 7, 12, 29])
def test_env_with_state_dict_resumes_mid_episode(when: int) -> None:
    first = SerialVectorEnv(lambda: fully_wrapped(RestorableGame), 2)
    assert first.group.sub_envs[0].has_state
    rng = np.random.default_rng(1)
    first.reset(seed=3)
    for _ in range(when):
        first.step(rng.integers(0, 5, 2))
    second = SerialVectorEnv(lambda: fully_wrapped(RestorableGame), 2)
    second.load_state_dict(first.state_dict())
    assert second.inexact == []
    for _ in range(60):
        actions = rng.integers(0, 5, 2)
        for actual, expected in zip(first.step(actions)[:4], second.step(actions)[:4], strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_env_without_state_dict_is_restored_by_replay() -> None:
    def make() -> Any:
        return wrap_pixels(
            CountingGame(length=90, noise=True), action_repeat=3, sticky=0.3, noops=4, size=None, shaping=double_reward
        )

    first, second = SerialVectorEnv(make, 1), SerialVectorEnv(make, 1)
    assert not first.group.sub_envs[0].has_state
    rng = np.random.default_rng(1)
    first.reset(seed=3)
    for _ in range(40):
        first.step(rng.integers(0, 5, 1))
    second.load_state_dict(first.state_dict())
    assert second.inexact == []
    for _ in range(60):
        actions = rng.integers(0, 5, 1)
        for actual, expected in zip(first.step(actions)[:4], second.step(actions)[:4], strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_wrapped_env_passes_gymnasiums_checker() -> None:
    check_env(fully_wrapped(CountingGame), skip_render_check=True)


def test_noop_action() -> None:
    assert noop(Discrete(3, start=2)) == 2
    assert noop(MultiDiscrete([2, 3])).tolist() == [0, 0]


def test_options_are_split() -> None:
    assert PIXEL_OPTIONS[:2] == ("action_repeat", "pool")
    assert split_options({"rom": 1, "action_repeat": 2, "size": 3}) == ({"rom": 1}, {"action_repeat": 2, "size": 3})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"action_repeat": 0}, "env.action_repeat=0: must be an integer of at least 1"),
        ({"stack": True}, "env.stack=True: must be an integer"),
        ({"noops": -1}, "env.noops=-1: must be an integer of at least 0"),
        ({"max_episode_steps": 0}, "env.max_episode_steps=0: must be an integer of at least 1, or null"),
        ({"pool": "mean"}, "env.pool='mean': allowed are max and last"),
        ({"sticky": 1.0}, "env.sticky=1.0: must be a probability of at least 0 and below 1"),
        ({"size": "big"}, r"env.size='big': must be a number of pixels, \[height, width\], or null"),
        ({"size": [84]}, r"env.size=\[84\]"),
        ({"shaping": "test_pixels:nothing"}, "unknown name in module test_pixels"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        wrap_pixels(CountingGame(), **options)


def test_unsuitable_envs_are_rejected() -> None:
    env = wrap_pixels(CountingGame(key="hearts"), end_on_life_loss=True)
    with pytest.raises(UserError, match="needs an environment with lives or life in info"):
        env.reset(seed=0)
    with pytest.raises(UserError, match="expected uint8 images"):
        wrap_pixels(gym.make("CartPole-v1"))


@pytest.mark.parametrize(
    "options", [{"action_repeat": 4}, {"action_repeat": 1, "grayscale": False, "size": [7, 8], "stack": 2}]
)
def test_processor_makes_the_observations_of_the_wrappers(options: dict[str, Any]) -> None:
    """Without an environment: it gets all screens since the last action."""
    game, raw = CountingGame(length=40, noise=True), CountingGame(length=40, noise=True)
    env = wrap_pixels(game, **{"size": None, **options})
    processor = make_processor(select_frame_options({"size": None, **options}), env.observation_space)
    screen = raw.reset(seed=3)[0]
    assert np.array_equal(env.reset(seed=3)[0], processor(screen))
    for _ in range(5):
        screens = [raw.step(0)[0] for _ in range(options["action_repeat"])]
        assert np.array_equal(env.step(0)[0], processor(screens))
    with pytest.raises(UserError, match="don't fit the observations"):
        make_processor(select_frame_options({"stack": 3}), env.observation_space)
