"""Imports point one way: each package imports only packages to the left of it in `LAYERS`.

Imports inside functions count as well. Those under `if TYPE_CHECKING` don't: they never run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import zhixing

ROOT = Path(zhixing.__file__).parent

# from left to right; packages of one layer don't import each other
LAYERS = [
    ["zhixing"],  # the package itself: __version__, and names that are imported when first used
    ["errors"],
    ["utils"],
    ["config"],
    ["core"],
    ["ops"],
    ["nets"],
    ["buffers", "envs", "compile"],
    ["collect", "offline"],
    ["search"],  # plays episodes with collect
    ["algorithms"],  # mcts and alphazero look ahead with search
    ["training"],
    ["distributed", "report"],
    ["experiments"],
    ["cli"],
    ["__main__"],
]

# (file, package that it imports): why it may point to the right
EXCEPTIONS = {
    ("config/loading.py", "algorithms"): "an algorithm, named by a setting, brings its own settings",
    ("config/loading.py", "envs"): "settings take environments as objects, and import the packages that register them",
    ("config/loading.py", "offline"): "a dataset names the environment that it was recorded in",
    ("config/validation.py", "algorithms"): "the error for an unknown setting names the algorithms that have it",
    ("envs/vector/make.py", "distributed"): "vector.backend=ray; Ray is optional",
    ("algorithms/mcts.py", "training"): "guide=RUN loads the agent of another run, which is made of algorithms",
    ("training/builders/collector.py", "distributed"): "builds the collector; workers may be distributed",
    ("training/builders/learner.py", "distributed"): "builds the learner; several processes may share its updates",
    ("training/run.py", "experiments"): "zx.train measures the settings that are `auto`",
    ("training/callbacks/plot.py", "report"): "plots the run; Matplotlib is slow to import",
    ("training/callbacks/eval_video.py", "report"): "records videos of evaluations; only with eval_video=true",
}


class Import(NamedTuple):
    """An import of another package."""

    file: str  # relative to the root, with slashes
    line: int
    source: str  # package of the file
    target: str  # package that is imported


def imports_of(root: Path) -> list[Import]:
    """Return all imports between packages of the tree `root`, which is named as the package itself."""
    found = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        module = [root.name, *relative.with_suffix("").parts]
        inside = module[:-1]  # what a relative import with one dot starts from
        source = module[1] if module[1] != "__init__" else root.name
        for node in _running(ast.parse(path.read_text(encoding="utf-8"))):
            for name in _imported(node, inside):
                target = _package(name, root)
                if target is not None and target != source:
                    found.append(Import(relative.as_posix(), node.lineno, source, target))
    return found


def _running(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports of a module except those that only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from _running(ast.Module([other], []))
        elif isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        else:
            yield from _running(child)


def _imported(node: ast.Import | ast.ImportFrom, inside: list[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    start = inside[: len(inside) - node.level + 1] if node.level else []
    base = [*start, *([node.module] if node.module else [])]
    return [".".join([*base, alias.name]) for alias in node.names]


def _package(name: str, root: Path) -> str | None:
    """Return the package of the tree that a dotted name belongs to; None for names from elsewhere."""
    top, *rest = name.split(".")
    if top != root.name:
        return None
    is_module = bool(rest) and ((root / rest[0]).is_dir() or (root / f"{rest[0]}.py").is_file())
    return rest[0] if is_module else root.name


def violations(
    imports: list[Import], layers: list[list[str]], exceptions: dict[tuple[str, str], str] | None = None
) -> list[str]:
    """Return a sentence for each import that doesn't point to the left."""
    rank = {package: i for i, layer in enumerate(layers) for package in layer}
    found = []
    for file, line, source, target in imports:
        if (file, target) in (exceptions or {}):
            continue
        missing = [package for package in (source, target) if package not in rank]
        if missing:
            found.append(f"{file}:{line}: {missing[0]} stands in no layer; add it to LAYERS")
        elif rank[target] >= rank[source]:
            allowed = ", ".join(package for layer in layers[: rank[source]] for package in layer)
            found.append(f"{file}:{line}: {source} imports {target}; it may import only {allowed}")
    return found


