"""Environments from elsewhere: ids that packages and scripts register, files, classes, functions and instances."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import cli_exit_code
from sample_tasks import Counter
from torch import nn

import zhixing as zx
from zhixing.envs import make, make_vector
from zhixing.envs.adapters import gymnasium_ids
from zhixing.envs.portable import env_settings
from zhixing.envs.vector import backend_choice
from zhixing.errors import UserError
from zhixing.training.resolve import default_out
from zhixing.utils import importing, named_objects

PACKAGE = """
import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

class Room(gym.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}
    observation_space = Box(0, 99, (1,), np.float32)
    action_space = Discrete(2)

    def __init__(self, size: int = 3, render_mode: str | None = None) -> None:
        self.size, self.render_mode = size, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(1, self.t, np.float32), 1.0, self.t == self.size, False, {}

    def render(self):
        return np.full((16, 16, 3), 40 * self.t, np.uint8)
"""
REGISTER = """
gym.register("Room-v0", entry_point="my_rooms:Room", max_episode_steps=7)
gym.register("rooms/Large-v1", entry_point=Room, kwargs={"size": 5})
gym.register("Plain", entry_point=Room)
"""
FAST = {"env_steps": 64, "rollout_steps": 32, "num_envs": 2, "eval_episodes": 2, "tensorboard": False}
WORDS = ["env_steps=64", "rollout_steps=32", "num_envs=2", "eval_episodes=2", "tensorboard=false"]


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave neither ids, nor modules, nor names behind."""
    ids, modules, known = set(gym.registry), set(sys.modules), set(importing.approved)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("ZHIXING_TRUST", "")  # which --trust sets
    monkeypatch.setattr(gymnasium_ids, "imported_packages", [])
    monkeypatch.setattr(named_objects, "_objects", {})
    yield
    for name in set(gym.registry) - ids:
        del gym.registry[name]
    for module in set(sys.modules) - modules:
        if "rooms" in module:
            del sys.modules[module]
    importing.approved.intersection_update(known)


@pytest.fixture
def package(tmp_path: Path, clean: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_rooms.py").write_text(PACKAGE + REGISTER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def steps_until_the_end(env: Any) -> int:
    env.reset(seed=0)
    for step in range(1, 50):
        *_, terminated, truncated, _ = env.step(env.action_space.sample() * 0)
        if np.any(terminated) or np.any(truncated):
            return step
    return 0


# --- ids of packages ---


def test_package_and_id_name_an_environment(package: Path) -> None:
    assert steps_until_the_end(make("my_rooms:Room-v0")) == 3
    assert steps_until_the_end(make("my_rooms:Room-v0", size=9)) == 7  # the limit of its registration
    assert steps_until_the_end(make("my_rooms:rooms/Large-v1")) == 5
    assert steps_until_the_end(make("my_rooms:Plain")) == 3  # not a name in the module, but a registered id
    assert steps_until_the_end(make("my_rooms:Room")) == 3  # the class itself
    with pytest.raises(UserError, match="unknown environment of my_rooms: 'Rom-v0': did you mean 'Room-v0'"):
        make("my_rooms:Rom-v0")
    with pytest.raises(UserError, match="there is no module 'no_rooms'"):
        make("no_rooms:Room-v0")
    with pytest.raises(UserError, match="there is no Room-v3; the newest version is 'Room-v0'"):
        make("my_rooms:Room-v3")


def test_package_that_registers_when_it_is_asked_to(tmp_path: Path, clean: None, monkeypatch: Any) -> None:
    """As MinAtar does."""
    body = "".join(f"    {line}\n" for line in REGISTER.splitlines()).replace("my_rooms", "late_rooms")
    (tmp_path / "late_rooms.py").write_text(f"{PACKAGE}\ndef register_envs():\n{body}")
    monkeypatch.chdir(tmp_path)
    assert steps_until_the_end(make("late_rooms:Room-v0")) == 3


@pytest.mark.parametrize("backend", ["serial", "process", "mixed"])
@pytest.mark.parametrize("name", ["my_rooms:Room-v0", "Room-v0", "rooms/Large-v1"])
def test_ids_of_packages_work_with_every_back_end(package: Path, name: str, backend: str) -> None:
    gymnasium_ids.import_packages(["my_rooms"])
    with closing(make_vector(name, 2, backend, None if backend == "serial" else 2)) as env:
        assert steps_until_the_end(env) == (5 if "Large" in name else 3)


@pytest.mark.parametrize(
    ("words", "recorded"),
    [(["--env", "my_rooms:Room-v0"], "[]"), (["--env", "Room-v0", "--import", "my_rooms"], "[my_rooms]")],
)
def test_a_run_records_what_to_import(
    package: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], recorded: str
) -> None:
    """Another process finds it again: that of `eval`, `video` and `resume`."""
    assert cli_exit_code(monkeypatch, "train", "ppo", *words, *WORDS, "vector.backend=process", "--out", "run") == 0
    text = (package / "run" / "config.yaml").read_text()
    assert f"imports: {recorded}" in text or "imports:\n- my_rooms\n" in text
    script = (
        "import zhixing as zx, zhixing.report.video\n"
        "assert zx.evaluate('run', 2).summary()['mean_return'] == 3\n"
        "assert zhixing.report.video.record_video('run', 'v.mp4') == [3.0]\n"
        "assert zx.Session.resume('run', env_steps=128, quiet=True).run()['final_return'] == 3\n"
    )
    env = {**importing.child_environment(), "ZHIXING_TRUST": "1"}
    subprocess.run([sys.executable, "-c", script], check=True, cwd=package, env=env)


