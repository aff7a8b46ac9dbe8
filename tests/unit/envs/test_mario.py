"""Super Mario on real emulators: against gym-super-mario-bros, core against core, resume, sharing one emulator."""

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
from zhixing.envs.adapters.mario import nes_core, rules, task
from zhixing.envs.adapters.mario.retro_core import Emulator
from zhixing.envs.adapters.mario.rules import Mark
from zhixing.errors import UserError

FRAMES = {"skip": 1, "stack": 1, "grey": False, "size": None}
JUMP_RIGHT, RUN_RIGHT = 4, 3  # of the simple actions


@pytest.fixture(autouse=True)
def _one_emulator() -> Any:
    yield
    gc.collect()
    Emulator.running = None  # whatever a failed test left


class IntRam(np.ndarray):
    """Gives single bytes as Python's ints: with NumPy 2 the package's arithmetic overflows."""

    def __getitem__(self, where: Any) -> Any:
        found = super().__getitem__(where)
        return int(found) if isinstance(where, int) else np.asarray(found)


def package(**options: Any) -> Any:
    from gym_super_mario_bros import SuperMarioBrosEnv
    from nes_py import nes_env

    nes_core._count_in_ints(nes_env)

    class Ints(SuperMarioBrosEnv):
        def _ram_buffer(self) -> Any:
            return super()._ram_buffer().view(IntRam)

    return Ints(**options)


def test_any_memory_gives_the_reward_info_and_end_of_the_package() -> None:
    rng = np.random.default_rng(0)
    level, whole = package(target=(1, 1)), package()
    states, screens = [*range(13)], [0, 1, 1, 1, 2]
    seen: list[tuple[float, bool]] = []
    for _ in range(3000):
        ram = rng.integers(0, 256, 2048, dtype=np.uint8)
        # what decides, chosen so that every case comes up often
        ram[rules.STATE], ram[rules.Y_SCREEN] = rng.choice(states), rng.choice(screens)
        ram[rules.FLOAT_STATE], ram[rules.MODE] = rng.choice([0, 1, 3]), rng.choice([0, 1, 1, 2])
        ram[rules.ENEMIES.start : rules.ENEMIES.stop] = rng.choice([0, 6, 0x2D, 0x31], 5)
        ram[rules.LIVES], ram[rules.STATUS] = rng.choice([0, 2, 255]), rng.choice([0, 1, 2, 3])
        ram[rules.WORLD] = rng.integers(0, 7)  # in world 8 an end is ours alone, see below
        for digits in (rules.SCORE, rules.COINS, rules.TIME):
            ram[digits] = rng.integers(0, 10, digits.stop - digits.start)
        here = rules.mark(ram)
        before = Mark(here.x + int(rng.integers(-7, 8)), max(here.time + int(rng.integers(-2, 3)), 0))
        for theirs, ours in ((level, (1, 1)), (whole, None)):
            theirs.ram[:] = ram
            theirs._x_position_last, theirs._time_last = before
            reward = min(max(theirs._get_reward(), -15), 15)
            assert rules.reward_of(ram, before) == (reward, here)
            assert rules.info_of(ram) == theirs._get_info()
            assert rules.over(ram, ours) == bool(theirs._get_done())
            assert rules.busy(ram) == theirs._is_busy
            seen.append((reward, rules.over(ram, ours)))
    assert len({reward for reward, _ in seen}) > 8
    assert 0.2 < np.mean([over for _, over in seen]) < 0.8
    level.close()
    whole.close()


@pytest.mark.parametrize(
    ("name", "target", "plays"),
    [
        ("mario/1-1", (1, 1), ([RUN_RIGHT] * 24 + [JUMP_RIGHT] * 24) * 7),
        ("mario/2-2", (2, 2), [1, 5] * 40),  # under water
        ("mario", None, [1] * 620),  # walks into the first enemy until all lives are gone
    ],
)
def test_slow_core_does_to_the_number_what_the_package_does(name: str, target: Any, plays: list[int]) -> None:
    theirs, ours = package(target=target), make(name, **FRAMES, core="nes")
    screen, (picture, info) = theirs.reset(), ours.reset(seed=0)
    np.testing.assert_array_equal(picture, screen.transpose(2, 0, 1))
    assert info == theirs._get_info()
    ended = 0
    for frame, action in enumerate(plays):
        screen, reward, done, told = theirs.step(task.ACTIONS["simple"][action])
        picture, own, terminated, truncated, info = ours.step(action)
        assert (own, terminated, truncated) == (reward, done, False), frame
        assert info == told
        if frame % 10 == 0 or done:
            np.testing.assert_array_equal(picture, screen.transpose(2, 0, 1))
        if done:
            ended += 1
            theirs.reset()
            ours.reset()
    assert ended >= (0 if target == (2, 2) else 1)
    theirs.close()
    ours.close()


