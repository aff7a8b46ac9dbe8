"""Turn a configuration into a run: `Session` calls the builders and runs the trainer."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from zhixing import config
from zhixing.buffers import Buffer, BufferGroup
from zhixing.collectors.collector import Collector, Evaluator
from zhixing.config import SHORTHANDS, RunConfig
from zhixing.core.learner import Learner
from zhixing.envs import VectorEnv
from zhixing.envs.registry import frame_options
from zhixing.errors import UserError
from zhixing.training import builders
from zhixing.training.callbacks import Callback, Evaluate
from zhixing.training.callbacks.base import as_list
from zhixing.training.data import initialize_from_data, open_data, summarize
from zhixing.training.loop import TrainingLoop
from zhixing.training.resolve import default_out, is_distributed, resolve
from zhixing.training.result import RunResult
from zhixing.training.resume import changes, check_changes, restore
from zhixing.training.run_folder import RunFolder, RunPath
from zhixing.training.signals import interruptible
from zhixing.training.trainers import Trainer, select_trainer
from zhixing.utils import importing
from zhixing.utils.memory import keep_freed_memory


class Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)
BUILDERS = ("build_env", "build_learner", "build_collector", "build_evaluator", "build_buffer", "build_callbacks")


class Session:
    """A run. `Session(cfg).run()` trains; `Session.resume(run).run()` continues a run.

    All parts are built, and invalid settings rejected, when the session is created.
    """

    def __init__(
        self,
        cfg: RunConfig,
        out: str | Path | None = None,
        callbacks: Callback | Sequence[Callback] = (),
        *,
        quiet: bool = False,
        folder: RunFolder | None = None,
        build_env: Callable[..., VectorEnv] = builders.build_env,
        build_learner: Callable[..., Learner] = builders.build_learner,
        build_collector: Callable[..., Collector] = builders.build_collector,
        build_evaluator: Callable[..., Evaluator | None] = builders.build_evaluator,
        build_buffer: Callable[..., Buffer | BufferGroup | None] = builders.build_buffer,
        build_callbacks: Callable[..., list[Callback]] = builders.build_callbacks,
    ) -> None:
        """Build the parts of a run in the new folder `out`. `resume` passes `folder` instead, to continue its run.

        Each builder can be replaced by a function with the parameters of its default in `zhixing.training.builders`.
        """
        config.check_settings_class(type(cfg), cfg.algorithm)
        custom_callbacks = as_list(callbacks)
        self.folder = folder or RunFolder(Path(out) if out is not None else default_out(cfg))
        self._resumed = folder is not None
        self._reserved = folder is None and out is None  # `default_out` has created the folder
        self._resources = ExitStack()  # what `close` releases
        try:
            self.state = self._open_folder()
            self.data = open_data(cfg)
            self.distributed = is_distributed(cfg)
            if self.distributed and self.data is not None:
                raise UserError(
                    f"training on a dataset collects no steps and can't use "
                    f"distributed.workers={cfg.distributed.workers}; set distributed.workers=0"
                )
            if cfg.collector is not None and self.data is not None:
                raise UserError(f"training on a dataset collects no steps and can't use collector={cfg.collector}")
            self.trainer: Trainer = select_trainer(cfg, from_data=self.data is not None, distributed=self.distributed)
            self.env: VectorEnv | None = None
            if self.data is None:
                self.env = self._keep(build_env(cfg, self.folder))
                self.spaces = self.env.spaces
            else:
                self.spaces = self.data.spaces
            self.cfg = cfg = resolve(cfg, self.spaces, self.env)
            torch.set_num_threads(int(cfg.num_threads))
            keep_freed_memory()
            self.learner = build_learner(cfg, self.spaces, self.folder, resumed=self.state is not None)
            if self.learner.executor is not None:
                self._keep(self.learner.executor)
            self.collector: Collector | None = None
            if self.env is not None:
                self.collector = self._keep(build_collector(cfg, self.learner, self.env, self.folder))
            self.evaluator = build_evaluator(cfg, self.learner.policy, self.folder, data=self.data)
            if self.evaluator is not None:
                self._keep(self.evaluator)
            goal_env = builders.build_goal_env(cfg, self.folder)
            if goal_env is not None:
                self._keep(goal_env)
            buffer = build_buffer(cfg, self.learner, self.spaces, self.folder, data=self.data, goal_env=goal_env)
            self.loop = TrainingLoop(cfg, self.collector, self.learner, buffer=buffer)
            self.evaluate = Evaluate(self.evaluator)
            self.loop.callbacks = build_callbacks(self.loop, self.folder, self.evaluate, custom_callbacks, quiet=quiet)
            for callback in self.loop.callbacks:
                self._keep(callback)
            if self.state is not None:
                restore(self.loop, self.evaluate, self.folder, self.spaces, self.state)
            else:
                initialize_from_data(self.loop, self.data, self.spaces)
            if self.collector is not None:
                self.collector.start()
        except BaseException:
            self.close()
            raise

    def _open_folder(self) -> dict[str, Any] | None:
        """Lock the folder of a resumed run and return its checkpoint; check that the folder of a new run is free."""
        if not self._resumed:
            self.folder.check_free()
            return None
        self.folder.lock()
        if self.folder.has_progress:
            return self.folder.load()
        self.folder.notices.append(f"{self.folder.path} has no checkpoint yet, so training starts from the beginning")
        return None

    def _keep(self, part: C) -> C:
        """Register `part` to be closed with the session, and return it."""
        self._resources.callback(part.close)
        return part

    @staticmethod
    def resume(
        run: RunPath,
        callbacks: Callback | Sequence[Callback] = (),
        *,
        quiet: bool = False,
        trust: bool | set[str] = False,
        **overrides: Any,
    ) -> Session:
        """Continue a run from its last checkpoint.

        Args:
            run: Run folder.
            callbacks: Callbacks in addition to the built-in ones.
            quiet: Print no progress.
            trust: Allow the import of all code that the run names, or of the names in this set.
            overrides: Builders, and settings that a resumed run can change, such as its budget; see `CHANGEABLE` in
                `training.resume`. `env`, `net`, `trainer` and `collector` may be objects if those of the run
                can't be imported by name.
        """
        folder = RunFolder.open(run)
        custom_builders = {name: overrides.pop(name) for name in BUILDERS if name in overrides}
        objects = {key: overrides.pop(key) for key in SHORTHANDS if not isinstance(overrides.get(key, {}), (str, dict))}
        cfg = folder.read_config(trust, **objects)
        changed: dict[str, tuple[Any, Any]] = {}
        if overrides:
            before, cfg = cfg, config.rebuild(cfg.model_dump(mode="json"), overrides)
            changed = changes(before, cfg)
            check_changes(before, changed, os.fspath(run))
            folder.code = importing.names_in(cfg.model_dump(mode="json"))
        with folder.restricted():
            session = Session(cfg, callbacks=callbacks, quiet=quiet, folder=folder, **custom_builders)
        if changed and session.finished:
            session.close()
            raise UserError(f"{session.why_finished()}; a change of {', '.join(changed)} has no effect")
        return session

    @property
    def finished(self) -> bool:
        """Whether the run has completed, including the final evaluation, and its budget wasn't extended since."""
        return self.loop.finished and (self.loop.progress >= 1.0 or self.evaluate.reached)

    def why_finished(self) -> str:
        """Return a message with the reason why the run ended and the settings that would continue it."""
        loop, cfg = self.loop, self.cfg
        used = [name for name, share in loop.budget_fractions.items() if share >= 1.0]
        reasons = [f"{name}={getattr(cfg, name)} is used up" for name in used]
        advice = [f"raise {name}" for name in used]
        if self.evaluate.reached:
            reasons.insert(0, f"stop_return={cfg.stop_return:g} was reached")
            advice.insert(0, "raise stop_return, or set stop_return=none")
        return (
            f"{self.folder.given} has finished at {loop.steps:,} {loop.unit}, because {' and '.join(reasons)}; to "
            f"continue, {', and '.join(advice)}"
        )

    def run(self) -> RunResult:
        """Train to the end and return the content of result.json. Ctrl-C saves a checkpoint before it ends the run."""
        try:
            if self._resumed:
                self.folder.write_config(self.cfg)  # settings may have changed
            else:
                self.folder.create(self.cfg)
            self.folder.write_spaces(self.spaces, frame_options(self.cfg.env.name, self.cfg.env.options))
            if self.state is None and self.data is not None:
                self.folder.write_data(summarize(self.data))
            with interruptible(self.loop), self.folder.restricted():
                if not self.finished:
                    self.trainer(self.loop)
            if self.loop.interrupted:
                raise KeyboardInterrupt
            result = self.result()
            self.folder.write_result(result)
            return result
        finally:
            self.close()

    def result(self) -> RunResult:
        """Return the content of result.json."""
        loop, evaluate = self.loop, self.evaluate
        reached = evaluate.reached
        values = {
            "algorithm": self.cfg.algorithm,
            "env": self.cfg.env.name,
            "seed": self.cfg.seed,
            "env_steps": loop.env_steps,
            "updates": loop.updates,
            "seconds": round(loop.seconds, 3),
            "steps_per_second": round(loop.steps / max(loop.seconds, 1e-9), 1),
            "final_return": _finite(evaluate.last_return),
            "best_return": _finite(evaluate.best_return),
            "stop_return": self.cfg.stop_return,
            "reached": reached,
            "seconds_to_stop": round(loop.seconds, 3) if reached else None,
            "env_steps_to_stop": loop.env_steps if reached else None,
        }
        return RunResult(values, self.folder.path)

    def close(self) -> None:
        """Release environments, processes and the folder. Remove a default folder in which nothing was written."""
        try:
            self._resources.close()
        finally:
            self.folder.unlock()
        if self._reserved:
            with suppress(OSError):  # the folder, or `runs` above it, isn't empty
                self.folder.path.rmdir()
                self.folder.path.parent.rmdir()


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
