"""Read and write run folders: configuration, metrics, checkpoints, replay buffer and result.

A checkpoint is written to a temporary file and renamed, so a crash leaves the previous one intact. Reading executes
nothing in it. It has the version of its format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zhixing import config
from zhixing.core import space_json
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError
from zhixing.training import signing
from zhixing.training.checkpoint_file import read_archive, write_archive
from zhixing.training.lock import FolderLock, check_inside
from zhixing.utils import importing
from zhixing.utils.files import bundled_agents, parse_json, write_atomically

if TYPE_CHECKING:
    from zhixing.core.batch import Batch
    from zhixing.training.loop import TrainingLoop

RunPath = str | os.PathLike[str]  # a run folder, the name of a bundled agent, or the `RunResult` of a run
MAX_SPACES_BYTES = 32 << 20
ENV_SETTINGS = ("env", "eval_env", "imports", "distributed", "wandb", "mlflow")  # not needed by agents that only act
FORMAT = 1  # version of checkpoints; later versions of zhixing read older formats


def _find(run: RunPath) -> Path:
    """Return the folder of a run. A bare name that doesn't exist as a path may name a bundled agent."""
    run = os.fspath(run)
    if not Path(run).exists() and Path(run).name == run and (bundled_agents() / run).is_dir():
        return bundled_agents() / run
    return Path(run)


