"""What the documentation shows is true: its Python runs, its commands work, its links lead somewhere.

Commands run in the order of their page, in one folder, with tiny budgets: settings behind the shown ones, which win.
Blocks marked `py` show other libraries and aren't run.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space

import zhixing as zx
from zhixing.cli import main
from zhixing.config import SearchConfig
from zhixing.core.tree import tree_map
from zhixing.nets.torso import example_obs

ROOT = Path(__file__).parents[2]
TOP = ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = [*(ROOT / page for page in TOP), *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = ROOT / "examples"
SHORT = ["env_steps=300", "eval_episodes=1", "eval_every_steps=0", "tensorboard=false"]
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
# what is checked only by its first word; the rest of a page must be ours
OTHERS = (".venv/bin/pytest", "pip", "make", "git", "python", "tensorboard", "docker")
# pages whose Python is that of an example
EXPLAINED = {"own-algorithm.md": "own_algorithm.py", "tutorial.md": "ppo_in_100_lines.py"}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def pages_with(language: str) -> list[Path]:
    """Chinese pages aren't run: another test finds their code equal to the English ones'."""
    return [page for page in PAGES if not page.name.endswith(".zh-CN.md") and blocks(page, language)]


def name(page: Path) -> str:
    return page.name


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    shutil.copytree(ROOT / "zoo", tmp_path / "zoo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))  # the same files: another test may have imported them from there
    return tmp_path


@pytest.mark.parametrize("page", pages_with("python"), ids=name)
def test_python_of_a_page_runs_from_top_to_bottom(page: Path, folder: Path) -> None:
    if page.name in EXPLAINED:
        example_obs = (EXAMPLES / EXPLAINED[page.name]).read_text(encoding="utf-8")
        for block in blocks(page, "python"):
            assert block in example_obs, f"not as in examples/{EXPLAINED[page.name]}:\n{block}"
        return
    space: dict[str, object] = {"__name__": page.stem}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), space)


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
    """Files that a page shows as YAML stand where it says so, in the order in which it names them."""
    for file, text in zip(re.findall(r"`(\w+\.yaml)`:\n", page.read_text()), blocks(page, "yaml"), strict=True):
        assert yaml.safe_load(text)
        Path(file).write_text(text)
    monkeypatch.setattr("zhixing.experiments.profiler.ROUNDS", 1)
    monkeypatch.setattr("zhixing.experiments.profiler.cpu_count", lambda: 1)  # many threads on a busy machine take long
    for number, words in enumerate(commands(page)):
        if words[0] == "cd":
            monkeypatch.chdir(folder / words[1] if (folder / words[1]).is_dir() else folder)
            continue
        if words[0] != "zhixing":
            assert words[0] in OTHERS, words
            continue
        if words[1] == "tune" and importlib.util.find_spec("optuna") is None:
            found = Path(words[words.index("--out") + 1], "best.yaml")  # what later commands take from it
            found.parent.mkdir(parents=True)
            found.write_text(f"algorithm: {words[2]}\nenv: {words[words.index('--env') + 1]}\n")
            continue
        if words[1] == "train" and "--out" not in words:
            words += ["--out", f"runs/{number}"]  # names made of the time would collide within a second
        tiny = list(TINY.get(words[1], []))
        if "--dataset" in words and words[2] != "gail":
            tiny.append("offline_updates=50")
        if "--grid" in words:
            tiny.append("lr=1e-3")  # one run is enough to show that the file is read
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
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
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


def test_make_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {words[1] for page in pages_with("sh") for words in commands(page) if words[0] == "make"}
    assert {"train", "test"} <= named <= targets


def test_files_that_the_contributing_guide_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:benchmarks|docs|tests|zhixing)/[\w./]*)`", text)
    assert len(named) > 10
    assert [path for path in named if "NAME" not in path and not (ROOT / path).exists()] == []
    packages = {
        name for row in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", text, re.M) for name in re.findall(r"\w+", row)
    }
    folders = {path.parent.name for path in (ROOT / "zhixing").glob("*/__init__.py")}
    assert folders <= packages


def test_extras_that_pages_name_exist() -> None:
    known = set(re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    named = {extra for page in PAGES for extra in re.findall(r"'\.\[([\w,-]+)\]'", page.read_text(encoding="utf-8"))}
    assert named
    assert {one for extras in named for one in extras.split(",")} <= known


@pytest.mark.parametrize("page", [page for page in PAGES if page.name.endswith(".zh-CN.md")], ids=name)
def test_chinese_pages_show_the_same_code(page: Path) -> None:
    english = page.with_name(page.name.replace(".zh-CN.md", ".md"))
    for language in ("sh", "bash", "python", "py", "yaml"):
        assert blocks(page, language) == blocks(english, language)
    pictures = [re.findall(r"!\[.*?\]\((.*?)\)", one.read_text(encoding="utf-8")) for one in (page, english)]
    assert pictures[0] == pictures[1]


def test_the_tutorial_shows_all_of_its_example() -> None:
    """Its hundred lines, but for the first, which says what the file is, and the last two, which start it."""
    lines = (EXAMPLES / "ppo_in_100_lines.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 100
    shown = "".join(blocks(ROOT / "docs" / "tutorial.md", "python")).splitlines()
    assert [line for line in shown if line] == [line for line in lines[1:-2] if line]


def test_the_notebook_is_the_tutorial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "notebooks"))
    make = importlib.import_module("make")
    text = make.NOTEBOOK.read_text(encoding="utf-8")
    assert text == make.notebook(), "run: python notebooks/make.py"
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    for kind, source in cells:
        if kind == "code":  # commands are no Python
            compile(re.sub(r"^( *)!.*$", r"\1pass", source, flags=re.MULTILINE), "cell", "exec")
            assert "mario" not in source or source.startswith("if MARIO")
        for target in re.findall(r"\]\(([^)#:]+)", source) if kind == "markdown" else []:
            assert (ROOT / "notebooks" / target).exists(), target


def test_pictures_are_small_and_shown() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for picture in (ROOT / "docs" / "pictures").iterdir():
        assert picture.stat().st_size < 150_000, picture.name
        assert f"pictures/{picture.name}" in text


def test_every_page_and_example_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, page.name
    for file in EXAMPLES.glob("*.py"):
        assert f"(../examples/{file.name})" in index, file.name


# --- the table of abilities in docs/algorithms.md ---

VECTOR = Box(-1.0, 1.0, (3,), np.float32)
ACTIONS = {"discrete": Discrete(4), "multi-discrete": MultiDiscrete([3, 2]), "continuous": Box(-1.0, 1.0, (2,))}


def made(algorithm: str, obs: Space, action: Space, mask: int | None = None, **settings: object) -> zx.Learner | None:
    """A learner for these spaces, of two agents where it is for many; None where they are refused."""
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
    """64 actions, as in training."""
    policy, rng, agents = learner.policy, torch.Generator().manual_seed(0), learner.spaces.agents
    rows = 64 * learner.spaces.num_agents
    obs = tree_map(lambda leaf: leaf.reshape(64, *agents, *leaf.shape[1:]), example_obs(learner.spaces.obs, rows))
    if mask is not None:
        mask = mask.expand(64, *agents, -1)
    return policy.act(obs, policy.initial_hidden(64), mask, zx.Phase.COLLECT, rng, 0).action.flatten()


def abilities(algorithm: str) -> list[str]:
    """The cells of its row, found by trying."""
    takes = {kind: made(algorithm, VECTOR, action) is not None for kind, action in ACTIONS.items()}
    action = next(ACTIONS[kind] for kind in ACTIONS if takes[kind])
    by_dict = made(algorithm, Dict({"far": VECTOR, "near": Discrete(3)}), action)
    if by_dict is not None:
        assert len(act(by_dict)) >= 64
    masked = "–"
    if takes["discrete"]:
        learner = made(algorithm, VECTOR, ACTIONS["discrete"], mask=4)
        assert learner is not None
        chosen = act(learner, torch.tensor([True, False, True, False]))
        masked = "yes" if set(chosen.tolist()) <= {0, 2} else "ignored"
    recurrent = made(algorithm, VECTOR, action, net__recurrent="gru")
    if recurrent is not None:
        assert recurrent.policy.initial_hidden(1) is not None
    yes = ["yes" if able else "refused" for able in (*takes.values(), by_dict is not None)]
    return [*yes, masked, "refused" if recurrent is None else "yes"]


def before_results() -> str:
    """The page up to the table that the learning study writes."""
    return (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8").split("<!-- learned: begin -->")[0]


def test_table_of_abilities_is_what_the_code_does() -> None:
    text = before_results()
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", text, re.MULTILINE)
    assert rows
    # what is searched must be there, not only its spaces: tests/contract/test_abilities.py tries that
    rows = [row for row in rows if not issubclass(zx.algorithms.get(row[0]).settings, SearchConfig)]
    wrong = [name for name, cells in rows if cells.split(" | ") != abilities(name)]
    right = [f"| `{name}` | {' | '.join(abilities(name))} |" for name in wrong]
    assert not right, "docs/algorithms.md should have these rows:\n" + "\n".join(right)


def test_both_tables_of_algorithms_name_the_same_ones() -> None:
    text = before_results()
    papers = re.findall(r"^\| \[`(\w+)`\]\(", text, re.MULTILINE)
    assert sorted(papers) == sorted(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert set(papers) == set(zx.algorithms.names())


def test_readmes_promise_no_algorithm_that_is_not_there() -> None:
    for page in PAGES[:2]:
        table = re.search(r"^\|---\|---\|---\|---\|\n((?:\|.*\n)+)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert table
        named = re.findall(r"`(\w+)`", table[1])
        assert named
        assert set(named) <= set(zx.algorithms.names())


def test_the_algorithms_that_compute_initial_priorities_are_named() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    listed = re.search(r"Initial priorities are computed by (.*?)\. With (.*?), new transitions", page, re.DOTALL)
    assert listed is not None
    computing, other = (set(re.findall(r"`(\w+)`", part)) for part in listed.groups())
    for name in zx.algorithms.names():
        if zx.algorithms.get(name).settings.scheme != "off_policy":
            continue
        learner = next(one for action in ACTIONS.values() if (one := made(name, VECTOR, action)) is not None)
        assert (type(learner).priority is not zx.Learner.priority) == (name in computing), name
        assert not (name in computing and name in other)
    assert other == {"td3", "ddpg", "awac", "iql", "maddpg"}