def test_a_run_of_a_stranger_imports_no_package(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, values in enumerate(({"env": "my_rooms:Room-v0"}, {"env": "Room-v0", "imports": ["my_rooms"]})):
        zx.train("ppo", out=package / str(number), quiet=True, **FAST, **values)
    (package / "my_rooms.py").write_text("raise SystemExit('imported')")
    for number in "01":
        (package / number / "signature").unlink()  # which says that this user made it
        script = f"import zhixing as zx\nzx.load({number!r})"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=package)
        assert "it names code to import" in done.stderr
        assert "my_rooms" in done.stderr
        assert "imported\n" not in done.stderr


def test_a_module_that_registered_the_id_is_recorded(package: Path) -> None:
    """Where a script imports it by itself."""
    __import__("my_rooms")
    zx.train("ppo", env="Room-v0", out="run", quiet=True, **FAST)
    assert zx.config.read_yaml(Path("run/config.yaml"))["imports"] == ["my_rooms"]


def test_import_lists_and_checks_what_a_package_registers(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_exit_code(monkeypatch, "list", "envs", "--import", "my_rooms") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("registered by my_rooms - installed") + 1].split() == [
        "Plain",
        "Room-v0",
        "rooms/Large-v1",
    ]
    assert cli_exit_code(monkeypatch, "check", "Room-v0", "--import", "my_rooms") == 0
    assert cli_exit_code(monkeypatch, "check", "Room-v0", "--import", "no_rooms") == 2
    assert "there is no module 'no_rooms'" in capsys.readouterr().err


