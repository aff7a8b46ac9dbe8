"""The documentation is correct: its Python code and its commands run, its links resolve, its tables match the code.

The commands of a page run in order, in one folder, with settings for tiny budgets appended. Code blocks marked `py`
show other libraries and don't run.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import numpy as np
import pytest
import torch
import yaml
from feature_table import documented_features
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space
from mypy import api as mypy

import zhixing as zx
from zhixing.cli import main
from zhixing.config import MultiPolicyConfig, SearchConfig
from zhixing.core.optimizer import Optimizer
from zhixing.core.tree import tree_map
from zhixing.nets.torso import example_obs

ROOT = Path(__file__).parents[2]
TOP = ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = [*(ROOT / page for page in TOP), *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = ROOT / "examples"
SHORT = ["env_steps=300", "eval_episodes=1", "eval_every=0", "tensorboard=false"]
TINY = {
    "train": SHORT,
    "sweep": [*SHORT, "--seeds", "0"],
    "tune": [*SHORT, "--trials", "1"],
    "profile": ["--seconds", "0.1"],
    "resume": ["env_steps=600"],
    "eval": ["--episodes", "1"],
    "collect": ["--steps", "600"],
    "export": ["--episodes", "1"],
}
# commands that don't run here; every other command of a page must be `zhixing` or `cd`
NOT_RUN = (".venv/bin/pytest", "pip", "make", "git", "python", "tensorboard", "docker")
# pages whose Python code is copied from an example
EXPLAINED = {"own-algorithm.md": "custom_algorithm.py", "tutorial.md": "ppo_in_100_lines.py"}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def pages_with(language: str) -> list[Path]:
    """Return the English pages with code in a language. The Chinese pages have the same code, see below."""
    return [page for page in PAGES if not page.name.endswith(".zh-CN.md") and blocks(page, language)]


def name(page: Path) -> str:
    return page.name


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    shutil.copytree(ROOT / "zoo", tmp_path / "zoo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))  # not the copies: another test may have imported these
    return tmp_path


@pytest.mark.parametrize("page", pages_with("python"), ids=name)
def test_python_code_of_a_page_runs_or_equals_its_example(page: Path, folder: Path) -> None:
    if page.name in EXPLAINED:
        example = (EXAMPLES / EXPLAINED[page.name]).read_text(encoding="utf-8")
        for block in blocks(page, "python"):
            assert block in example, f"not as in examples/{EXPLAINED[page.name]}:\n{block}"
        return
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), namespace)


def test_python_code_of_the_first_pages_has_correct_types(tmp_path: Path) -> None:
    """Checks it as a project that uses zhixing does, with `mypy --strict`."""
    pages = [page for page in pages_with("python") if page.name in ("README.md", "quickstart.md")]
    for page in pages:
        (tmp_path / f"{page.stem}_code.py").write_text("\n".join(blocks(page, "python")))
    options = ["--strict", "--follow-imports=silent", "--config-file=", f"--cache-dir={ROOT}/.mypy_cache/docs"]
    out, err, code = mypy.run([*options, *(str(tmp_path / f"{page.stem}_code.py") for page in pages)])
    assert code == 0, out + err
    assert "no issues found in 2 source files" in out


def commands(page: Path) -> Iterator[list[str]]:
    for block in blocks(page, "sh"):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


@pytest.mark.parametrize("page", pages_with("sh"), ids=name)
def test_commands_of_a_page_work(
    page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The YAML blocks of a page are written to the files that it names, in order, before its commands run."""
    for file, text in zip(re.findall(r"`(\w+\.yaml)`:\n", page.read_text()), blocks(page, "yaml"), strict=True):
        assert yaml.safe_load(text)
        Path(file).write_text(text)
    monkeypatch.setattr("zhixing.experiments.profiler.ROUNDS", 1)
    monkeypatch.setattr("zhixing.experiments.profiler.cpu_count", lambda: 1)  # many threads are slow on a busy machine
    for number, words in enumerate(commands(page)):
        if words[0] == "cd":
            monkeypatch.chdir(folder / words[1] if (folder / words[1]).is_dir() else folder)
            continue
        if words[0] != "zhixing":
            assert words[0] in NOT_RUN, words
            continue
        if words[1] == "--install-completion":  # tests/unit/cli/test_completion.py does it in an empty home folder
            continue
        if words[1] == "tune" and importlib.util.find_spec("optuna") is None:
            best = Path(words[words.index("--out") + 1], "best.yaml")  # later commands read it
            best.parent.mkdir(parents=True)
            best.write_text(f"algorithm: {words[2]}\nenv: {words[words.index('--env') + 1]}\n")
            continue
        if "onnx" in words and importlib.util.find_spec("onnxscript") is None:
            continue
        if words[1] == "train" and "--out" not in words:
            words += ["--out", f"runs/{number}"]  # default names contain the time in seconds and would collide
        tiny = list(TINY.get(words[1], []))
        if "--dataset" in words and words[2] != "gail":
            tiny.append("offline_updates=50")
        if "--grid" in words:
            tiny.append("lr=1e-3")  # one run is enough to test that the file is read
        if "mcts" in words[2:3]:
            tiny += ["env_steps=10", "simulations=2"]
        monkeypatch.setattr("sys.argv", [*words, *tiny])
        code: object = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code
        assert not code, f"{' '.join(words)}: {capsys.readouterr().err}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_of_a_page_resolve(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in anchors, f"{page.name} links to {target}, there are {anchors}"


