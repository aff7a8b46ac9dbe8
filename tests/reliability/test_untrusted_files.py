"""Untrusted files: nothing in them is imported, executed, or followed out of their folder without `--trust`."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml

import zhixing as zx
from zhixing import config
from zhixing.envs.adapters.retro_games import RetroGame
from zhixing.envs.crash import crash_report
from zhixing.envs.wrappers.pixels import wrap_pixels
from zhixing.experiments.tune import Choice, Range, trial_settings
from zhixing.training.run_folder import read_checkpoint, write_checkpoint
from zhixing.utils import importing

Command = Callable[..., tuple[int, str, str]]
TINY = {"env_steps": 64, "eval_every": 0, "eval_episodes": 1, "tensorboard": False, "vector__backend": "serial"}


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A path that exists once the untrusted module `evil` in the current folder has been imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZHIXING_TRUST", "0")  # `--trust` changes it; restored at the end
    monkeypatch.setattr(importing, "approved", set())
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("evil", None)
    imported = tmp_path / "imported"
    (tmp_path / "evil.py").write_text(f"open({str(imported)!r}, 'w')\ndef thing(*args, **options): ...\n")
    return imported


def write_run(folder: Path, algorithm: str, env: str, /, **settings: Any) -> Path:
    """Write a run that has only a configuration. Readers build its parts before they read weights."""
    cfg = config.load(algorithm=algorithm, env=env).model_dump(mode="json")
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config.merge(cfg, settings)))
    return folder


GAME, TASK = ("alphazero", "pettingzoo/tictactoe"), ("ppo", "toy/match")
HOSTILE: dict[str, tuple[tuple[str, str], dict[str, Any]]] = {
    "a network without a colon": (GAME, {"net": {"kind": "evil"}}),
    "a network": (GAME, {"net": {"kind": "evil:thing"}}),
    "a network of ppo without a colon": (TASK, {"net": {"kind": "evil"}}),
    "an environment": (TASK, {"env": {"name": "evil:thing"}}),
    "an environment that a package registers": (TASK, {"env": {"name": "evil:Room-v0"}}),
    "an algorithm": (TASK, {"algorithm": "evil:thing"}),
    "a trainer": (TASK, {"trainer": "evil:thing"}),
    "a collector": (TASK, {"collector": "evil:thing"}),
    "an option of the environment": (TASK, {"env": {"name": "toy/match", "shaping": "evil:thing"}}),
    "an option deep inside": (TASK, {"env": {"name": "toy/match", "wrappers": [{"of": ["evil:thing"]}]}}),
    "a key of an option": (TASK, {"env": {"name": "toy/match", "wrappers": {"evil:thing": 1}}}),
    "an option for evaluations": (TASK, {"eval_env": {"shaping": "evil:thing"}}),
    "a package to import": (TASK, {"env": {"name": "toy/match", "import": ["evil"]}}),
    "a tracking server": (TASK, {"mlflow": "http://203.0.113.7:5000"}),
    "a project to log to": (TASK, {"wandb": "evil/project"}),
    "the address of a cluster": (TASK, {"distributed": {"workers": 1, "address": "203.0.113.7:6379"}}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_untrusted_run_imports_nothing(case: str, evil: Path, tmp_path: Path, run_cli: Command) -> None:
    algorithm_and_env, settings = HOSTILE[case]
    run = write_run(tmp_path / "run", *algorithm_and_env, **settings)
    for words in (("eval",), ("resume",), ("export", "-o", "out"), ("collect", "-o", "data")):
        code, _, error = run_cli(words[0], str(run), *words[1:])
        assert code == 2, words
        assert "Traceback" not in error
    if "env" in settings:
        assert run_cli("play", str(run), "--random")[0] == 2
    for open_run in (zx.load, zx.evaluate, zx.Session.resume):
        with pytest.raises(zx.UserError):
            open_run(run)
    assert not evil.exists()


def test_trust_imports_code_named_in_the_configuration(evil: Path, tmp_path: Path, run_cli: Command) -> None:
    run = write_run(tmp_path / "run", *TASK, env={"name": "evil:thing"})
    code, _, error = run_cli("eval", str(run), "--trust")
    assert code == 2
    assert "not a gymnasium.Env" in error  # it was called to make one
    assert evil.exists()


def test_trust_covers_only_names_in_the_configuration(evil: Path) -> None:
    """The import itself rejects every name that isn't written exactly like this in the file."""
    with importing.restricted_to({"evil:other"}):
        for name in ("evil:thing", "evil", "evil:other:thing", "évil:thing", "evil:thing\n", b"evil:thing", None):
            with pytest.raises(zx.UserError):
                importing.import_object(name)  # type: ignore[arg-type]
        for name in ("evil", "evil:Room-v0", "./evil", ".evil"):
            with pytest.raises(zx.UserError):
                importing.import_package(name)
    assert not evil.exists()
    importing.import_object("evil:thing")  # outside of the restriction, names come from the user
    assert evil.exists()


