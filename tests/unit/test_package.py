"""The wheel works in another virtual environment, and the packaging metadata is consistent.

Torch isn't installed again: the new virtual environment uses the packages of this one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import zhixing

ROOT = Path(zhixing.__file__).parent.parent
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]


def run_command(*arguments: str | Path, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV"))}
    command = [str(argument) for argument in arguments]
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_installed_wheel_trains_from_another_folder(tmp_path: Path) -> None:
    # build from a copy, because setuptools leaves files next to the sources that would enter the next wheel
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for file in (*(ROOT / "zhixing").rglob("*"), *(ROOT / "zoo").rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            copy = source / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    run_command(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path / "dist", cwd=source)
    (wheel,) = (tmp_path / "dist").glob("*.whl")

    assert wheel.name == f"zhixing-{zhixing.__version__}-py3-none-any.whl"  # setuptools reads the version from the code

    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(file.relative_to(source)) for file in (source / "zhixing").rglob("*.py")}
    presets = {
        f"zhixing/config/presets/{file.name}" for file in (ROOT / "zhixing" / "config" / "presets").glob("*.yaml")
    }
    assert len(presets) >= 2
    catalogs = {str(file.relative_to(source)) for file in (source / "zhixing" / "locale").rglob("*.txt")}
    assert "zhixing/locale/zh/errors.txt" in catalogs
    agents = {f"zhixing/agents/{file.relative_to(ROOT / 'zoo')}" for file in (ROOT / "zoo").glob("*/*")}
    assert "zhixing/agents/cartpole/agent.json" in agents
    assert modules | presets | catalogs | agents | {"zhixing/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "examples", "docs"))]

    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python, script = home / "bin" / "python", home / "bin" / "zhixing"
    # pip runs with the new interpreter before the .pth file exists, so it can't uninstall packages of this environment
    run_command(
        sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, cwd=tmp_path
    )
    # paths of .pth files come after the packages of the environment itself, so the wheel takes precedence
    site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    (site_packages / "torch_from_here.pth").write_text(sysconfig.get_path("purelib") + "\n")

    folder = tmp_path / "folder"
    folder.mkdir()
    path = run_command(python, "-c", "import zhixing; print(zhixing.__file__)", cwd=folder).strip()
    assert path.startswith(str(home))
    # the error for a missing extra names a command that works without a checkout, and without zhixing in an index
    hint = "from zhixing.utils.extras import install_hint; print(install_hint('mario'))"
    command = run_command(python, "-c", hint, cwd=folder).strip()
    assert command.startswith("pip install 'gym-super-mario-bros==7.4.0' 'nes-py==")
    assert str(ROOT) not in command
    out = run_command(script, "train", "ppo", "--env", "CartPole-v1", "--out", "run", "env_steps=512", cwd=folder)
    assert "trained            512 steps" in out
    assert json.loads((folder / "run" / "result.json").read_text())["env_steps"] == 512
    assert (
        "num_envs: 8\nvector:\n  backend: native\n" in (folder / "run" / "config.yaml").read_text()
    )  # the preset is there
    assert "cartpole" in run_command(script, "zoo", cwd=folder)


def test_every_extra_is_used_by_code() -> None:
    """The error for a missing package names its extra. `dev` and `all` only combine others."""
    section = re.search(
        r"^\[project.optional-dependencies\]\n(.*?)^\[", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    assert section is not None
    extras = set(re.findall(r"^([\w-]+) = ", section[1], re.M)) - {"dev", "all"}
    code = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "zhixing").rglob("*.py"))
    assert {extra for extra in extras if f'"{extra}"' not in code} == set()
    assert "marl" in extras


def test_version_is_the_same_in_all_files() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert not re.search(r"^version = \"", project, re.M)  # pyproject.toml reads it from the code
    assert f"\nversion: {zhixing.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    newest = re.search(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert newest is not None
    assert newest[1] == zhixing.__version__


def test_every_tool_supports_the_same_pythons() -> None:
    """Types and lint are checked for the oldest version; all versions are tested."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    versions = re.findall(r"Programming Language :: Python :: (3\.\d+)", project)
    assert versions == PYTHONS
    oldest = versions[0]
    assert f'requires-python = ">={oldest}"' in project
    assert f'python_version = "{oldest}"' in project
    assert f'target-version = "py{oldest.replace(".", "")}"' in project
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    assert workflow["jobs"]["tests"]["strategy"]["matrix"]["python"] == versions


def test_pre_commit_runs_the_pinned_ruff() -> None:
    pinned = re.search(r"^ruff==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    assert pinned is not None
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [repo["rev"] for repo in hooks if repo["repo"].endswith("ruff-pre-commit")] == [f"v{pinned[1]}"]


def test_windows_is_rejected_with_a_message() -> None:
    """Uses a new process, because the package is already imported in this one."""
    code = "import sys; sys.platform = 'win32'; import zhixing.cli"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "ImportError: zhixing supports Linux and macOS, not Windows; on Windows, install it inside WSL2"
    )


@pytest.mark.parametrize("python", PYTHONS)
def test_pinned_packages_install_on_every_supported_python(python: str) -> None:
    """Packages that no longer support an old Python are pinned only for newer versions."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    here = {"python_version": python, "python_full_version": f"{python}.0"}
    applied = [pin.name for pin in pins if pin.marker is None or pin.marker.evaluate(here)]
    required = {name: metadata.metadata(name)["Requires-Python"] for name in applied if is_installed(name)}
    assert len(required) > 50
    assert {name: spec for name, spec in required.items() if spec and f"{python}.20" not in SpecifierSet(spec)} == {}


def is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