def test_make_targets_in_pages_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {words[1] for page in pages_with("sh") for words in commands(page) if words[0] == "make"}
    assert {"train", "test"} <= named <= targets


def test_files_in_the_contributing_guide_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:benchmarks|docs|tests|zhixing)/[\w./]*)`", text)
    assert len(named) > 10
    assert [path for path in named if "NAME" not in path and not (ROOT / path).exists()] == []
    packages = {
        name for row in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", text, re.M) for name in re.findall(r"\w+", row)
    }
    folders = {path.parent.name for path in (ROOT / "zhixing").glob("*/__init__.py")}
    assert folders <= packages


def test_tests_in_pages_exist() -> None:
    named = {path for page in PAGES for path in re.findall(r"`(tests/[\w/]+\.py)", page.read_text(encoding="utf-8"))}
    assert "tests/contract/test_resume.py" in named
    assert [path for path in sorted(named) if "NAME" not in path and not (ROOT / path).exists()] == []


def test_functions_on_the_path_of_one_transition_exist() -> None:
    text = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    path = text.partition("## The path of one transition\n")[2].partition("\n## ")[0]
    files = {ROOT / "docs" / file for file in re.findall(r"\]\((\S+\.py)\)", path)}
    code = "".join(file.read_text(encoding="utf-8") for file in files)
    named = set(re.findall(r"`(?:\w+\.)?(\w+)`", path))
    assert len(named) > 10
    assert [name for name in named if not re.search(rf"(def|class) {name}\b", code)] == []


def functions_of_one_transition(algorithm: str, folder: Path) -> set[CodeType]:
    """Return the functions that run from the last env step before an update to the first change of the weights."""
    package = str(Path(zx.__file__).parent)
    functions: set[CodeType] = set()
    updated = False

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal updated
        updated |= event == "return" and frame.f_code is Optimizer.move.__code__
        if updated or event != "call":
            return
        frames = [frame]
        if frame.f_code is zx.envs.SerialVectorEnv.step.__code__:
            functions.clear()
            while (caller := frames[-1].f_back) is not None:
                frames.append(caller)
        codes = (one.f_code for one in frames)
        functions.update(code for code in codes if code.co_filename.startswith(package) and code.co_name[0] != "<")

    cfg = zx.config.load(algorithm=algorithm, env="CartPole-v1", num_envs=1, vector__backend="serial", env_steps=1_100)
    session = zx.Session(cfg, folder, quiet=True)
    sys.setprofile(profile)
    try:
        session.run()
    finally:
        sys.setprofile(None)
    assert updated
    return functions