@pytest.mark.parametrize("name", ["evil", "évil:thing", "evil:thing:more", "evil:", ":thing", "../evil:thing", ""])
def test_malformed_names_are_rejected(name: str, evil: Path) -> None:
    with pytest.raises(zx.UserError, match=r"is not a name of code; write your\.module:Name"):
        importing.import_object(name)
    assert not evil.exists()


class Importing(gym.Env):
    """An approved environment that itself imports by name."""

    def __init__(self, part: str = "evil:th") -> None:
        importing.import_object(f"{part}ing")
        self.observation_space, self.action_space = gym.spaces.Box(0, 1, (2,), np.float32), gym.spaces.Discrete(2)


def test_worker_processes_inherit_the_restriction(evil: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    name = "test_untrusted_files:Importing"
    with importing.restricted_to({name}), pytest.raises(zx.UserError, match="isn't approved"):
        zx.envs.ProcessVectorEnv(zx.envs.RegisteredEnv(name), 1, 1)
    assert not evil.exists()


def test_shaping_requires_a_colon(evil: Path) -> None:
    env = gym.make("CartPole-v1", render_mode="rgb_array")
    with pytest.raises(zx.UserError, match="'evil' is not a name of code"):
        wrap_pixels(env, shaping="evil")
    env.close()
    assert not evil.exists()


@pytest.mark.parametrize(
    "env",
    [
        {"name": "evil:thing", "options": {}},
        {"name": "toy/match", "options": {"shaping": "evil:thing"}},
        {"name": "toy/match", "options": {"import": "evil"}},
    ],
)
def test_untrusted_crash_report_imports_nothing(
    env: dict[str, Any], evil: Path, tmp_path: Path, run_cli: Command
) -> None:
    origin = {"seed": 1, "rng": None, "options": None}
    error = {"type": "ValueError", "message": "no", "traceback": ""}
    report = {"backend": "serial", "step_timeout": None, "index": 0, "seed": 1, "origin": origin, "actions": [0]}
    crash_report.write(tmp_path, {"env": env, **report, "error": error})
    code, _, message = run_cli("reproduce", "crash-001.json")
    assert code == 2
    assert "add --trust" in message
    if env["name"] == "toy/match":  # --env approves the environment, not code named in its options
        assert run_cli("reproduce", "crash-001.json", "--env", "toy/match")[0] == 2
    assert not evil.exists()


def test_untrusted_dataset_imports_nothing(evil: Path, tmp_path: Path, run_cli: Command) -> None:
    from zhixing.training.collect_data import collect_from_agent

    zx.train("dqn", "toy/match", out=tmp_path / "mine", quiet=True, env_steps=20, eval_episodes=1, tensorboard=False)
    collect_from_agent(tmp_path / "mine", "data", 20)
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    for changes in ({"env": "evil:thing"}, {"options": {"shaping": "evil:thing"}}):
        (tmp_path / "data" / "manifest.json").write_text(json.dumps(manifest | changes))
        code, _, message = run_cli("train", "bc", "--dataset", "data")
        assert code == 2
        assert "set the environment with --env" in message
    assert not evil.exists()


def test_untrusted_study_chooses_only_values_of_the_search_space() -> None:
    spaces = {"net.kind": Choice(["auto", "mine:Net"]), "lr": Range(1e-4, 1e-2)}
    assert trial_settings({"net.kind": "auto", "lr": 1e-3}, spaces) == {"net": {"kind": "auto"}, "lr": 1e-3}
    for values in ({"net.kind": "evil:thing"}, {"lr": "evil:thing"}, {"lr": 1.0}, {"lr": True}, {"lr": [1e-3]}):
        with pytest.raises(zx.UserError, match="outside the values to search"):
            trial_settings(values, spaces)


@pytest.mark.parametrize("scenario", ["../evil", "/tmp/evil", "evil.json", ""])
def test_retro_scenario_must_not_be_a_path(scenario: str) -> None:
    """A scenario file of stable-retro can run a script."""
    with pytest.raises(zx.UserError, match="names of the game's scenarios"):
        RetroGame("retro/Airstriker-Genesis", scenario=scenario)


def test_agent_json_cant_send_terminal_escape_sequences(tmp_path: Path, run_cli: Command) -> None:
    card = tmp_path / "zoo" / "one" / "agent.json"
    card.parent.mkdir(parents=True)
    card.write_text(json.dumps({"trained_by": "\x1b]0;evil\x07 \x1b[2J train"}))
    code, out, _ = run_cli("zoo", str(tmp_path / "zoo"))
    assert code == 0
    assert "\x1b" not in out
    card.write_text("[" * 100_000)
    assert run_cli("zoo", str(tmp_path / "zoo"))[0] == 2


# --- runs of this user ---

USER_MODULE = """
from pathlib import Path
from zhixing.envs.toy import make
Path("imported").touch()
def room(): return make("toy/match", {})
"""


@pytest.fixture
def evaluate_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[int, str]]:
    """Train in the user's environment. Return a function that evaluates the run as a new process would.

    It returns an exit code and an error message.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZHIXING_TRUST", "0")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("user_rooms", None)
    Path("user_rooms.py").write_text(USER_MODULE)
    zx.train("a2c", "user_rooms:room", out="run", quiet=True, rollout_steps=8, **TINY)

    def evaluate() -> tuple[int, str]:
        monkeypatch.setattr(importing, "approved", set())
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
        sys.modules.pop("user_rooms", None)
        Path("imported").unlink(missing_ok=True)
        try:
            zx.evaluate("run", episodes=1)
        except zx.UserError as error:
            assert not Path("imported").exists()
            return 2, str(error)
        return 0, ""

    return evaluate


def test_a_users_run_needs_no_trust(evaluate_run: Callable[[], tuple[int, str]], tmp_path: Path) -> None:
    assert evaluate_run() == (0, "")
    key = tmp_path / "configuration" / "zhixing" / "key"
    assert (key.stat().st_mode & 0o777, key.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert sorted(path.name for path in key.parent.iterdir()) == ["key"]
    shutil.move("run", "moved")
    shutil.move("moved", "run")
    zx.Session.resume("run", quiet=True, env_steps=128).run()
    assert evaluate_run() == (0, "")  # resuming writes and signs the configuration again


@pytest.mark.parametrize(
    "change",
    [
        lambda: Path("run/signature").unlink(),
        lambda: Path("run/signature").write_text("0" * 64),
        lambda: Path("run/config.yaml").write_text(
            Path("run/config.yaml").read_text().replace("kind: auto", "kind: user_rooms:room")
        ),
        lambda: Path("run/config.yaml").write_text(Path("run/config.yaml").read_text().replace("seed: 0", "seed: 1")),
        lambda: Path("configuration/zhixing/key").write_bytes(bytes(32)),
        lambda: Path("configuration/zhixing/key").unlink(),
        lambda: Path("configuration/zhixing/key").chmod(0o644),
    ],
    ids=["unsigned", "forged", "other code", "other settings", "other key", "no key", "readable key"],
)
def test_run_without_valid_signature_needs_trust(
    change: Callable[[], Any], evaluate_run: Callable[[], tuple[int, str]]
) -> None:
    change()
    code, error = evaluate_run()
    assert code == 2
    assert "user_rooms:room" in error
    assert "--trust" in error


def test_another_module_of_the_same_name_needs_trust(
    evaluate_run: Callable[[], tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Someone returns a user's run together with another module of the same name."""
    (tmp_path / "elsewhere").mkdir()
    shutil.move("run", "elsewhere/run")
    Path("elsewhere/user_rooms.py").write_text(USER_MODULE)
    monkeypatch.chdir("elsewhere")
    assert evaluate_run()[0] == 2


