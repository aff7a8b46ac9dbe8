"""Environments of users: ids that packages and scripts register, files, classes, functions and instances."""

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
from sample_envs import Counter
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
SHORT = ["env_steps=64", "rollout_steps=32", "num_envs=2", "eval_episodes=2", "tensorboard=false"]


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove ids, modules and names that a test adds."""
    ids, modules, approved = set(gym.registry), set(sys.modules), set(importing.approved)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("ZHIXING_TRUST", "")  # --trust sets it
    monkeypatch.setattr(gymnasium_ids, "imported_packages", [])
    monkeypatch.setattr(named_objects, "_objects", {})
    yield
    for name in set(gym.registry) - ids:
        del gym.registry[name]
    for module in set(sys.modules) - modules:
        if "rooms" in module:
            del sys.modules[module]
    importing.approved.intersection_update(approved)


@pytest.fixture
def package(tmp_path: Path, clean: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_rooms.py").write_text(PACKAGE + REGISTER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def episode_length(env: Any) -> int:
    """Return the number of steps until any episode ends, or 0 if none does."""
    env.reset(seed=0)
    for step in range(1, 50):
        *_, terminated, truncated, _ = env.step(env.action_space.sample() * 0)
        if np.any(terminated) or np.any(truncated):
            return step
    return 0


# --- ids of packages ---


def test_env_is_named_by_package_and_id(package: Path) -> None:
    assert episode_length(make("my_rooms:Room-v0")) == 3
    assert episode_length(make("my_rooms:Room-v0", size=9)) == 7  # the limit of its registration
    assert episode_length(make("my_rooms:rooms/Large-v1")) == 5
    assert episode_length(make("my_rooms:Plain")) == 3  # a registered id, not a name in the module
    assert episode_length(make("my_rooms:Room")) == 3  # the class itself
    with pytest.raises(UserError, match="unknown environment of my_rooms: 'Rom-v0': did you mean 'Room-v0'"):
        make("my_rooms:Rom-v0")
    with pytest.raises(UserError, match="there is no module 'no_rooms'"):
        make("no_rooms:Room-v0")
    with pytest.raises(UserError, match="there is no Room-v3; the newest version is 'Room-v0'"):
        make("my_rooms:Room-v3")


def test_register_envs_of_a_package_is_called(tmp_path: Path, clean: None, monkeypatch: Any) -> None:
    """MinAtar registers its ids in such a function."""
    body = "".join(f"    {line}\n" for line in REGISTER.splitlines()).replace("my_rooms", "late_rooms")
    (tmp_path / "late_rooms.py").write_text(f"{PACKAGE}\ndef register_envs():\n{body}")
    monkeypatch.chdir(tmp_path)
    assert episode_length(make("late_rooms:Room-v0")) == 3


@pytest.mark.parametrize("backend", ["serial", "process", "mixed"])
@pytest.mark.parametrize("name", ["my_rooms:Room-v0", "Room-v0", "rooms/Large-v1"])
def test_package_ids_work_with_every_backend(package: Path, name: str, backend: str) -> None:
    gymnasium_ids.import_packages(["my_rooms"])
    with closing(make_vector(name, 2, backend, None if backend == "serial" else 2)) as env:
        assert episode_length(env) == (5 if "Large" in name else 3)


@pytest.mark.parametrize(
    ("arguments", "recorded"),
    [(["--env", "my_rooms:Room-v0"], "[]"), (["--env", "Room-v0", "--import", "my_rooms"], "[my_rooms]")],
)
def test_run_records_its_imports(
    package: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], recorded: str
) -> None:
    """Other processes, such as those of `eval`, `video` and `resume`, then import the same package."""
    assert cli_exit_code(monkeypatch, "train", "ppo", *arguments, *SHORT, "vector.backend=process", "--out", "run") == 0
    text = (package / "run" / "config.yaml").read_text()
    assert f"imports: {recorded}" in text or "imports:\n- my_rooms\n" in text
    script = (
        "import zhixing as zx, zhixing.reports.video\n"
        "assert zx.evaluate('run', 2).summary()['mean_return'] == 3\n"
        "assert zhixing.reports.video.record_video('run', 'v.mp4') == [3.0]\n"
        "assert zx.Session.resume('run', env_steps=128, quiet=True).run()['final_return'] == 3\n"
    )
    env = {**importing.child_environment(), "ZHIXING_TRUST": "1"}
    subprocess.run([sys.executable, "-c", script], check=True, cwd=package, env=env)


def test_untrusted_run_imports_no_package(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, values in enumerate(({"env": "my_rooms:Room-v0"}, {"env": "Room-v0", "imports": ["my_rooms"]})):
        zx.train("ppo", out=package / str(number), quiet=True, **FAST, **values)
    (package / "my_rooms.py").write_text("raise SystemExit('imported')")
    for number in "01":
        (package / number / "signature").unlink()  # proves that this user made the run
        script = f"import zhixing as zx\nzx.load({number!r})\nprint('loaded')\nzx.evaluate({number!r})"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=package)
        assert done.stdout == "loaded\n"  # an agent acts without the code of its environment
        assert "it names code to import" in done.stderr
        assert "my_rooms" in done.stderr
        assert "imported\n" not in done.stderr


def test_imported_module_that_registered_the_id_is_recorded(package: Path) -> None:
    """The module may also be imported by the script itself."""
    __import__("my_rooms")
    zx.train("ppo", env="Room-v0", out="run", quiet=True, **FAST)
    assert zx.config.read_yaml(Path("run/config.yaml"))["imports"] == ["my_rooms"]


def test_list_and_check_know_the_ids_of_imported_packages(
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


def test_id_registered_by_a_script_must_be_passed_again(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from my_rooms import Room

    gym.register("Script-v0", entry_point=lambda **options: Room(**options))
    monkeypatch.setattr("zhixing.training.resolve.registering_module", lambda name: None)  # as for __main__
    zx.train("ppo", env="Script-v0", out="run", quiet=True, vector__backend="process", **FAST)
    del gym.registry["Script-v0"]
    assert cli_exit_code(monkeypatch, "eval", "run") == 2
    assert "register it in a module and pass --import MODULE, or pass the class" in capsys.readouterr().err
    assert zx.evaluate("run", 2, env=Room).summary()["mean_return"] == 3


@pytest.mark.parametrize(
    "name",
    [
        "minigrid:MiniGrid-Empty-5x5-v0",  # a part of the observation is text
        "highway_env:highway-fast-v0",
        "popgym:popgym-RepeatPreviousEasy-v0",
        "minatar:MinAtar/Breakout-v1",
    ],
)
def test_third_party_packages(
    name: str, tmp_path: Path, clean: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package, _, env_id = name.partition(":")
    pytest.importorskip(package)
    assert cli_exit_code(monkeypatch, "list", "envs", "--import", package) == 0
    assert env_id.partition("-v")[0] in capsys.readouterr().out
    words = ["--env", env_id, "--import", package, "env.max_episode_steps=4", "--out", str(tmp_path / "run")]
    short = [*SHORT, "env_steps=8", "rollout_steps=4", "vector.backend=process"]
    assert cli_exit_code(monkeypatch, "train", "ppo", *words, *short) == 0
    assert zx.config.read_yaml(tmp_path / "run" / "config.yaml")["imports"] == [package]
    assert zx.evaluate(tmp_path / "run", 2).summary()["mean_length"] <= 4
    zx.envs.make(name).close()


def test_text_in_observations_is_dropped(clean: None) -> None:
    class WithText(Counter):
        observation_space = gym.spaces.Dict({"n": Counter.observation_space, "mission": gym.spaces.Text(9)})

        def reset(self, **arguments: Any) -> Any:
            obs, info = super().reset(**arguments)
            return {"n": obs, "mission": "go"}, info

        def step(self, action: Any) -> Any:
            obs, *rest = super().step(action)
            return {"n": obs, "mission": "stop"}, *rest

    with closing(make_vector(lambda: WithText(limit=3), 2, "serial")) as env:
        assert list(env.spaces.obs.spaces) == ["n"]
        assert episode_length(env) == 3
    results = {result.check: result for result in zx.envs.check_env(WithText, limit=3)}
    assert results["spaces"].status == "warning"
    assert results["spaces"].message == "mission of the observation is text, which policies don't receive"


# --- files ---


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_env_is_named_by_file_and_class(
    tmp_path: Path, clean: None, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    folder = tmp_path / "rooms folder"
    folder.mkdir()
    (folder / "rooms_helper.py").write_text("SIZE = 4\n")
    (folder / "rooms_file.py").write_text(
        f"{PACKAGE}\nfrom rooms_helper import SIZE\nclass Four(Room):\n    class In(Room): ...\n"
    )
    monkeypatch.chdir(folder)
    arguments = [
        "--env",
        "rooms_file.py:Four",
        "env.size=2",
        *SHORT,
        f"vector.backend={backend}",
        "--out",
        "../run",
    ]
    assert cli_exit_code(monkeypatch, "train", "ppo", *arguments) == 0
    cfg = zx.config.load(algorithm="ppo", env="rooms_file.py:Four")
    assert default_out(cfg).name.startswith("ppo-rooms_file.py-Four-0-")
    monkeypatch.chdir(tmp_path)
    assert zx.config.read_yaml(Path("run/config.yaml"))["env"]["name"] == f"{folder}/rooms_file.py:Four"
    assert zx.evaluate("run", 2).summary()["mean_return"] == 2
    assert episode_length(make(f"{folder}/rooms_file.py:Four.In")) == 3
    assert "rooms_file" not in sys.modules  # a file is not registered as a module
    with pytest.raises(UserError, match=r"rooms_file.py: 'Fuor': did you mean 'Four'"):
        make(f"{folder}/rooms_file.py:Fuor")
    with pytest.raises(UserError, match="there is no file"):
        make("nowhere/rooms_file.py:Four")


def test_untrusted_run_imports_no_file(tmp_path: Path, clean: None) -> None:
    file = tmp_path / "rooms.py"
    file.write_text(PACKAGE)
    zx.train("ppo", env=f"{file}:Room", out=tmp_path / "run", quiet=True, **FAST)
    file.write_text("raise SystemExit('imported')")
    (tmp_path / "run" / "signature").unlink()
    run = str(tmp_path / "run")
    script = f"import zhixing as zx\nzx.load({run!r})\nprint('loaded')\nzx.evaluate({run!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "loaded\n"  # an agent acts without the code of its environment
    assert f"it names code to import (or a machine to connect to): {file}:Room" in done.stderr


# --- objects ---


class Net(nn.Module):
    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(int(np.prod(space.shape or ())), 8)

    def forward(self, obs: Any) -> Any:
        return self.linear(obs.flatten(1)).tanh()


def test_importable_objects_are_recorded_by_name(tmp_path: Path, clean: None) -> None:
    zx.train("ppo", env=Counter, env__limit=4, net=Net, out=tmp_path / "run", quiet=True, **FAST)
    values = zx.config.read_yaml(tmp_path / "run" / "config.yaml")
    assert (values["env"], values["net"]["kind"]) == ({"name": "sample_envs:Counter", "limit": 4}, f"{__name__}:Net")
    assert zx.evaluate(tmp_path / "run", 2).summary()["mean_length"] == 4
    # all forms of nested settings are accepted
    for settings in (
        {"env": {"name": Counter, "limit": 4}, "net": {"kind": Net}},
        {"env__name": Counter, "net": Net},
    ):
        cfg = zx.config.load(algorithm="ppo", **settings)
        assert (cfg.env.name, cfg.net.kind) == ("sample_envs:Counter", f"{__name__}:Net")
    assert zx.config.load(algorithm="ppo", env="CartPole-v1", net="my.nets:Net").net.kind == "my.nets:Net"


@pytest.mark.parametrize("backend", ["serial", "process", "mixed", "auto"])
@pytest.mark.parametrize("kind", ["local class", "lambda", "instance", "gymnasium.make", "registered"])
def test_objects_that_cannot_be_imported_work_with_every_backend(clean: None, kind: str, backend: str) -> None:
    class Local(Counter):
        """Can't be imported, because it is defined in a function."""

    gym.register("Local-v0", entry_point=Local, max_episode_steps=6)
    env_object: Any = {
        "local class": Local,
        "lambda": lambda: Local(limit=6),
        "instance": Local(limit=6),
        "gymnasium.make": gym.make("Local-v0", limit=6),
        "registered": "Local-v0",
    }[kind]
    options = {"limit": 6} if kind == "local class" else {}
    workers = 2 if backend in ("process", "mixed") else None
    with closing(make_vector(env_object, 2, backend, workers, options=options)) as env:
        assert episode_length(env) == 6