def test_path_of_one_transition_is_as_long_as_documented(tmp_path: Path) -> None:
    page = " ".join((ROOT / "docs" / "concepts.md").read_text(encoding="utf-8").split())
    documented = re.search(r"(\d+) functions in (\d+) files for PPO, and (\d+) functions in (\d+) files for DQN", page)
    assert documented is not None
    counts = []
    for algorithm in ("ppo", "dqn"):
        functions = functions_of_one_transition(algorithm, tmp_path / algorithm)
        counts += [len(functions), len({code.co_filename for code in functions})]
    assert counts == pytest.approx([int(number) for number in documented.groups()], rel=0.1)


def test_extras_in_pages_exist() -> None:
    known = set(re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    named = {extra for page in PAGES for extra in re.findall(r"'\.\[([\w,-]+)\]'", page.read_text(encoding="utf-8"))}
    assert named
    assert {extra for extras in named for extra in extras.split(",")} <= known


@pytest.mark.parametrize("page", [page for page in PAGES if page.name.endswith(".zh-CN.md")], ids=name)
def test_chinese_pages_have_the_same_code_and_images(page: Path) -> None:
    english = page.with_name(page.name.replace(".zh-CN.md", ".md"))
    for language in ("sh", "bash", "python", "py", "yaml"):
        assert blocks(page, language) == blocks(english, language)
    images = [re.findall(r"!\[.*?\]\((.*?)\)", file.read_text(encoding="utf-8")) for file in (page, english)]
    assert images[0] == images[1]


def test_tutorial_shows_its_whole_example() -> None:
    """All of its 100 lines except the docstring and the call of `main`."""
    lines = (EXAMPLES / "ppo_in_100_lines.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 100
    shown = "".join(blocks(ROOT / "docs" / "tutorial.md", "python")).splitlines()
    assert [line for line in shown if line] == [line for line in lines[1:-2] if line]


def test_notebook_is_generated_from_the_tutorial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "notebooks"))
    make = importlib.import_module("make")
    text = make.NOTEBOOK.read_text(encoding="utf-8")
    assert text == make.make_notebook(), "run: python notebooks/make.py"
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    for kind, source in cells:
        if kind == "code":  # commands aren't Python
            compile(re.sub(r"^( *)!.*$", r"\1pass", source, flags=re.MULTILINE), "cell", "exec")
            assert "mario" not in source or source.startswith("if MARIO")
        for target in re.findall(r"\]\(([^)#:]+)", source) if kind == "markdown" else []:
            assert (ROOT / "notebooks" / target).exists(), target


def test_images_are_small_and_used() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for image in (ROOT / "docs" / "pictures").iterdir():
        assert image.stat().st_size < 150_000, image.name
        assert f"pictures/{image.name}" in text


def test_every_page_and_example_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, page.name
    for file in EXAMPLES.glob("*.py"):
        assert f"(../examples/{file.name})" in index, file.name


# --- the table of features in docs/algorithms.md ---

VECTOR = Box(-1.0, 1.0, (3,), np.float32)
ACTIONS = {
    "discrete": Discrete(4),
    "multi-discrete": MultiDiscrete([3, 2]),
    "multi-binary": MultiBinary(3),
    "continuous": Box(-1.0, 1.0, (2,)),
    "hybrid": Dict({"tool": Discrete(3), "aim": Box(-1.0, 1.0, (2,))}),
}


def make_learner(
    algorithm: str, obs: Space, action: Space, mask: int | None = None, **settings: object
) -> zx.Learner | None:
    """Make a learner for these spaces, with two agents if it is multi-agent. Return None if it rejects them."""
    team = {"num_agents": 2, "state": 3} if zx.algorithms.get(algorithm).multi_agent else {}
    spaces = zx.Spaces(obs, action, mask=mask, **team)
    try:
        return zx.algorithms.get(algorithm).make(
            zx.config.load(algorithm=algorithm, env="toy/match", **settings), spaces
        )
    except zx.UserError:
        return None


