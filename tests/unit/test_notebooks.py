"""Notebooks in a real kernel: live progress, results, curves and videos."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zhixing as zx

ROOT = Path(zx.__file__).parents[1]
CELLS = [
    "import zhixing as zx\n"
    "cfg = zx.PPOConfig(env='CartPole-v1', env_steps=1_024, num_envs=4, rollout_steps=64, eval_episodes=2)\n"
    "result = zx.train(cfg, out='run', tensorboard=False)",
    "result",
    "zx.plot(result)",
    "zx.video(result, max_steps=10)",
    "zx.evaluate(result, 2)",
    "zx.sweep(cfg, {'lr': [1e-3, 3e-4]}, seeds=[0], out='swept', workers=2, tensorboard=False)",
]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """Return the outputs of the cells, run in a kernel."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=":")
        nbclient.NotebookClient(
            notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
        ).execute()
    return [cell.outputs for cell in notebook.cells]


def html(output: Any) -> str:
    return str(output["data"]["text/html"])


def test_training_has_one_progress_display_that_ends_at_its_end(outputs: list[list[Any]]) -> None:
    displays = [output for output in outputs[0] if output["output_type"] == "display_data"]
    assert len(displays) == 1
    assert html(displays[0]).startswith('<progress value="1.0000" max="1"')
    text = displays[0]["data"]["text/plain"]
    assert "algorithm  ppo, preset CartPole-v*" in text
    assert "1,024 steps 100%" in text
    assert "eval return" in text
    assert [output for output in outputs[0] if output["output_type"] == "stream"] == []


def test_result_and_evaluation_are_tables(outputs: list[list[Any]]) -> None:
    assert "<td>env steps</td><td>1024</td>" in html(outputs[1][-1])
    assert "<td>mean return</td>" in html(outputs[4][-1])


def test_plot_is_an_image(outputs: list[list[Any]]) -> None:
    image = base64.b64decode(outputs[2][-1]["data"]["image/png"])
    assert image.startswith(b"\x89PNG")
    assert len(image) > 10_000


def test_video_is_a_player(outputs: list[list[Any]]) -> None:
    data = re.fullmatch(r'<video .*src="data:video/mp4;base64,([^"]+)"></video>', html(outputs[3][-1]))
    assert data is not None
    assert base64.b64decode(data[1])[4:8] == b"ftyp"


def test_sweep_has_progress_and_a_table(outputs: list[list[Any]]) -> None:
    (progress,) = [output for output in outputs[5] if output["output_type"] == "display_data"]
    assert html(progress).startswith('<progress value="1.0000" max="1"')
    assert "2 of 2 done" in html(progress)
    assert "<th>return_mean</th>" in html(outputs[5][-1])


def test_terminals_and_ipython_print_lines(tmp_path: Path) -> None:
    """A live display works only in a kernel. IPython is imported here, as other packages may do."""
    pytest.importorskip("IPython")
    code = (
        "import IPython, zhixing as zx\n"
        "from IPython.terminal.interactiveshell import TerminalInteractiveShell\n"
        "from zhixing.utils.notebook import in_notebook\n"
        "shell = TerminalInteractiveShell.instance()\n"
        "assert IPython.get_ipython() is shell and not in_notebook()\n"
        "zx.train('ppo', env='toy/match', env_steps=64, num_envs=2, rollout_steps=16, eval_episodes=1, out='run')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "algorithm  ppo, no preset" in result.stderr
    assert "64 steps 100%" in result.stderr