def test_auto_falls_back_to_serial_if_the_env_cannot_be_sent(
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
        assert episode_length(env) == 3
    message = capsys.readouterr().err
    assert "runs in this process (vector.backend=serial)" in message
    assert "can't be sent to another process" in message
    with pytest.raises(UserError, match=r"can't be sent to another process .*set vector.backend=serial"):
        make_vector(locked, 2, "process")
    with closing(make_vector(Counter, 2)) as env:  # this one can be sent
        assert env.backend == "mixed"


def test_instance_is_copied(clean: None) -> None:
    env = Counter(limit=5)
    env.reset(seed=0)
    with closing(make_vector(env, 3, "serial")) as vector:
        assert episode_length(vector) == 5
    assert (env.episode, env.steps) == (0, 0)  # the original is never stepped
    assert env_settings(env)["name"] == "sample_envs:Counter(...)"
    assert env_settings(Counter(limit=5))["name"] == "sample_envs:Counter(...)#2"  # names are unique
    cartpole = gym.make("CartPole-v1", max_episode_steps=20, sutton_barto_reward=True)
    assert env_settings(cartpole) == {"name": "CartPole-v1", "max_episode_steps": 20, "sutton_barto_reward": True}
    held = Counter()
    held.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"this Counter can't be copied .* pass a class or a function instead"):
        make_vector(held, 1)