@pytest.mark.parametrize("name", ["mario/1-1", "mario/1-2", "mario/4-1"])
@pytest.mark.parametrize("pattern", [[RUN_RIGHT] * 24 + [JUMP_RIGHT] * 24, [1] * 16 + [2] * 20 + [6] * 4])
def test_both_cores_move_mario_alike(name: str, pattern: list[int]) -> None:
    """nes-py shows what a button does one frame later. But for that, Mario goes the same way, pixel by pixel, for 250
    frames or until he dies."""
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
    same = min(len(paths["retro"]), len(paths["nes"]) - 1)
    assert same > 90
    assert paths["retro"][:same] == paths["nes"][1 : same + 1]
    assert paths["retro"][-1][0] > 150


def test_every_level_begins_where_it_should() -> None:
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
@pytest.mark.parametrize("rom", list(task.ROMS))
def test_all_cartridges_play_the_same_game(rom: str, core: str) -> None:
    env = make("mario/1-1", **FRAMES, rom=rom, core=core, render_mode="rgb_array")
    picture, _ = env.reset(seed=0)
    for _ in range(30):
        seen, *_, info = env.step(1)
    assert 50 < info["x_pos"] < 80
    np.testing.assert_array_equal(env.render().transpose(2, 0, 1), seen)
    assert not np.array_equal(picture, seen)
    assert env.observation_space.shape == ((3, 224, 240) if core == "retro" else (3, 240, 256))
    env.close()


@pytest.mark.parametrize("options", [{}, FRAMES, {"actions": "all", "noops": 5, "sticky": 0.25}])
def test_is_what_gymnasium_calls_an_environment(options: dict[str, Any]) -> None:
    env = make("mario/1-1", **options, render_mode="rgb_array")
    check_env(env, skip_render_check=True)
    env.close()


def actions_for(steps: int, num: int, seed: int = 0) -> np.ndarray:
    chances = [0.05, 0.15, 0.25, 0.15, 0.3, 0.05, 0.05]
    return np.random.default_rng(seed).choice(7, (steps, num), p=chances)


def test_resumes_exactly_in_the_middle() -> None:
    options = {"noops": 10, "sticky": 0.2, "shaping": "usual", "render_mode": "rgb_array"}
    first = make_vector("mario/1-1", 2, "serial", options=options)
    first.reset(seed=1)
    for actions in actions_for(30, 2):
        first.step(actions)
    state, picture = first.state_dict(), first.render(1)
    rest = actions_for(300, 2, seed=1)
    wanted = [[part.copy() for part in first.step(actions)[:4]] for actions in rest]
    assert any(terminated.any() for _, _, terminated, _ in wanted)
    first.close()
    assert Emulator.running is None
    second = make_vector("mario/1-1", 2, "serial", options=options)
    second.reset(seed=7)
    second.load_state_dict(state)
    assert second.inexact == []
    np.testing.assert_array_equal(second.render(1), picture)
    for actions, expected in zip(rest, wanted, strict=True):
        for a, b in zip(second.step(actions)[:4], expected, strict=True):
            np.testing.assert_array_equal(a, b)
    second.close()


def test_environments_that_share_an_emulator_do_not_notice() -> None:
    """Three in one process, one by one and in processes: the same numbers."""
    played = {}
    for backend, workers in (("serial", None), ("process", 2), ("process", 3)):
        env = make_vector("mario/1-2", 3, backend, workers, {"noops": 20}, render_mode="rgb_array")
        obs = [env.reset(seed=4)[0].copy()]
        for actions in actions_for(25, 3):
            obs.append(env.step(actions)[0].copy())
        played[backend, workers] = (np.stack(obs), np.stack([env.render(index) for index in range(3)]))
        env.close()
    (seen, shown), *others = played.values()
    assert len({row.tobytes() for row in seen[-1]}) == 3
    for other_seen, other_shown in others:
        np.testing.assert_array_equal(seen, other_seen)
        np.testing.assert_array_equal(shown, other_shown)


def test_two_cartridges_in_one_process_are_refused_until_one_is_closed() -> None:
    env = make("mario/1-1")
    with pytest.raises(UserError, match=r"pixel.nes can't run beside super-mario-bros.nes.*vector.backend=process"):
        make("mario/1-1", rom="pixel")
    other = make("mario/2-1")  # the same cartridge is no trouble
    env.close()
    other.close()
    assert Emulator.running is None
    forgotten = make("mario/1-1", rom="pixel")
    del forgotten
    make("mario/1-1", rom="rectangle").close()


def test_a_wrong_option_leaves_no_emulator_behind() -> None:
    with pytest.raises(UserError, match="pool='mean'"):
        make("mario/1-1", pool="mean")
    assert Emulator.running is None


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


def test_other_bytes_of_memory_are_told() -> None:
    env = make("mario/1-1", ram={"low": "0x86", "page": 0x6D})
    _, info = env.reset(seed=0)
    assert (info["page"], info["low"]) == (0, info["x_pos"])
    env.close()