class RunFolder:
    """The files of a run."""

    def __init__(self, path: Path) -> None:
        self.given = path  # as the user wrote it, for messages
        path = path.absolute()  # an environment may change the working directory
        self.path = path
        self.config_file = path / "config.yaml"
        self.spaces_file = path / "spaces.json"  # lets the agent act without its environment
        self.metrics_file = path / "metrics.csv"
        self.crashes = path / "crash"
        self.result_file = path / "result.json"
        self.checkpoints = path / "checkpoints"
        self.replay = path / "replay"
        self.data_file = path / "dataset.json"
        self.agent_file = path / "agent.safetensors"  # weights of an exported agent, which has no checkpoints
        self.card_file = path / "agent.json"  # evaluation of an exported agent
        # state of the replay buffer by step, for the checkpoints that are kept, newest first
        self._kept: dict[int, dict[str, Any]] = {}
        self.code: set[str] | None = None  # names that may be imported; None until the configuration is read
        self.made_by_user = True  # so the user may sign it; false if it was read without a signature
        self.notices: list[str] = []  # problems while reading that the user should know about
        self._lock: FolderLock | None = None

    def create(self, cfg: config.RunConfig) -> None:
        """Create the folder of a new run, lock it and write its configuration."""
        self.check_free()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock()
            self.check_free()  # another process may have been faster
            self.checkpoints.mkdir(exist_ok=True)
            self.write_config(cfg)
        except OSError as error:
            raise self._unwritable(error) from None

    def lock(self) -> None:
        """Lock the folder for this process until `unlock`. Raise `UserError` if another process has locked it."""
        try:
            self._lock = FolderLock(self.path)
        except OSError as error:
            raise self._unwritable(error) from None

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def write_config(self, cfg: config.RunConfig) -> None:
        self._write_text(self.config_file, config.dump(cfg))
        values = config.read_yaml(self.config_file)
        names = importing.names_in(values)
        if self.made_by_user and names:
            signing.sign(self.path, values, names)

    def write_spaces(self, spaces: Spaces, frames: Mapping[str, Any] | None) -> None:
        """Save the spaces and, if observations are made from screens, the options of `FrameProcessor`."""
        self._write_text(self.spaces_file, json.dumps({**space_json.encode(spaces), "frames": frames}, indent=2) + "\n")

    def read_spaces(self) -> tuple[Spaces, Any] | None:
        """Return the spaces and the options of frames, or None for runs of versions that saved none."""
        if not self.spaces_file.is_file():
            return None
        try:
            if self.spaces_file.stat().st_size > MAX_SPACES_BYTES:
                raise ValueError(f"it is larger than {MAX_SPACES_BYTES:,} bytes")
            data = parse_json(self.spaces_file.read_text(encoding="utf-8"))
            frames = data.pop("frames")
            if frames is not None and "skip" in frames:  # the name in early files
                frames["action_repeat"] = frames.pop("skip")
            return space_json.decode(data), frames
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, AssertionError) as error:
            raise UserError(f"{self.spaces_file} is damaged ({error}); remove it to use the environment") from None

    def _write_text(self, file: Path, text: str) -> None:
        try:
            write_atomically(file, lambda out: out.write(text.encode()))
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(
            f"the run folder {self.path} can't be written: {error.strerror or error}; check its permissions and the "
            f"free disk space, or choose another --out"
        )

    def check_free(self) -> None:
        """Raise `UserError` if the path is a file or holds a run."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"--out {self.path} is a file; choose a folder")
        if self.config_file.exists():
            raise UserError(
                f"{self.given} already contains a run; continue it with `zhixing resume {self.given}`, or choose "
                f"another --out"
            )

    @staticmethod
    def open(path: RunPath) -> RunFolder:
        """Open the folder of an existing run or exported agent."""
        folder, path = RunFolder(_find(path)), os.fspath(path)
        if not folder.path.is_dir():
            raise UserError(f"there is no run folder {path}, and `zhixing zoo` lists no agent of this name")
        if not folder.config_file.is_file():
            raise UserError(f"{path} is not a run, because it contains no config.yaml; choose a run folder")
        check_inside(folder.path)
        return folder

    def restricted(self) -> AbstractContextManager[None]:
        """Return a context in which only the names in `code` are imported. Use it to build parts of the run."""
        return importing.restricted_to(self.code)

    def read_config(
        self, trust: bool | set[str] = False, env: Any = None, net: Any = None, *, without_env: bool = False
    ) -> config.RunConfig:
        """Return the run's configuration.

        A run of another user may name malicious code. `trust` is the set of names that may be imported, or true for
        all; runs that this user has signed don't need it. `env` and `net` are objects to use instead of those that the
        run names. `without_env` is for agents that only act: the code of their environment is not imported, so it needs
        no trust.
        """
        try:
            values = config.read_yaml(self.config_file)
            config.register_objects(values, env=env, net=net)
            names = importing.names_in(values)
            self.made_by_user = bool(names) and signing.is_signed(self.path, values, names)
            packages = values.get("imports")
            needed = values
            if without_env:
                values["imports"] = []
                needed = {name: value for name, value in values.items() if name not in ENV_SETTINGS}
            self.code = importing.check_names(needed, trust or self.made_by_user)
            with self.restricted():
                cfg = config.rebuild(values, {})
            return cfg.model_copy(update={"imports": packages}) if without_env and packages else cfg
        except UserError as error:
            raise UserError(f"{self.config_file}: {error}") from None

    # --- checkpoints ---

    def save(self, loop: TrainingLoop) -> None:
        """Write a checkpoint, then delete those beyond `keep_checkpoints`."""
        state: dict[str, Any] = {"kind": "run", "steps": loop.steps, "loop": loop.state_dict()}
        state["policy"] = loop.learner.policy.state_dict()
        state["replay"] = loop.replay.save(self.replay) if loop.replay is not None else {}
        self._write(self.checkpoints / f"{loop.steps:012d}.safetensors", state)
        # checkpoints of later steps are left from before a resume
        later = [file for file in self._newest_first() if int(file.stem) > loop.steps]
        for old in (*later, *self._newest_first()[len(later) + loop.cfg.keep_checkpoints :]):
            old.unlink()
        kept = {loop.steps: state["replay"]} | {steps: old for steps, old in self._kept.items() if steps < loop.steps}
        self._kept = dict(list(kept.items())[: loop.cfg.keep_checkpoints])
        if loop.replay is not None:
            loop.replay.prune(self.replay, self._kept.values())

    def save_best(self, policy: Mapping[str, Any], steps: int, mean_return: float, longest_episode: int = 0) -> None:
        best = {"kind": "agent", "steps": steps, "return": mean_return, "policy": policy}
        best["longest_episode"] = longest_episode
        self._write(self.checkpoints / "best.safetensors", best)

    def save_batch(self, batch: Batch, steps: int) -> Path:
        """Save the batch of a failed update. `Batch(**read_checkpoint(file)["batch"])` restores it."""
        file = self.crashes / f"batch-{steps:012d}.safetensors"
        self._write(
            file, {"kind": "batch", "steps": steps, "batch": {name: getattr(batch, name) for name in batch.fields}}
        )
        return file

    def _write(self, file: Path, state: dict[str, Any]) -> None:
        file.parent.mkdir(exist_ok=True)
        write_checkpoint(file, state)

    @property
    def has_progress(self) -> bool:
        """Whether the run has a checkpoint or a result, or is an exported agent."""
        return bool(self._newest_first()) or self.result_file.exists() or self.agent_file.exists()

    def newest_step(self) -> int | None:
        """Return the step of the newest checkpoint, or None if there is none."""
        files = self._newest_first()
        return int(files[0].stem) if files else None

    def _newest_first(self) -> list[Path]:
        return sorted(self.checkpoints.glob("[0-9]" * 12 + ".safetensors"), reverse=True)

    def summary_files(self) -> list[Path]:
        """Return the files that describe a run and its agent. A folder with them can be loaded, not resumed exactly."""
        names = ("config.yaml", "spaces.json", "metrics.csv", "result.json", "plot.png", "checkpoints/best.safetensors")
        return [*(self.path / name for name in names if (self.path / name).is_file()), *self._newest_first()[:1]]

    def load_before(self, steps: int) -> dict[str, Any] | None:
        """Return the newest readable checkpoint that is older than this step, if there is one."""
        for file in self._newest_first():
            if int(file.stem) < steps:
                with suppress(UserError):
                    state = read_checkpoint(file)
                    self._kept = {state["steps"]: state["replay"]}
                    return state
        return None

    def load(self) -> dict[str, Any]:
        """Return the newest readable checkpoint. Damaged ones are skipped, with a notice."""
        files = self._newest_first()
        if not files and self.agent_file.is_file():
            raise UserError(
                f"{self.path} is an exported agent without training state; use the run that it was exported from"
            )
        if not files:
            raise UserError(f"{self.path} has no checkpoint; start a new run")
        problems: list[str] = []
        for file in files:
            try:
                state = read_checkpoint(file)
                break
            except UserError as error:
                problems.append(str(error))
        else:
            raise UserError("; ".join(problems))
        self._kept = {state["steps"]: state["replay"]}  # the replay buffer of older checkpoints isn't kept
        self.notices = [f"{problem}; using the previous one, {file.name}" for problem in problems]
        return state

    def load_agent(self, which: str | int = "last") -> dict[str, Any]:
        """Return a dict with the weights (`policy`), the training `steps` before them, and `longest_episode` in steps.

        `which` is `last`, `best` (by evaluation return) or the step of a checkpoint. An exported agent has only one set
        of weights, which is its `last` and its `best`.
        """
        if which not in ("last", "best"):
            return _with_longest_episode(read_checkpoint(self._checkpoint_of_step(which)))
        best = self.checkpoints / "best.safetensors"
        if which == "best" and not best.is_file() and not self.agent_file.is_file():
            raise UserError(f"{self.path} has no best checkpoint, because it was never evaluated; use last")
        if self.agent_file.is_file():
            state = read_checkpoint(self.agent_file)
        else:
            state = self.load() if which == "last" else read_checkpoint(best)
        return _with_longest_episode(state)

    def _checkpoint_of_step(self, step: str | int) -> Path:
        kept = {int(file.stem): file for file in self._newest_first()}
        text = str(step)
        if text.isascii() and text.isdigit() and int(text) in kept:
            return kept[int(text)]
        steps = f", or the step of a checkpoint: {', '.join(map(str, sorted(kept)))}" if kept else ""
        raise UserError(f"{self.given} has no checkpoint {text[:50]!r}: use last or best{steps}")

    def load_networks(self) -> dict[str, Any]:
        """Return the state of the learner to start another run from."""
        if self.agent_file.is_file():
            learner = read_checkpoint(self.agent_file).get("learner")  # imported agents have all their networks
            if isinstance(learner, dict):
                return learner
        return self.load()["loop"]["learner"]

    def write_agent(self, cfg: config.RunConfig, agent: Mapping[str, Any], card: Mapping[str, Any]) -> None:
        """Write the files of an exported agent."""
        names = ("steps", "policy", "longest_episode", "learner")
        state = {"kind": "agent", **{name: agent[name] for name in names if name in agent}}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_checkpoint(self.agent_file, state)
            write_atomically(self.card_file, lambda file: file.write((json.dumps(card, indent=2) + "\n").encode()))
            self.write_config(cfg)
        except OSError as error:
            raise UserError(f"the folder {self.path} can't be written: {error.strerror or error}") from None

    def read_card(self) -> dict[str, Any]:
        """Return the content of agent.json, without unprintable characters."""
        try:
            card = parse_json(self.card_file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{self.card_file} can't be read: {error}") from None
        if not isinstance(card, dict):
            raise UserError(f"{self.card_file} can't be read: it must contain a JSON object")
        return {name: _printable(value) if isinstance(value, str) else value for name, value in card.items()}

    def write_result(self, result: Mapping[str, Any]) -> None:
        self._write_text(self.result_file, json.dumps(result, indent=2))

    def write_data(self, summary: Mapping[str, Any]) -> None:
        """Write a summary of the dataset that the run is trained on, because the dataset may be moved."""
        self._write_text(self.data_file, json.dumps(summary, indent=2))

    def read_references(self) -> dict[str, float]:
        """Return the mean returns of a random and an expert policy; empty if the run's dataset has none."""
        if not self.data_file.is_file():
            return {}
        try:
            values = parse_json(self.data_file.read_text())["references"]
            references = {name: float(values[name]) for name in ("random", "expert") if name in values}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{self.data_file} can't be read: {error}") from None
        return references if len(set(references.values())) == 2 else {}


