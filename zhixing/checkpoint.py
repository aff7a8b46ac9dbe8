"""A run is a folder: its configuration, metrics, checkpoints, replay and result. All reading and writing of it.

Checkpoints are written aside and renamed, so that a crash leaves the one before; they are read without executing
anything in them, and carry the version of their format.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from zhixing import config
from zhixing.errors import UserError

if TYPE_CHECKING:
    from zhixing.trainer import Loop

FORMAT = 1  # of checkpoints; readers keep understanding older ones


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.metrics_file = path / "metrics.csv"
        self.result_file = path / "result.json"
        self.checkpoints = path / "checkpoints"
        self.replay = path / "replay"
        self.data_file = path / "dataset.json"
        self.agent_file = path / "agent.pt"  # the weights of an exported agent, which has no checkpoints
        self.card_file = path / "agent.json"  # and what it was measured at
        self._kept: list[dict[str, Any]] = []  # states of the buffers in the kept checkpoints, newest first
        self.notices: list[str] = []  # what people should know of the last reading

    def create(self, cfg: config.RunConfig) -> None:
        self.check_free()
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.write_config(cfg)
        except OSError as error:
            raise UserError(f"the run folder {self.path} can't be written: {error.strerror or error}") from None

    def write_config(self, cfg: config.RunConfig) -> None:
        write_aside(self.config_file, lambda file: file.write(config.dump(cfg).encode()))

    def check_free(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"--out {self.path} is a file; name a folder")
        if self.config_file.exists():
            raise UserError(
                f"{self.path} already holds a run; go on with `zhixing resume {self.path}`, or choose another --out"
            )

    @staticmethod
    def open(path: str | Path) -> RunFolder:
        folder = RunFolder(Path(path))
        if not folder.path.is_dir():
            raise UserError(f"there is no run folder {path}")
        if not folder.config_file.is_file():
            raise UserError(f"{path} is no run: it holds no config.yaml")
        return folder

    def read_config(self) -> config.RunConfig:
        try:
            return config.load(self.config_file)
        except UserError as error:
            raise UserError(f"{self.config_file}: {error}") from None

    # --- checkpoints ---

    def save(self, loop: Loop) -> None:
        """Write all that a resume needs, then drop what is older than the kept ones."""
        state: dict[str, Any] = {"kind": "run", "steps": loop.steps, "loop": loop.state_dict()}
        state["policy"] = loop.learner.policy.state_dict()
        state["buffers"] = {}
        for name, buffer in loop.buffers.items():
            (self.replay / name).mkdir(parents=True, exist_ok=True)
            state["buffers"][name] = buffer.save(self.replay / name)
        self._write(f"{loop.steps:012d}.pt", state)
        # later ones belong to steps that were done again since a resume
        later = [file for file in self._newest_first() if int(file.stem) > loop.steps]
        for old in (*later, *self._newest_first()[len(later) + loop.cfg.keep_checkpoints :]):
            old.unlink()
        self._kept = [state["buffers"], *self._kept][: loop.cfg.keep_checkpoints]
        for name, buffer in loop.buffers.items():
            buffer.prune(self.replay / name, [buffers[name] for buffers in self._kept])

    def save_best(self, policy: Mapping[str, Any], steps: int, mean_return: float) -> None:
        self._write("best.pt", {"kind": "agent", "steps": steps, "return": mean_return, "policy": policy})

    def _write(self, name: str, state: dict[str, Any]) -> None:
        self.checkpoints.mkdir(exist_ok=True)
        write_checkpoint(self.checkpoints / name, state)

    def _newest_first(self) -> list[Path]:
        return sorted(self.checkpoints.glob("[0-9]" * 12 + ".pt"), reverse=True)

    def load(self) -> dict[str, Any]:
        """The newest checkpoint that can be read; a damaged one is passed over and told in `notices`."""
        files = self._newest_first()
        if not files and self.agent_file.is_file():
            raise UserError(f"{self.path} is an exported agent: it can act, but holds nothing to go on training from")
        if not files:
            raise UserError(f"{self.path} has no checkpoint to go on from")
        problems: list[str] = []
        for file in files:
            try:
                state = read_checkpoint(file)
                break
            except UserError as error:
                problems.append(str(error))
        else:
            raise UserError("; ".join(problems))
        self._kept = [state["buffers"]]  # older checkpoints may lose their replay from now on
        self.notices = [f"{problem}; going on from the one before, {file.name}" for problem in problems]
        return state

    def load_policy(self, which: str = "last") -> dict[str, Any]:
        """Weights to act with: those at the end of the run, or the best by evaluation."""
        return self.load_agent(which)["policy"]

    def load_agent(self, which: str = "last") -> dict[str, Any]:
        """These weights as `policy`, and the `steps` after which they were. An exported agent has one set of them."""
        if which not in ("last", "best"):
            raise UserError(f"unknown checkpoint {which!r}: allowed are last and best")
        if self.agent_file.is_file():
            return read_checkpoint(self.agent_file)
        if which == "last":
            return self.load()
        if not (self.checkpoints / "best.pt").is_file():
            raise UserError(f"{self.path} has no best checkpoint: it was never evaluated")
        return read_checkpoint(self.checkpoints / "best.pt")

    def write_agent(self, cfg: config.RunConfig, agent: Mapping[str, Any], card: Mapping[str, Any]) -> None:
        """Make this the folder of an exported agent."""
        state = {"kind": "agent", "steps": agent["steps"], "policy": agent["policy"]}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_checkpoint(self.agent_file, state)
            write_aside(self.card_file, lambda file: file.write((json.dumps(card, indent=2) + "\n").encode()))
            self.write_config(cfg)
        except OSError as error:
            raise UserError(f"the folder {self.path} can't be written: {error.strerror or error}") from None

    def read_card(self) -> dict[str, Any]:
        try:
            card = json.loads(self.card_file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{self.card_file} can't be read: {error}") from None
        if not isinstance(card, dict):
            raise UserError(f"{self.card_file} can't be read: it holds no names and values")
        return card

    def write_result(self, result: Mapping[str, Any]) -> None:
        text = json.dumps(result, indent=2)
        write_aside(self.result_file, lambda file: file.write(text.encode()))

    def write_data(self, summary: Mapping[str, Any]) -> None:
        """Keep with the run what it learned from, since the data may move."""
        write_aside(self.data_file, lambda file: file.write(json.dumps(summary, indent=2).encode()))

    def read_references(self) -> dict[str, float]:
        """The mean returns of a random and an expert policy, if the run's data told them."""
        if not self.data_file.is_file():
            return {}
        try:
            found = json.loads(self.data_file.read_text())["references"]
            references = {name: float(found[name]) for name in ("random", "expert") if name in found}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{self.data_file} can't be read: {error}") from None
        return references if len(set(references.values())) == 2 else {}


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    write_aside(path, lambda file: torch.save({"format": FORMAT, **encode(state)}, file))


