"""Super Mario on real emulators: compared to gym-super-mario-bros, one core to the other, resume, shared emulators."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gym_super_mario_bros")
pytest.importorskip("nes_py")
pytest.importorskip("stable_retro")

from gymnasium.utils.env_checker import check_env

from zhixing.envs import make, make_vector
from zhixing.envs.adapters.mario import nes_core, rules
from zhixing.envs.adapters.mario.env import ACTIONS, ROMS
from zhixing.envs.adapters.mario.retro_core import Emulator
from zhixing.envs.adapters.mario.rules import Progress
from zhixing.errors import UserError

FRAMES = {"action_repeat": 1, "stack": 1, "grayscale": False, "size": None}
JUMP_RIGHT, RUN_RIGHT = 4, 3  # indices of the simple actions


@pytest.fixture(autouse=True)
def _one_emulator() -> Any:
    yield
    gc.collect()
    Emulator.current = None  # a failed test may leave one running


class IntRam(np.ndarray):
    """Return single bytes as Python integers: with NumPy 2 the package's arithmetic overflows."""

    def __getitem__(self, key: Any) -> Any:
        item = super().__getitem__(key)
        return int(item) if isinstance(key, int) else np.asarray(item)


def make_original(**options: Any) -> Any:
    """Return the environment of gym-super-mario-bros."""
    from gym_super_mario_bros import SuperMarioBrosEnv
    from nes_py import nes_env

    nes_core.patch_rom_header(nes_env)

    class IntRamEnv(SuperMarioBrosEnv):
        def _ram_buffer(self) -> Any:
            return super()._ram_buffer().view(IntRam)

    return IntRamEnv(**options)


def test_reward_info_and_termination_of_random_memory_match_the_original() -> None:
    rng = np.random.default_rng(0)
    level_env, game_env = make_original(target=(1, 1)), make_original()
    states, screens = [*range(13)], [0, 1, 1, 1, 2]
    rewards: list[float] = []
    ends: list[bool] = []
    for _ in range(3000):
        ram = rng.integers(0, 256, 2048, dtype=np.uint8)
        # the deciding bytes are sampled so that every case is frequent
        ram[rules.STATE], ram[rules.Y_SCREEN] = rng.choice(states), rng.choice(screens)
        ram[rules.FLOAT_STATE], ram[rules.MODE] = rng.choice([0, 1, 3]), rng.choice([0, 1, 1, 2])
        ram[rules.ENEMIES.start : rules.ENEMIES.stop] = rng.choice([0, 6, 0x2D, 0x31], 5)
        ram[rules.LIVES], ram[rules.STATUS] = rng.choice([0, 2, 255]), rng.choice([0, 1, 2, 3])
        ram[rules.WORLD] = rng.integers(0, 7)  # world 8 ends only in our rules
        for digits in (rules.SCORE, rules.COINS, rules.TIME):
            ram[digits] = rng.integers(0, 10, digits.stop - digits.start)
        progress = rules.read_progress(ram)
        previous = Progress(progress.x + int(rng.integers(-7, 8)), max(progress.time + int(rng.integers(-2, 3)), 0))
        for original, level in ((level_env, (1, 1)), (game_env, None)):
            original.ram[:] = ram
            original._x_position_last, original._time_last = previous
            reward = min(max(original._get_reward(), -15), 15)
            assert rules.compute_reward(ram, previous) == (reward, progress)
            assert rules.read_info(ram) == original._get_info()
            assert rules.is_terminated(ram, level) == bool(original._get_done())
            assert rules.is_busy(ram) == original._is_busy
            rewards.append(reward)
            ends.append(rules.is_terminated(ram, level))
    assert len(set(rewards)) > 8
    assert 0.2 < np.mean(ends) < 0.8
    level_env.close()
    game_env.close()


@pytest.mark.parametrize(
    ("name", "target", "actions"),
    [
        ("mario/1-1", (1, 1), ([RUN_RIGHT] * 24 + [JUMP_RIGHT] * 24) * 7),
        ("mario/2-2", (2, 2), [1, 5] * 40),  # under water
        ("mario", None, [1] * 620),  # walks into the first enemy until all lives are lost
    ],
)
def test_nes_core_equals_the_original(name: str, target: Any, actions: list[int]) -> None:
    original, env = make_original(target=target), make(name, **FRAMES, core="nes")
    screen, (obs, info) = original.reset(), env.reset(seed=0)
    np.testing.assert_array_equal(obs, screen.transpose(2, 0, 1))
    assert info == original._get_info()
    num_ends = 0
    for frame, action in enumerate(actions):
        screen, expected_reward, done, expected_info = original.step(ACTIONS["simple"][action])
        obs, reward, terminated, truncated, info = env.step(action)
        assert (reward, terminated, truncated) == (expected_reward, done, False), frame
        assert info == expected_info
        if frame % 10 == 0 or done:
            np.testing.assert_array_equal(obs, screen.transpose(2, 0, 1))
        if done:
            num_ends += 1
            original.reset()
            env.reset()
    assert num_ends >= (0 if target == (2, 2) else 1)
    original.close()
    env.close()


@pytest.mark.parametrize("name", ["mario/1-1", "mario/1-2", "mario/4-1"])
@pytest.mark.parametrize("pattern", [[RUN_RIGHT] * 24 + [JUMP_RIGHT] * 24, [1] * 16 + [2] * 20 + [6] * 4])
def test_both_cores_move_mario_identically(name: str, pattern: list[int]) -> None:
    """Mario's path is the same, pixel by pixel, for 250 frames or until he dies; nes-py lags one frame behind."""
    paths: dict[str, list[tuple[int, bool]]] = {}
    for core in ("retro", "nes"):
        env = make(name, **FRAMES, core=core)
        env.reset(seed=0)
        path = paths[core] = []
        for action in (pattern * 8)[:250]:
            *_, terminated, _, info = env.step(action)
            path.append((info["x_pos"], terminated))
            if terminated:
                break
        env.close()
    length = min(len(paths["retro"]), len(paths["nes"]) - 1)
    assert length > 90
    assert paths["retro"][:length] == paths["nes"][1 : length + 1]
    assert paths["retro"][-1][0] > 150