def _with_longest_episode(state: dict[str, Any]) -> dict[str, Any]:
    longest = state.get("loop", state).get("longest_episode", 0)  # older files lack it
    return {**state, "longest_episode": longest if type(longest) is int and longest > 0 else 0}


def _printable(text: str) -> str:
    """Replace unprintable characters in untrusted text, which could control a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    write_atomically(path, lambda file: write_archive(file, {"format": FORMAT, **state}))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint. Raise `UserError` if it is invalid; nothing in it is executed."""
    try:
        state = read_archive(path)
    except Exception as error:  # foreign bytes fail in many ways
        reason = str(error).strip().split("\n")[0].split(". ")[0][:200] or type(error).__name__
        raise UserError(f"the checkpoint {path} is damaged or not a checkpoint ({reason})") from None
    required: dict[Any, dict[str, type]] = {
        "agent": {"policy": dict},
        "run": {"policy": dict, "loop": dict, "replay": dict, "steps": int},
        "batch": {"batch": dict},
    }
    version, kind = (state.get("format"), state.get("kind")) if isinstance(state, dict) else (None, None)
    if version is not None and not (type(version) is int and version <= FORMAT):
        shown = str(version)[:20] if type(version) is not int or version < 10**20 else "over 10^20"
        raise UserError(
            f"the checkpoint {path} has format {shown}, but this version of zhixing reads up to {FORMAT}; upgrade it"
        )
    types = required.get(kind) if isinstance(kind, str) else None
    if version is None or types is None or not all(type(state.get(name)) is type_ for name, type_ in types.items()):
        raise UserError(f"the checkpoint {path} is damaged or not a checkpoint (parts are missing)")
    return state


@contextmanager
def weights_must_fit(folder: RunFolder | None) -> Iterator[None]:
    """Raise `UserError` if the weights of a run, loaded in this context, don't fit the network."""
    try:
        yield
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:  # raised by torch
        reason = " ".join(line.strip() for line in str(error).split("\n")[:3]).rstrip(".")
        name = "the agent" if folder is None else folder.given
        raise UserError(
            f"the weights of {name} don't fit this network: {reason}; use the net settings of that run and an "
            f"environment with the same spaces"
        ) from None