def read_checkpoint(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile, ValueError, KeyError, OSError) as error:
        reason = str(error).strip().split("\n")[0].split(". ")[0] or "it is empty"
        raise UserError(f"the checkpoint {path} is damaged or no checkpoint ({reason})") from None
    parts = {"agent": {"policy"}, "run": {"policy", "loop", "buffers"}}
    version, kind = (state.get("format"), state.get("kind")) if isinstance(state, dict) else (None, None)
    if version is not None and not (isinstance(version, int) and version <= FORMAT):
        raise UserError(f"the checkpoint {path} has format {version}; this version reads up to {FORMAT}")
    if version is None or kind not in parts or not parts[kind] <= set(state):
        raise UserError(f"the checkpoint {path} is damaged or no checkpoint (it lacks its parts)")
    return decode(state)


@contextmanager
def fitting(folder: RunFolder) -> Iterator[None]:
    """Around loading a run's weights: those of another shape are the user's mistake, told in one message."""
    try:
        yield
    except (RuntimeError, KeyError) as error:  # torch's words for it
        lines = [line.strip() for line in str(error).split("\n")]
        raise UserError(f"the weights of {folder.path} don't fit this network: {' '.join(lines[:3])}") from None


def write_aside(path: Path, write: Callable[[io.BufferedWriter], Any]) -> None:
    """Write a file under another name, make sure that it is on the disk, then rename it: never a half-written file."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with open(aside, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def encode(tree: Any) -> Any:
    """Only what `weights_only` reads: arrays become tensors with a mark, NumPy's numbers become Python's."""
    if isinstance(tree, np.ndarray):
        return {"ndarray": torch.from_numpy(np.array(tree, order="C"))}
    if isinstance(tree, np.generic):
        return tree.item()
    if isinstance(tree, Mapping):
        return {key: encode(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(encode(value) for value in tree)
    return tree


def decode(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        if set(tree) == {"ndarray"}:
            return tree["ndarray"].numpy()
        return {key: decode(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(decode(value) for value in tree)
    return tree