def test_loading_a_run_without_its_objects_explains_how_to_pass_them(tmp_path: Path, clean: None) -> None:
    run = tmp_path / "run"

    class Room(Counter): ...

    class LocalNet(Net): ...

    zx.train("ppo", env=Room, env__limit=4, net=LocalNet, out=run, quiet=True, **FAST)
    assert zx.evaluate(run, 2).summary()["mean_length"] == 4  # this process still has the objects
    named_objects._objects.clear()
    with pytest.raises(UserError, match=r"was given in Python as an object.*zx.load\(run, env=MyEnv\)"):
        zx.load(run)
    (run / "signature").unlink()
    with pytest.raises(UserError, match=r"it names code to import"):
        zx.load(run)
    assert zx.load(run, env=Room, net=LocalNet).act(np.zeros(2, np.float32)) is not None
    assert zx.evaluate(run, 2, env=Room, net=LocalNet).summary()["mean_length"] == 4
    result = zx.Session.resume(run, env=Room, net=LocalNet, env_steps=128, quiet=True).run()
    assert result["env_steps"] == 128
    with pytest.raises(UserError, match="env='CartPole-v1' is a string; pass the class itself"):
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


def test_script_trains_with_its_own_classes(package: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (package / "script.py").write_text(SCRIPT)
    env = importing.child_environment()
    subprocess.run([sys.executable, "script.py"], check=True, cwd=package, env=env, timeout=240)
    assert zx.config.read_yaml(package / "run0" / "config.yaml")["env"]["name"] == "__main__:Mine"
    assert cli_exit_code(monkeypatch, "eval", "run0") == 2
    assert "define it in a module that can be imported, or pass it again" in capsys.readouterr().err
