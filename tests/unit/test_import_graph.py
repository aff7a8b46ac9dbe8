"""Imports point one way: a package imports only packages of earlier layers in `LAYERS`.

Imports inside functions count. Those under `if TYPE_CHECKING` don't, because they never run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import zhixing

ROOT = Path(zhixing.__file__).parent

# first to last; packages of one layer don't import each other
LAYERS = [
    ["zhixing"],  # the package itself: __version__ and attributes that are imported on first access
    ["translation"],
    ["errors"],
    ["utils"],
    ["config"],
    ["core"],
    ["ops"],
    ["nets"],
    ["buffers", "envs", "compile"],
    ["collectors", "offline"],
    ["search"],  # plays episodes with collectors
    ["algorithms"],  # mcts and alphazero plan with search
    ["training"],
    ["distributed", "reports"],
    ["experiments"],
    ["cli"],
    ["__main__"],
]

# (file, imported package of a later layer): reason
EXCEPTIONS = {
    ("config/loading.py", "algorithms"): "the algorithm's name selects the settings class",
    (
        "config/loading.py",
        "envs",
    ): "settings accept environment objects, and import the packages that register environments",
    ("config/loading.py", "offline"): "a dataset names its environment",
    ("config/policies.py", "algorithms"): "the algorithm of each policy selects its settings class",
    ("config/validation.py", "algorithms"): "the error for an unknown setting names the algorithms that have it",
    ("envs/vector/make.py", "distributed"): "vector.backend=ray; Ray is optional",
    ("algorithms/mcts.py", "training"): "guide=RUN loads the agent of another run",
    ("training/builders/collector.py", "distributed"): "builds the collector; workers may be distributed",
    ("training/builders/learner.py", "distributed"): "builds the learner; several processes may share its updates",
    ("training/run.py", "experiments"): "zx.train measures settings that are `auto`",
    ("training/callbacks/plot.py", "reports"): "plots the run; Matplotlib is slow to import",
    ("training/callbacks/eval_video.py", "reports"): "records videos of evaluations; only with eval_video=true",
}


class Import(NamedTuple):
    """An import between two packages."""

    file: str  # relative to the root, with slashes
    line: int
    source: str  # package of the file
    target: str  # package that is imported


def imports_of(root: Path) -> list[Import]:
    """Return all imports between packages of the tree `root`, whose folder name is the package name."""
    imports = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        module = [root.name, *relative.with_suffix("").parts]
        parent = module[:-1]  # base of relative imports with one dot
        source = module[1] if module[1] != "__init__" else root.name
        for node in _executed_imports(ast.parse(path.read_text(encoding="utf-8"))):
            for name in _imported_names(node, parent):
                target = _package(name, root)
                if target is not None and target != source:
                    imports.append(Import(relative.as_posix(), node.lineno, source, target))
    return imports


def _executed_imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports of a module except those that only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for statement in child.orelse:
                yield from _executed_imports(ast.Module([statement], []))
        elif isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        else:
            yield from _executed_imports(child)


def _imported_names(node: ast.Import | ast.ImportFrom, parent: list[str]) -> list[str]:
    """Return the absolute dotted names of an import statement."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    start = parent[: len(parent) - node.level + 1] if node.level else []
    base = [*start, *([node.module] if node.module else [])]
    return [".".join([*base, alias.name]) for alias in node.names]


def _package(name: str, root: Path) -> str | None:
    """Return the package of the tree that a dotted name belongs to, or None."""
    top, *rest = name.split(".")
    if top != root.name:
        return None
    is_module = bool(rest) and ((root / rest[0]).is_dir() or (root / f"{rest[0]}.py").is_file())
    return rest[0] if is_module else root.name


def violations(
    imports: list[Import], layers: list[list[str]], exceptions: dict[tuple[str, str], str] | None = None
) -> list[str]:
    """Return a message for each import that isn't from an earlier layer."""
    rank = {package: i for i, layer in enumerate(layers) for package in layer}
    messages = []
    for file, line, source, target in imports:
        if (file, target) in (exceptions or {}):
            continue
        missing = [package for package in (source, target) if package not in rank]
        if missing:
            messages.append(f"{file}:{line}: {missing[0]} is not in LAYERS; add it")
        elif rank[target] >= rank[source]:
            allowed = ", ".join(package for layer in layers[: rank[source]] for package in layer)
            messages.append(f"{file}:{line}: {source} imports {target}; it may import only {allowed}")
    return messages