def test_an_id_that_only_a_script_registered_is_asked_for(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from my_rooms import Room

    gym.register("Script-v0", entry_point=lambda **options: Room(**options))
    monkeypatch.setattr("zhixing.training.resolve.registering_module", lambda name: None)  # as of __main__
    zx.train("ppo", env="Script-v0", out="run", quiet=True, vector__backend="process", **FAST)
    del gym.registry["Script-v0"]
    assert cli_exit_code(monkeypatch, "eval", "run") == 2
    assert "register it in a module and name that with --import, or give the class" in capsys.readouterr().err
    assert zx.evaluate("run", 2, env=Room).summary()["mean_return"] == 3


@pytest.mark.parametrize(
    "name",
    [
        "minigrid:MiniGrid-Empty-5x5-v0",  # a part of its observation is text
        "highway_env:highway-fast-v0",
        "flappy_bird_gymnasium:FlappyBird-v0",
        "popgym:popgym-RepeatPreviousEasy-v0",
        "minatar:MinAtar/Breakout-v1",
    ],
)
def test_packages_of_others(name: str, tmp_path: Path, clean: None) -> None:
    pytest.importorskip(name.partition(":")[0])
    settings = {**FAST, "env_steps": 8, "rollout_steps": 4, "env__max_episode_steps": 4}
    zx.train("ppo", env=name, out=tmp_path / "run", quiet=True, vector__backend="process", **settings)
    assert zx.evaluate(tmp_path / "run", 2).summary()["mean_length"] <= 4


def test_text_in_an_observation_is_left_out(clean: None) -> None:
    class Told(Counter):
        observation_space = gym.spaces.Dict({"n": Counter.observation_space, "words": gym.spaces.Text(9)})

        def reset(self, **arguments: Any) -> Any:
            obs, info = super().reset(**arguments)
            return {"n": obs, "words": "go"}, info

        def step(self, action: Any) -> Any:
            obs, *rest = super().step(action)
            return {"n": obs, "words": "stop"}, *rest

    with closing(make_vector(lambda: Told(limit=3), 2, "serial")) as env:
        assert list(env.spaces.obs.spaces) == ["n"]
        assert steps_until_the_end(env) == 3
    notes = {found.check: found.message for found in zx.envs.check_env(Told, limit=3) if found.status == "note"}
    assert notes["spaces"] == "words of the observation is text, which is left out"


# --- files ---


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_a_file_and_a_class_name_an_environment(
    tmp_path: Path, clean: None, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    folder = tmp_path / "rooms beside"
    folder.mkdir()
    (folder / "rooms_helper.py").write_text("SIZE = 4\n")
    (folder / "rooms_file.py").write_text(
        f"{PACKAGE}\nfrom rooms_helper import SIZE\nclass Four(Room):\n    class In(Room): ...\n"
    )
    monkeypatch.chdir(folder)
    words = ["--env", "rooms_file.py:Four", "env.size=2", *WORDS, f"vector.backend={backend}", "--out", "../run"]
    assert cli_exit_code(monkeypatch, "train", "ppo", *words) == 0
    cfg = zx.config.load(algorithm="ppo", env="rooms_file.py:Four")
    assert default_out(cfg).name.startswith("ppo-rooms_file.py-Four-0-")
    monkeypatch.chdir(tmp_path)
    assert zx.config.read_yaml(Path("run/config.yaml"))["env"]["name"] == f"{folder}/rooms_file.py:Four"
    assert zx.evaluate("run", 2).summary()["mean_return"] == 2
    assert steps_until_the_end(make(f"{folder}/rooms_file.py:Four.In")) == 3
    assert "rooms_file" not in sys.modules  # it takes no module's place
    with pytest.raises(UserError, match=r"rooms_file.py: 'Fuor': did you mean 'Four'"):
        make(f"{folder}/rooms_file.py:Fuor")
    with pytest.raises(UserError, match="there is no file"):
        make("nowhere/rooms_file.py:Four")


def test_a_file_in_the_run_of_a_stranger_is_not_imported(tmp_path: Path, clean: None) -> None:
    file = tmp_path / "rooms.py"
    file.write_text(PACKAGE)
    zx.train("ppo", env=f"{file}:Room", out=tmp_path / "run", quiet=True, **FAST)
    file.write_text("raise SystemExit('imported')")
    (tmp_path / "run" / "signature").unlink()
    script = f"import zhixing as zx\nzx.load({str(tmp_path / 'run')!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert f"it names code to import (or a cluster to join): {file}:Room" in done.stderr


# --- objects ---


class Tower(nn.Module):
    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(int(np.prod(space.shape or ())), 8)

    def forward(self, obs: Any) -> Any:
        return self.linear(obs.flatten(1)).tanh()


def test_objects_that_can_be_imported_are_recorded_by_their_names(tmp_path: Path, clean: None) -> None:
    zx.train("ppo", env=Counter, env__limit=4, net=Tower, out=tmp_path / "run", quiet=True, **FAST)
    values = zx.config.read_yaml(tmp_path / "run" / "config.yaml")
    assert (values["env"], values["net"]["kind"]) == ({"name": "sample_tasks:Counter", "limit": 4}, f"{__name__}:Tower")
    assert zx.evaluate(tmp_path / "run", 2).summary()["mean_length"] == 4
    # groups of settings may be given in all their forms
    for settings in (
        {"env": {"name": Counter, "limit": 4}, "net": {"kind": Tower}},
        {"env__name": Counter, "net": Tower},
    ):
        cfg = zx.config.load(algorithm="ppo", **settings)
        assert (cfg.env.name, cfg.net.kind) == ("sample_tasks:Counter", f"{__name__}:Tower")
    assert zx.config.load(algorithm="ppo", env="CartPole-v1", net="my.nets:Net").net.kind == "my.nets:Net"


@pytest.mark.parametrize("backend", ["serial", "process", "mixed", "auto"])
@pytest.mark.parametrize("kind", ["local class", "lambda", "instance", "gymnasium.make", "registered"])
def test_objects_that_cannot_be_imported_work_with_every_back_end(clean: None, kind: str, backend: str) -> None:
    class Local(Counter):
        """Known to this function alone."""

    gym.register("Local-v0", entry_point=Local, max_episode_steps=6)
    given: Any = {
        "local class": Local,
        "lambda": lambda: Local(limit=6),
        "instance": Local(limit=6),
        "gymnasium.make": gym.make("Local-v0", limit=6),
        "registered": "Local-v0",
    }[kind]
    options = {"limit": 6} if kind == "local class" else {}
    workers = 2 if backend in ("process", "mixed") else None
    with closing(make_vector(given, 2, backend, workers, options=options)) as env:
        assert steps_until_the_end(env) == 6


def test_auto_falls_back_to_serial_where_a_worker_cannot_make_it(
    clean: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = threading.Lock()  # can't be sent
    monkeypatch.setattr(backend_choice, "cpu_count", lambda: 2)
    monkeypatch.setattr(backend_choice, "WAKE_SECONDS", {"process": 0.0, "mixed": 0.0})

    def locked() -> gym.Env[Any, Any]:
        with lock:
            return Counter(limit=3)

    with closing(make_vector(locked, 2)) as env:
        assert env.backend == "serial"
        assert steps_until_the_end(env) == 3
    message = capsys.readouterr().err
    assert "runs in this process (vector.backend=serial)" in message
    assert "can't be sent to another process" in message
    with pytest.raises(UserError, match=r"can't be sent to another process .*set vector.backend=serial"):
        make_vector(locked, 2, "process")
    with closing(make_vector(Counter, 2)) as env:  # what can be sent is
        assert env.backend == "mixed"


def test_an_instance_is_a_template(clean: None) -> None:
    env = Counter(limit=5)
    env.reset(seed=0)
    with closing(make_vector(env, 3, "serial")) as vector:
        assert steps_until_the_end(vector) == 5
    assert (env.episode, env.steps) == (0, 0)  # the one that was given is never stepped
    assert env_settings(env)["name"] == "sample_tasks:Counter(...)"
    assert env_settings(Counter(limit=5))["name"] == "sample_tasks:Counter(...)#2"  # another one has another name
    cartpole = gym.make("CartPole-v1", max_episode_steps=20, sutton_barto_reward=True)
    assert env_settings(cartpole) == {"name": "CartPole-v1", "max_episode_steps": 20, "sutton_barto_reward": True}
    held = Counter()
    held.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"this Counter can't be copied .* give a class or a function that makes it"):
        make_vector(held, 1)


def test_a_run_whose_objects_cannot_be_imported_says_how_to_give_them(tmp_path: Path, clean: None) -> None:
    run = tmp_path / "run"

    class Room(Counter): ...

    class Net(Tower): ...

    zx.train("ppo", env=Room, env__limit=4, net=Net, out=run, quiet=True, **FAST)
    assert zx.evaluate(run, 2).summary()["mean_length"] == 4  # this process has them still
    named_objects._objects.clear()
    with pytest.raises(UserError, match=r"was given in Python as an object.*zx.load\(run, env=MyEnv\)"):
        zx.load(run)
    (run / "signature").unlink()
    with pytest.raises(UserError, match=r"it names code to import"):
        zx.load(run)
    assert zx.load(run, env=Room, net=Net).act(np.zeros(2, np.float32)) is not None
    assert zx.evaluate(run, 2, env=Room, net=Net).summary()["mean_length"] == 4
    result = zx.Session.resume(run, env=Room, net=Net, env_steps=128, quiet=True).run()
    assert result["env_steps"] == 128
    with pytest.raises(UserError, match="env='CartPole-v1' is a name; give the class itself"):
        zx.load(run, env="CartPole-v1")


SCRIPT = """
import gymnasium as gym
import zhixing as zx
from my_rooms import Room
from torch import nn

class Mine(Room):
    pass

class Net(nn.Module):
    def __init__(self, space):
        super().__init__()
        self.linear = nn.Linear(1, 8)

    def forward(self, obs):
        return self.linear(obs)

gym.register("Mine-v0", entry_point=Mine)
for number, (env, backend) in enumerate([(Mine, "process"), ("Mine-v0", "mixed"), (lambda: Mine(3), "process")]):
    result = zx.train("ppo", env=env, net=Net, vector__backend=backend, vector__workers=2, out=f"run{number}",
                      quiet=True, env_steps=64, rollout_steps=32, num_envs=2, tensorboard=False)
    assert result["final_return"] == 3, result
    assert zx.evaluate(f"run{number}", 2).summary()["mean_return"] == 3
zx.train("ppo", env="Mine-v0", net=Net, distributed__learners=2, out="apart", quiet=True, env_steps=64,
         rollout_steps=32, num_envs=2, tensorboard=False)
"""


def test_a_script_trains_in_what_it_defines_itself(package: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (package / "script.py").write_text(SCRIPT)
    env = importing.child_environment()
    subprocess.run([sys.executable, "script.py"], check=True, cwd=package, env=env, timeout=240)
    assert zx.config.read_yaml(package / "run0" / "config.yaml")["env"]["name"] == "__main__:Mine"
    assert cli_exit_code(monkeypatch, "eval", "run0") == 2
    assert "define it in a module that can be imported, or give it again" in capsys.readouterr().err