@torch.no_grad()
def act(learner: zx.Learner, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Sample 64 actions as in training."""
    policy, rng, agents = learner.policy, torch.Generator().manual_seed(0), learner.spaces.agents
    rows = 64 * learner.spaces.num_agents
    obs = tree_map(lambda leaf: leaf.reshape(64, *agents, *leaf.shape[1:]), example_obs(learner.spaces.obs, rows))
    if mask is not None:
        mask = mask.expand(64, *agents, -1)
    return policy.act(obs, policy.initial_hidden(64), mask, zx.Phase.COLLECT, rng, 0).action.flatten()


def supported_features(algorithm: str) -> dict[str, str]:
    """Return the cells of the algorithm's row by column, found by making learners."""
    accepts = {kind: make_learner(algorithm, VECTOR, action) is not None for kind, action in ACTIONS.items()}
    action = next(ACTIONS[kind] for kind in ACTIONS if accepts[kind])
    with_dict = make_learner(algorithm, Dict({"far": VECTOR, "near": Discrete(3)}), action)
    if with_dict is not None:
        assert len(act(with_dict)) >= 64
    masks = "–"
    if accepts["discrete"]:
        learner = make_learner(algorithm, VECTOR, ACTIONS["discrete"], mask=4)
        assert learner is not None
        actions = act(learner, torch.tensor([True, False, True, False]))
        masks = "yes" if set(actions.tolist()) <= {0, 2} else "ignored"
    recurrent = make_learner(algorithm, VECTOR, action, net__recurrent="gru")
    if recurrent is not None:
        assert recurrent.policy.initial_hidden(1) is not None
    supports = {**accepts, "dict observations": with_dict is not None, "recurrent networks": recurrent is not None}
    return {name: "yes" if supported else "no" for name, supported in supports.items()} | {"action masks": masks}


def test_table_of_features_matches_the_code() -> None:
    # search needs an environment, not only its spaces; tests/contract/test_abilities.py tests it
    excluded = SearchConfig, MultiPolicyConfig
    names = [name for name in zx.algorithms.names() if not issubclass(zx.algorithms.get(name).settings, excluded)]
    wrong = {}
    for name in names:
        features, documented = supported_features(name), documented_features()[name]
        wrong |= {(name, key): cell for key, cell in features.items() if documented[key] != cell}
    assert not wrong, "docs/algorithms.md should have these cells"


def test_both_tables_list_all_algorithms() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    papers = re.findall(r"^\| \[`(\w+)`\]\(", text, re.MULTILINE)
    assert sorted(papers) == sorted(documented_features()) == zx.algorithms.names()


def test_readmes_list_all_algorithms() -> None:
    for page in PAGES[:2]:
        table = re.search(r"^\|---\|---\|\n((?:\|.*\n)+)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert table
        assert sorted(re.findall(r"`(\w+)`", table[1])) == zx.algorithms.names()
        compared = re.search(r"^\| (?:zhixing|知行) [\d.]+ \| (\d+) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert compared
        assert int(compared[1]) == len(zx.algorithms.names())


def test_scaling_page_lists_the_algorithms_with_initial_priorities() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    listed = re.search(r"Initial priorities are computed by (.*?)\. With (.*?), new transitions", page, re.DOTALL)
    assert listed is not None
    with_priority, without = (set(re.findall(r"`(\w+)`", part)) for part in listed.groups())
    for name in zx.algorithms.names():
        if zx.algorithms.get(name).settings.scheme != "off_policy":
            continue
        learner = next(one for action in ACTIONS.values() if (one := make_learner(name, VECTOR, action)) is not None)
        assert (type(learner).priority is not zx.Learner.priority) == (name in with_priority), name
    assert without == {"crossq", "td3", "ddpg", "awac", "iql", "maddpg"}
    assert not with_priority & without