def find_cycle(imports: list[Import]) -> list[str]:
    """Return the packages of a cycle, with the first repeated at the end; empty if there is no cycle."""
    targets: dict[str, list[str]] = {}
    for item in imports:
        targets.setdefault(item.source, []).append(item.target)
    done: set[str] = set()

    def visit(package: str, path: list[str]) -> list[str]:
        if package in path:
            return [*path[path.index(package) :], package]
        if package in done:
            return []
        for target in targets.get(package, []):
            if cycle := visit(target, [*path, package]):
                return cycle
        done.add(package)
        return []

    for package in targets:
        if cycle := visit(package, []):
            return cycle
    return []


def test_imports_are_from_earlier_layers() -> None:
    messages = violations(imports_of(ROOT), LAYERS, EXCEPTIONS)
    assert not messages, "\n".join(messages)


def test_imports_have_no_cycle() -> None:
    regular = [item for item in imports_of(ROOT) if (item.file, item.target) not in EXCEPTIONS]
    assert not (cycle := find_cycle(regular)), " -> ".join(cycle)


def test_every_package_is_in_one_layer() -> None:
    files = {path.stem for path in ROOT.glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    listed = [package for layer in LAYERS for package in layer]
    assert sorted(listed) == sorted({*files, *folders, "zhixing"})


def test_every_exception_is_used() -> None:
    """An unused exception would allow a new import without notice."""
    used = {(item.file, item.target) for item in imports_of(ROOT)}
    assert not (unused := sorted(set(EXCEPTIONS) - used)), f"remove from EXCEPTIONS: {unused}"


def test_at_most_eight_files_at_the_top() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 8


FORBIDDEN = {
    "module level": "from pkg.training import loop\n",
    "import of a package": "from pkg import training\n",
    "import of a module": "import pkg.training.loop\n",
    "relative import": "from ..training import loop\n",
    "in a function": "def act():\n    from pkg.training.loop import run\n",
    "in a method behind an if": "class A:\n    def act(self):\n        if self:\n            import pkg.training\n",
    "else branch of TYPE_CHECKING": "if TYPE_CHECKING:\n    x = 1\nelse:\n    from pkg.training import loop\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a small package in which `training` imports `core`."""
    root = tmp_path / "pkg"
    for package in ("core", "training"):
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").touch()
    (root / "__init__.py").write_text("__version__ = '1'\n")
    (root / "training" / "loop.py").write_text("from pkg import __version__\nfrom pkg.core.policy import act\n")
    (root / "core" / "policy.py").write_text("import os\n")
    return root


SMALL = [["pkg"], ["core"], ["training"]]


@pytest.mark.parametrize("text", FORBIDDEN.values(), ids=FORBIDDEN)
def test_forbidden_import_is_reported_with_file_and_line(tree: Path, text: str) -> None:
    assert not violations(imports_of(tree), SMALL)
    assert not find_cycle(imports_of(tree))
    (tree / "core" / "policy.py").write_text(text)
    line = next(i for i, code in enumerate(text.splitlines(), 1) if "training" in code)
    imports = imports_of(tree)
    assert violations(imports, SMALL) == [f"core/policy.py:{line}: core imports training; it may import only pkg"]
    assert find_cycle(imports) == ["core", "training", "core"]
    assert not violations(imports, SMALL, {("core/policy.py", "training"): "a reason"})


def test_imports_for_type_checkers_do_not_count(tree: Path) -> None:
    (tree / "core" / "policy.py").write_text("if TYPE_CHECKING:\n    from pkg.training import loop\n")
    assert not violations(imports_of(tree), SMALL)


def test_imports_within_a_layer_and_unknown_packages_are_reported(tree: Path) -> None:
    imports = imports_of(tree)
    assert violations(imports, [["pkg"], ["core", "training"]]) == [
        "training/loop.py:2: training imports core; it may import only pkg"
    ]
    assert violations(imports, [["pkg"], ["core"]])[0] == ("training/loop.py:1: training is not in LAYERS; add it")