def test_trusted_run_of_someone_else_is_not_signed(evaluate_run: Callable[[], tuple[int, str]]) -> None:
    Path("run/signature").unlink()
    zx.Session.resume("run", quiet=True, env_steps=128, trust=True).run()
    assert not Path("run/signature").exists()
    assert evaluate_run()[0] == 2


def test_training_works_without_a_configuration_folder(
    evaluate_run: Callable[[], tuple[int, str]], tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "configuration")
    (tmp_path / "configuration").write_text("")  # a file, so the folder can't be created
    zx.train("a2c", "user_rooms:room", out="second", quiet=True, rollout_steps=8, **TINY)
    assert not Path("second/signature").exists()
    assert evaluate_run()[0] == 2


def test_runs_without_user_code_are_not_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))
    zx.train("a2c", "toy/match", out=tmp_path / "run", quiet=True, rollout_steps=8, **TINY)
    assert not (tmp_path / "run" / "signature").exists()
    assert not (tmp_path / "configuration").exists()


# --- values in checkpoints ---


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with each kind of collector."""
    folder = tmp_path_factory.mktemp("runs")
    zx.train("dqn", "toy/match", out=folder / "dqn", quiet=True, learning_starts=16, batch_size=8, **TINY)
    zx.train("a3c", "toy/match", out=folder / "a3c", quiet=True, **TINY)
    return folder


PRECIOUS = "years of work\n" * 100
STATES: dict[str, tuple[str, str, Any]] = {
    "a path to append to": ("dqn", "loop.callbacks.Csv 0.path", "precious"),
    "a path to truncate": ("dqn", "loop.callbacks.Csv 0", {"path": "precious", "offset": 3, "waiting": "gone"}),
    "an offset before the file": ("dqn", "loop.callbacks.Csv 0.offset", -1),
    "an offset that is text": ("dqn", "loop.callbacks.Csv 0.offset", "3"),
    "a list of rows": ("dqn", "loop.callbacks.Csv 0.waiting", ["gone"]),
    "a folder for checkpoints": ("dqn", "loop.callbacks.Checkpoint 0.folder", "precious"),
    "another method of a callback": ("dqn", "loop.callbacks.Evaluate 0.iteration_end", None),
    "a value of another type": ("dqn", "loop.callbacks.Evaluate 0.reached", "no"),
    "steps that are text": ("dqn", "loop.actor.env_steps", "64"),
    "negative steps": ("dqn", "loop.actor.env_steps", -64),
    "updates that are text": ("dqn", "loop.learner.updates", "1"),
    "metrics that aren't tensors": ("dqn", "loop.metrics", {"loss": "precious"}),
    "episodes that are text": ("dqn", "loop.recent", ["precious"]),
    "a method of a worker": ("a3c", "loop.actor.pending", [[0, "__setattr__", "spec", "precious"]]),
    "a worker that isn't there": ("a3c", "loop.actor.pending", [[-1, "collect", 1, "collect", 0]]),
    "an attribute of the workers": ("a3c", "loop.actor.pool", "precious"),
}


@pytest.mark.parametrize("case", STATES)
def test_untrusted_checkpoint_restores_only_expected_values(
    case: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, where, value = STATES[case]
    monkeypatch.chdir(tmp_path)
    Path("precious").write_text(PRECIOUS)
    shutil.copytree(finished / name, "run")
    (file,) = Path("run/checkpoints").glob("0*.safetensors")
    state = read_checkpoint(file)
    *path, last = where.split(".")
    part: Any = state
    for key in path:
        part = part[key]
    part[last] = value
    write_checkpoint(file, state)
    with pytest.raises(zx.UserError):
        zx.Session.resume("run", quiet=True, env_steps=128).run()
    assert Path("precious").read_text() == PRECIOUS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "run"]


def test_unchanged_run_resumes(finished: Path, tmp_path: Path) -> None:
    for name in ("dqn", "a3c"):
        shutil.copytree(finished / name, tmp_path / name)
        assert zx.Session.resume(tmp_path / name, quiet=True, env_steps=128).run()["env_steps"] >= 128


# --- links ---

LINKS = ("metrics.csv", "config.yaml", "result.json", ".lock", ".config.yaml.tmp", "checkpoints/.best.safetensors.tmp")


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("hard", [False, True])
def test_link_to_an_outside_file_is_rejected(name: str, hard: bool, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "dqn", tmp_path / "run")
    link, precious = tmp_path / "run" / name, tmp_path / "precious"
    precious.write_text((tmp_path / "run" / "config.yaml").read_text())
    before = precious.read_text()
    link.unlink(missing_ok=True)
    if hard:
        link.hardlink_to(precious)
    else:
        link.symlink_to(precious)
    with pytest.raises(zx.UserError, match="is a hard link" if hard else "is a link out of"):
        zx.Session.resume(tmp_path / "run", quiet=True, env_steps=128).run()
    assert precious.read_text() == before


@pytest.mark.parametrize("name", ["checkpoints", "replay", "crash", "itself"])
def test_folder_that_is_a_link_is_rejected(name: str, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "dqn", tmp_path / "run")
    (tmp_path / "precious").mkdir()
    link = tmp_path / "run" / name
    if link.exists():
        shutil.rmtree(link)
    link.symlink_to(link if name == "itself" else tmp_path / "precious")
    with pytest.raises(zx.UserError, match="is a link out of"):
        zx.Session.resume(tmp_path / "run", quiet=True)
    assert list((tmp_path / "precious").iterdir()) == []


def test_links_in_an_output_folder_are_rejected(tmp_path: Path, run_cli: Command) -> None:
    (tmp_path / "precious").write_text(PRECIOUS)
    (tmp_path / "out" / "output").mkdir(parents=True)
    (tmp_path / "out" / "output" / "seed-0.txt").symlink_to(tmp_path / "precious")
    for words in (("train", "ppo", "--env", "toy/match"), ("sweep", "ppo", "--env", "toy/match", "--seeds", "0")):
        code, _, error = run_cli(*words, "--out", str(tmp_path / "out"))
        assert code == 2
        assert "is a link out of" in error
    assert (tmp_path / "precious").read_text() == PRECIOUS


# --- the source has no other way to import or execute code ---

DYNAMIC = {"import_module", "__import__", "eval", "exec", "compile", "load_env_creator", "loads", "make"}
# calls whose arguments can't come from an untrusted file, with the reason
KNOWN_CALLS = {
    ("zhixing/config/yaml_files.py", "load"),  # YAML with a loader derived from the safe one
    ("zhixing/compile/compiler.py", "compile"),  # torch.compile
    ("zhixing/training/foreign_agents.py", "load"),  # torch.load with weights_only=True
    ("zhixing/__init__.py", "import_module"),  # parts of this package, by a fixed table
    ("zhixing/algorithms/__init__.py", "import_module"),  # the files of a folder
    ("zhixing/utils/importing.py", "import_module"),  # checks the restriction
    ("zhixing/utils/importing.py", "loads"),  # JSON of an environment variable
    ("zhixing/training/resolve.py", "import_module"),  # a constant
    ("zhixing/envs/adapters/gymnasium_ids.py", "import_module"),  # a fixed table
    ("zhixing/envs/adapters/gymnasium_ids.py", "load_env_creator"),  # entry points of Gymnasium's registry
    ("zhixing/envs/adapters/gymnasium_ids.py", "make"),  # ids in Gymnasium's registry
    ("zhixing/envs/adapters/mujoco_v5.py", "make"),  # the same
    ("zhixing/envs/vector/constructors.py", "load_env_creator"),  # entry points of that registry
    ("zhixing/envs/adapters/foraging.py", "make"),  # an id composed of numbers
    ("zhixing/envs/adapters/pettingzoo_envs.py", "import_module"),  # modules of a fixed package
    ("zhixing/envs/adapters/smac.py", "import_module"),  # a fixed table
    ("zhixing/envs/vector/worker.py", "loads"),  # pickles of the parent process, through a pipe
    ("zhixing/envs/vector/worker_process.py", "loads"),  # pickles of a worker process, through a pipe
    ("zhixing/envs/vector/action_log.py", "loads"),  # pickles in memory shared with a worker process
    ("zhixing/envs/portable.py", "loads"),  # pickles of the parent process, through a pipe or Ray
    ("zhixing/distributed/learner_group.py", "loads"),  # pickles of processes of the same run
}


def dynamic_calls(path: Path) -> set[str]:
    """Return the calls in a file that may turn text into code. `json.loads` and zhixing's `make` don't."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            owner = (
                node.func.value.id
                if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
                else ""
            )
            plain = (name == "eval" and isinstance(node.func, ast.Attribute)) or (name == "compile" and owner != "")
            loads = name == "load" and owner in ("pickle", "cloudpickle", "torch", "np", "yaml")
            makes = name != "make" or owner in ("gym", "gymnasium")
            if loads or (name in DYNAMIC and not plain and owner != "json" and makes):
                found.add(name)
    return found


def test_no_other_call_turns_text_into_code() -> None:
    root = Path(zx.__file__).parents[1]
    found = {
        (str(path.relative_to(root)), name) for path in root.glob("zhixing/**/*.py") for name in dynamic_calls(path)
    }
    assert found - KNOWN_CALLS == set(), (
        "use zhixing.utils.importing, or explain in KNOWN_CALLS why the argument can't come from a file"
    )