def test_every_level_starts_at_its_beginning() -> None:
    for world in range(1, 9):
        for stage in range(1, 5):
            env = make(f"mario/{world}-{stage}", **FRAMES)
            _, info = env.reset(seed=0)
            assert (info["world"], info["stage"], info["life"], info["x_pos"]) == (world, stage, 2, 40)
            assert info["time"] in (299, 300, 399, 400)
            for _ in range(30):
                _, _, terminated, _, info = env.step(1)
            assert 60 < info["x_pos"] < 80  # the game isn't paused
            assert not terminated
            env.close()


@pytest.mark.parametrize("core", ["retro", "nes"])
@pytest.mark.parametrize("rom", list(ROMS))
def test_all_roms_are_playable(rom: str, core: str) -> None:
    env = make("mario/1-1", **FRAMES, rom=rom, core=core, render_mode="rgb_array")
    first_obs, _ = env.reset(seed=0)
    for _ in range(30):
        obs, *_, info = env.step(1)
    assert 50 < info["x_pos"] < 80
    np.testing.assert_array_equal(env.render().transpose(2, 0, 1), obs)
    assert not np.array_equal(first_obs, obs)
    assert env.observation_space.shape == ((3, 224, 240) if core == "retro" else (3, 240, 256))
    env.close()


@pytest.mark.parametrize("options", [{}, FRAMES, {"actions": "all", "noops": 5, "sticky": 0.25}])
def test_env_passes_gymnasiums_checker(options: dict[str, Any]) -> None:
    env = make("mario/1-1", **options, render_mode="rgb_array")
    check_env(env, skip_render_check=True)
    env.close()


def sample_actions(steps: int, num_envs: int, seed: int = 0) -> np.ndarray:
    probabilities = [0.05, 0.15, 0.25, 0.15, 0.3, 0.05, 0.05]
    return np.random.default_rng(seed).choice(7, (steps, num_envs), p=probabilities)


def test_episode_resumes_exactly_in_the_middle() -> None:
    options = {"noops": 10, "sticky": 0.2, "shaping": "score", "render_mode": "rgb_array"}
    first = make_vector("mario/1-1", 2, "serial", options=options)
    first.reset(seed=1)
    for actions in sample_actions(30, 2):
        first.step(actions)
    state, image = first.state_dict(), first.render(1)
    later_actions = sample_actions(300, 2, seed=1)
    expected_steps = [[array.copy() for array in first.step(actions)[:4]] for actions in later_actions]
    assert any(terminated.any() for _, _, terminated, _ in expected_steps)
    first.close()
    assert Emulator.current is None
    second = make_vector("mario/1-1", 2, "serial", options=options)
    second.reset(seed=7)
    second.load_state_dict(state)
    assert second.inexact == []
    np.testing.assert_array_equal(second.render(1), image)
    for actions, expected_step in zip(later_actions, expected_steps, strict=True):
        for actual, expected in zip(second.step(actions)[:4], expected_step, strict=True):
            np.testing.assert_array_equal(actual, expected)
    second.close()


def test_sharing_an_emulator_does_not_change_results() -> None:
    """Three environments give the same observations in one process, in two and in three."""
    results = {}
    for backend, workers in (("serial", None), ("process", 2), ("process", 3)):
        env = make_vector("mario/1-2", 3, backend, workers, {"noops": 20}, render_mode="rgb_array")
        obs = [env.reset(seed=4)[0].copy()]
        for actions in sample_actions(25, 3):
            obs.append(env.step(actions)[0].copy())
        results[backend, workers] = (np.stack(obs), np.stack([env.render(index) for index in range(3)]))
        env.close()
    (expected_obs, expected_images), *process_results = results.values()
    assert len({row.tobytes() for row in expected_obs[-1]}) == 3
    for actual_obs, actual_images in process_results:
        np.testing.assert_array_equal(actual_obs, expected_obs)
        np.testing.assert_array_equal(actual_images, expected_images)


def test_two_roms_in_one_process_are_rejected_until_one_is_closed() -> None:
    env = make("mario/1-1")
    message = r"pixel.nes can't run in the same process as super-mario-bros.nes.*vector.backend=process"
    with pytest.raises(UserError, match=message):
        make("mario/1-1", rom="pixel")
    same_rom = make("mario/2-1")
    env.close()
    same_rom.close()
    assert Emulator.current is None
    unclosed = make("mario/1-1", rom="pixel")
    del unclosed
    make("mario/1-1", rom="rectangle").close()


def test_invalid_option_leaves_no_emulator_running() -> None:
    with pytest.raises(UserError, match="pool='mean'"):
        make("mario/1-1", pool="mean")
    assert Emulator.current is None


def test_life_loss_ends_an_episode_of_the_whole_game() -> None:
    env = make("mario", end_on_life_loss=True, size=None)
    env.reset(seed=0)
    lives = []
    while len(lives) < 4:
        *_, terminated, _, info = env.step(1)
        if terminated:
            lives.append(info["life"])
            _, info = env.reset()
    assert lives == [1, 0, 255, 1]
    env.close()


def test_option_ram_adds_bytes_to_info() -> None:
    env = make("mario/1-1", ram={"low": "0x86", "page": 0x6D})
    _, info = env.reset(seed=0)
    assert (info["page"], info["low"]) == (0, info["x_pos"])
    env.close()