def cycle(imports: list[Import]) -> list[str]:
    """Return the packages of a cycle, the first one again at the end; empty if there is none."""
    targets: dict[str, list[str]] = {}
    for each in imports:
        targets.setdefault(each.source, []).append(each.target)
    done: set[str] = set()

    def visit(package: str, path: list[str]) -> list[str]:
        if package in path:
            return [*path[path.index(package) :], package]
        if package in done:
            return []
        for target in targets.get(package, []):
            if found := visit(target, [*path, package]):
                return found
        done.add(package)
        return []

    for package in targets:
        if found := visit(package, []):
            return found
    return []


def test_imports_point_to_the_left() -> None:
    found = violations(imports_of(ROOT), LAYERS, EXCEPTIONS)
    assert not found, "\n".join(found)


def test_packages_import_each_other_in_no_cycle() -> None:
    regular = [each for each in imports_of(ROOT) if (each.file, each.target) not in EXCEPTIONS]
    assert not (found := cycle(regular)), " -> ".join(found)


def test_every_package_stands_in_one_layer() -> None:
    files = {path.stem for path in ROOT.glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    named = [package for layer in LAYERS for package in layer]
    assert sorted(named) == sorted({*files, *folders, "zhixing"})


def test_every_exception_is_needed() -> None:
    """An exception without an import would let one in unseen."""
    used = {(each.file, each.target) for each in imports_of(ROOT)}
    assert not (unused := sorted(set(EXCEPTIONS) - used)), f"remove from EXCEPTIONS: {unused}"


def test_at_most_eight_files_at_the_top() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 8


WRONG = {
    "at the top": "from pkg.training import loop\n",
    "a package's name": "from pkg import training\n",
    "whole module": "import pkg.training.loop\n",
    "relative": "from ..training import loop\n",
    "in a function": "def act():\n    from pkg.training.loop import run\n",
    "in a method behind an if": "class A:\n    def act(self):\n        if self:\n            import pkg.training\n",
    "where types aren't checked": "if TYPE_CHECKING:\n    x = 1\nelse:\n    from pkg.training import loop\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small package whose training imports its core."""
    root = tmp_path / "pkg"
    for package in ("core", "training"):
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").touch()
    (root / "__init__.py").write_text("__version__ = '1'\n")
    (root / "training" / "loop.py").write_text("from pkg import __version__\nfrom pkg.core.policy import act\n")
    (root / "core" / "policy.py").write_text("import os\n")
    return root


SMALL = [["pkg"], ["core"], ["training"]]


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_wrong_arrow_is_reported_with_file_line_and_rule(tree: Path, text: str) -> None:
    assert not violations(imports_of(tree), SMALL)
    assert not cycle(imports_of(tree))
    (tree / "core" / "policy.py").write_text(text)
    line = next(i for i, words in enumerate(text.splitlines(), 1) if "training" in words)
    imports = imports_of(tree)
    assert violations(imports, SMALL) == [f"core/policy.py:{line}: core imports training; it may import only pkg"]
    assert cycle(imports) == ["core", "training", "core"]
    assert not violations(imports, SMALL, {("core/policy.py", "training"): "a reason"})


def test_imports_for_type_checkers_do_not_count(tree: Path) -> None:
    (tree / "core" / "policy.py").write_text("if TYPE_CHECKING:\n    from pkg.training import loop\n")
    assert not violations(imports_of(tree), SMALL)


def test_packages_of_one_layer_and_unknown_packages_are_reported(tree: Path) -> None:
    imports = imports_of(tree)
    assert violations(imports, [["pkg"], ["core", "training"]]) == [
        "training/loop.py:2: training imports core; it may import only pkg"
    ]
    assert violations(imports, [["pkg"], ["core"]])[0] == (
        "training/loop.py:1: training stands in no layer; add it to LAYERS"
    )
