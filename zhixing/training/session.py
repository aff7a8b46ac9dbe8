"""From a configuration to a run: builds the parts, runs, resumes, evaluates, closes."""

from __future__ import annotations

import importlib
import itertools
import math
import re
import signal
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as List
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from zhixing import algorithms, config, envs, offline
from zhixing.buffers import Buffer, Episode, Hindsight, NStep, Prioritized, Reservoir, Sequence, Uniform, View
from zhixing.collect.actor import Actor
from zhixing.collect.collector import Collector, Evaluator
from zhixing.collect.evaluation import Evaluation, default_eval_steps
from zhixing.collect.torch_collector import TorchActor
from zhixing.config import SHORT, DataConfig, OffPolicyConfig, RunConfig, SearchConfig, SelfPlayConfig
from zhixing.core.learner import Learner
from zhixing.core.policy import Policy
from zhixing.core.seeding import stream
from zhixing.core.spaces import Spaces
from zhixing.core.tree import tree_leaves, tree_map
from zhixing.distributed.collector import is_spread, spread
from zhixing.distributed.learner_group import Partners, check_learners
from zhixing.distributed.parameter_servers import check_servers
from zhixing.envs.adapters.gymnasium_ids import registering_module
from zhixing.envs.torch_native import TorchVectorEnv
from zhixing.envs.vector.action_log import action_room
from zhixing.envs.wrappers.goals import goal_functions
from zhixing.errors import UserError, write_stderr
from zhixing.offline import Dataset
from zhixing.search import GAMES
from zhixing.training.callbacks import (
    Callback,
    Checkpoint,
    Csv,
    Draw,
    Evaluate,
    Film,
    Progress,
    StopOnNonFinite,
    TensorBoard,
)
from zhixing.training.callbacks.base import as_list
from zhixing.training.data import (
    NO_ENV,
    check_spaces,
    demonstrations,
    expert_policy,
    fill,
    open_data,
    storage_of,
    summary_of,
)
from zhixing.training.loop import INTERRUPTED, Loop
from zhixing.training.matches import Matches, game_of
from zhixing.training.resume import changes, check_changes
from zhixing.training.run_folder import RunFolder, fitting
from zhixing.training.trainers import Trainer, select_trainer
from zhixing.utils import importing
from zhixing.utils.cpus import cpu_count
from zhixing.utils.memory import keep_freed


class Session:
    """`Session(cfg).run()` trains; `Session.resume(run).run()` goes on. What is wrong is told when it is made."""

    def __init__(
        self,
        cfg: RunConfig,
        out: str | Path | None = None,
        callbacks: Callback | List[Callback] = (),
        *,
        quiet: bool = False,
        folder: RunFolder | None = None,
    ) -> None:
        """`folder` is given by `resume`: the run to go on with."""
        own_callbacks = as_list(callbacks)
        self.folder = folder or RunFolder(Path(out) if out is not None else default_out(cfg))
        self._resumed = folder is not None
        self._reserved = folder is None and out is None  # the folder is there already, empty
        self.env: envs.VectorEnv | None = None
        self.evaluator: Evaluator | None = None
        self.film: Film | None = None
        self.goal_env: envs.VectorEnv | None = None  # computes rewards of goals that nobody asked for
        self.partners: Partners | None = None
        self.actor: Collector | None = None
        try:
            if folder is None:
                self.folder.check_free()
            else:
                folder.lock()
            if folder is not None and not folder.begun:
                folder.notices.append(f"{folder.path} has no checkpoint yet; it begins anew")
            # a run that was stopped before its first checkpoint begins anew
            self.state = None if folder is None or not folder.begun else folder.load()
            self.data = open_data(cfg)
            self.spread = is_spread(cfg)
            if self.spread and self.data is not None:
                raise UserError("nobody acts where all is learned from a dataset: leave distributed.workers out")
            if self.data is None:
                # boards of its own, or workers that have the environments: here the task only tells what it is like
                if isinstance(cfg, SelfPlayConfig) or self.spread:
                    self.env = self._few(cfg, 1)
                else:
                    self.env = envs.make_vector(
                        cfg.env.name,
                        cfg.num_envs,
                        backend=cfg.vector.backend,
                        workers=_number(cfg.vector.workers),
                        options=cfg.env.options,
                        faults=envs.Faults.of(cfg.vector, self.folder.crashes),
                        address=cfg.distributed.address,
                        device=resolve_device(cfg).device,
                        idle=not (isinstance(cfg, OffPolicyConfig) and cfg.async_collect),
                    )
                self.spaces = self.env.spaces
            else:
                self.spaces = self.data.spaces
            self.cfg = resolve(cfg, self.spaces, None if self.spread else self.env)
            self._build(own_callbacks, quiet)
        except BaseException:
            self.close()
            raise

    def _few(self, cfg: RunConfig, num: int) -> envs.SerialVectorEnv | envs.ProcessVectorEnv:
        return envs.make_few(envs.Task(cfg.env.name, cfg.env.options), num, cfg.vector, self.folder.crashes)

    def _build(self, callbacks: list[Callback], quiet: bool) -> None:
        cfg = self.cfg
        torch.set_num_threads(int(cfg.num_threads))
        keep_freed()
        device = torch.device(cfg.device)
        self.learner = algorithms.get(cfg.algorithm).make(cfg, self.spaces, device)
        if "demonstrations" in type(cfg).model_fields:
            self.learner.show(demonstrations(cfg, self.spaces).to(device))
        if "expert" in type(cfg).model_fields:
            self.learner.ask(expert_policy(cfg, self.spaces).to(device))
        if cfg.init_from is not None and self.state is None:
            start = RunFolder.open(cfg.init_from)
            with fitting(start):
                self.learner.start_from(start.load()["loop"]["learner"])
        if cfg.distributed.servers:
            check_servers(cfg, self.learner)
        if cfg.distributed.learners > 1:
            check_learners(cfg, self.learner)
            self.learner.partners = self.partners = Partners(self.learner, cfg, self.spaces, self.folder.path)
        policy = self.learner.policy
        if isinstance(cfg, SelfPlayConfig):
            self.actor = self.learner.self_play()
        elif self.spread and self.env is not None:
            self.actor = spread(cfg, self.learner, self.spaces, self.env.tells, self.folder.path)
        elif isinstance(self.env, TorchVectorEnv) and cfg.scheme == "on_policy":  # others store steps in arrays
            self.actor = TorchActor(policy, self.env, self.learner.fields, seed=cfg.seed)
        elif self.env is not None:
            self.actor = Actor(policy, self.env, self.learner.fields, seed=cfg.seed, device=device)
        if cfg.env.name != NO_ENV:
            self.evaluator = _evaluator(cfg, policy, device, self.folder)
            if self.data is not None:
                assert isinstance(self.evaluator, Actor)
                check_spaces(self.data, self.evaluator.spaces, cfg.env.name)
        self.evaluate = Evaluate(self.evaluator)
        told: list[Callback] = [] if quiet else [Progress(folder=self.folder.given)]
        boards: list[Callback] = [TensorBoard(self.folder.path)] if cfg.tensorboard else []
        if hasattr(self.learner, "dream_frames"):
            from zhixing.training.callbacks.imagine import Imagine  # draws, which others needn't wait for

            boards.append(Imagine(self.folder.path))
        if cfg.eval_video and self.evaluator is not None:
            self.film = Film(self.folder, policy, cfg, device)
            boards.append(self.film)
        drawn = [Draw(self.folder.path, cfg.plot)] if cfg.plot is not None else []
        csv, saved = Csv(self.folder.metrics_file), Checkpoint(self.folder)
        ordered = [StopOnNonFinite(self.folder), self.evaluate, *callbacks, csv, *boards, *drawn, *told, saved]
        further = self._buffers()
        replay = further.pop("replay", None)
        self.loop = Loop(cfg, self.actor, self.learner, buffer=replay, further=further, callbacks=ordered)
        for each in drawn:
            each.check(self.loop)
        if self.state is not None:
            self._restore(self.state)
        elif isinstance(cfg, DataConfig):
            self._begin(cfg)
        if self.actor is not None:
            self.actor.ready()

    def _begin(self, cfg: DataConfig) -> None:
        """What recorded experience gives before the first step."""
        if self.data is not None and cfg.normalize_obs:
            for batch in self.data.batches(10_000):
                self.learner.observe(batch.map(np.array).to(self.learner.device))
        if isinstance(cfg, OffPolicyConfig) and cfg.replay.start is not None:
            data = offline.open(cfg.replay.start, cfg.env.name, cfg.env.options)
            check_spaces(data, self.spaces, cfg.env.name)
            assert self.loop.buffer is not None
            fill(self.loop.buffer, data)

    def _buffers(self) -> dict[str, Buffer]:
        """The replay and what else the learner declares, by name."""
        cfg, learner = self.cfg, self.learner
        if isinstance(cfg, SelfPlayConfig):
            return {"replay": Buffer(learner.fields, cfg.capacity, 1, sampler=Uniform(), view=NStep(1, cfg.gamma))}
        if not isinstance(cfg, OffPolicyConfig):
            return {} if self.data is None else {"replay": self._data_buffer(self.data, Uniform(), NStep(1, cfg.gamma))}
        replay = cfg.replay
        samplers: dict[str, Uniform | Prioritized | Reservoir] = {"replay": Uniform()}
        if replay.prioritized:
            samplers["replay"] = Prioritized(replay.alpha, replay.beta_start)
        for name, kind in learner.further_buffers.items():
            samplers[name] = Uniform() if kind == "uniform" else Reservoir(stream(cfg.seed, name))
        views: dict[str, View] = {
            "transitions": NStep(replay.n_step, cfg.gamma, alive_only=self.spaces.individual_ends),
            "sequences": Sequence(replay.sequence_length, replay.burn_in),
            "episodes": Episode(),
        }
        share, relabel = replay.her * replay.her_ratio, None
        if share:
            self.goal_env = self._few(cfg, 1)
            relabel = Hindsight(*goal_functions(self.goal_env), share)
        if self.data is not None:
            return {"replay": self._data_buffer(self.data, samplers["replay"], views[learner.reads], relabel)}
        assert self.env is not None
        return {
            name: Buffer(
                {**self.spaces.fields(), **learner.fields},
                replay.capacity,
                cfg.num_envs,
                sampler=sampler,
                view=views[learner.reads] if name == "replay" else NStep(1, cfg.gamma),
                relabel=relabel if name == "replay" else None,
                frame_stack=replay.frame_stack,
                device=cfg.device if replay.on_device else "cpu",
                folder=self.folder.path / "replay-memory" / name if replay.on_disk else None,
            )
            for name, sampler in samplers.items()
        }

    def _data_buffer(
        self, data: Dataset, sampler: Uniform | Prioritized | Reservoir, view: View, relabel: Hindsight | None = None
    ) -> Buffer:
        further = [*self.learner.fields, *self.learner.further_buffers]
        if further:
            raise UserError(
                f"{self.cfg.algorithm} with these settings needs what no data records ({', '.join(further)}); set "
                f"net.recurrent=none, or learn in an environment"
            )
        assert not isinstance(sampler, Reservoir)
        return Buffer.over(storage_of(data), sampler=sampler, view=view, relabel=relabel)

    def _restore(self, state: dict[str, Any]) -> None:
        try:
            state = self._restore_buffers(state)
            lost = self.loop.load_state_dict(state["loop"])
        except UserError:
            raise
        except Exception as error:  # what was tampered with fails in many ways
            raise UserError(f"the checkpoint of {self.folder.path} doesn't fit its configuration: {error}") from error
        target = self.cfg.stop_return
        if target is None or self.evaluate.last_return < target:
            self.evaluate.reached = False  # it goes on to a higher return, or without one
        if lost:
            self.folder.notices.append(
                f"{len(lost)} of {self.cfg.num_envs} environments of {self.cfg.env.name} start a new episode: they "
                f"can't be put back into the middle of one, or it was longer than the recorded "
                f"{action_room(self.spaces):,} steps"
            )

    def _restore_buffers(self, state: dict[str, Any]) -> dict[str, Any]:
        """Fill the buffers as a checkpoint says. Where their files are damaged, take the checkpoint before.

        Returns the checkpoint that was taken.
        """
        try:
            for name, buffer in self.loop.buffers.items():
                buffer.load(state["buffers"][name], self.folder.replay / name)
        except UserError as error:
            older = self.folder.load_before(state["steps"])
            if older is None:
                raise
            self.folder.notices.append(f"{error}; going on from the checkpoint of step {older['steps']:,}")
            return self._restore_buffers(older)
        return state

    @staticmethod
    def resume(
        run: str | Path,
        callbacks: Callback | List[Callback] = (),
        *,
        quiet: bool = False,
        trust: bool | set[str] = False,
        **overrides: Any,
    ) -> Session:
        """Go on from a run's last checkpoint. `overrides` may change what `training.resume` allows, such as the budget;
        other changes are rejected, and so are those that a finished run can't apply. With `trust` it may
        import the code that the run names, or those names of it. `env` and `net` may be classes, where that
        can't be imported."""
        folder = RunFolder.open(run)
        objects = {key: overrides.pop(key) for key in SHORT if not isinstance(overrides.get(key, {}), (str, dict))}
        cfg = folder.read_config(trust, **objects)
        changed: dict[str, tuple[Any, Any]] = {}
        if overrides:
            before, cfg = cfg, config.build([cfg.model_dump(mode="json")], overrides)
            changed = changes(before, cfg)
            check_changes(before, changed, str(run))
            folder.code = importing.names_in(cfg.model_dump(mode="json"))
        with folder.restricted():
            session = Session(cfg, callbacks=callbacks, quiet=quiet, folder=folder)
        if changed and session.finished:
            session.close()
            raise UserError(f"{session.why_finished()}; {', '.join(changed)} can't change that")
        return session

    @property
    def finished(self) -> bool:
        """All is done, and no longer budget was given since."""
        return self.loop.finished and (self.loop.fraction >= 1.0 or self.evaluate.reached)

    def why_finished(self) -> str:
        """Return in words what ended the run, and what would let it train on."""
        loop, cfg = self.loop, self.cfg
        used = [name for name, share in loop.shares.items() if share >= 1.0]
        reasons = [f"{name}={getattr(cfg, name)} is used up" for name in used]
        advice = [f"give it a longer {name}" for name in used]
        if self.evaluate.reached:
            reasons.insert(0, f"stop_return={cfg.stop_return:g} is reached")
            advice.insert(0, "set a higher stop_return, or stop_return=none")
        reached = f"{loop.steps:,} {loop.unit}"
        return f"{self.folder.given} is finished at {reached}: {' and '.join(reasons)}; {', and '.join(advice)}"

    def run(self) -> dict[str, Any]:
        """Train to the end; returns what is written to result.json. Ctrl-C saves a checkpoint first."""
        try:
            if self._resumed:
                self.folder.write_config(self.cfg)  # a resume may lengthen the budget
            else:
                self.folder.create(self.cfg)
            if self.state is None and self.data is not None:
                self.folder.write_data(summary_of(self.data))
            with _interrupts(self.loop), self.folder.restricted():
                if not self.finished:
                    self.trainer(self.loop)
            if self.loop.interrupted:
                raise KeyboardInterrupt
            result = self.result()
            self.folder.write_result(result)
            return result
        finally:
            self.close()

    @property
    def trainer(self) -> Trainer:
        """The function that runs the training loop."""
        return select_trainer(self.cfg, from_data=self.data is not None, distributed=self.spread)

    def result(self) -> dict[str, Any]:
        loop, evaluate = self.loop, self.evaluate
        reached = evaluate.reached
        return {
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

    def close(self) -> None:
        if self.actor is not None:
            self.actor.close()
        if self.env is not None:
            self.env.close()
        if self.evaluator is not None:  # it is when making the rest has failed
            self.evaluator.close()
        if self.film is not None:
            self.film.close()
        if self.goal_env is not None:
            self.goal_env.close()
        if self.partners is not None:
            self.partners.close()
        self.folder.unlock()
        if self._reserved:
            with suppress(OSError):  # it holds a run, or `runs` others
                self.folder.path.rmdir()
                self.folder.path.parent.rmdir()


def train(
    algorithm: str,
    env: Any = None,
    *,
    out: str | Path | None = None,
    callbacks: Callback | List[Callback] = (),
    quiet: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """One line: `zx.train("ppo", env="CartPole-v1", seed=0)`, or `zx.train("iql", dataset="recorded")`, whose
    environment is named in the data. `env` is a name, a class, a function that makes an environment, or an environment;
    `net` may be a class of networks. Returns the run's result."""
    if env is not None:
        settings["env"] = env
    from zhixing.experiments import auto

    cfg = auto.build([], config.nested({"algorithm": algorithm, **settings}))
    return Session(cfg, out, callbacks, quiet=quiet).run()


def evaluate(
    run: str | Path,
    episodes: int = 100,
    seed: int = 0,
    checkpoint: str = "last",
    against: str | None = None,
    *,
    max_steps: int | None = None,
    trust: bool = False,
    env: Any = None,
    net: Any = None,
) -> Evaluation:
    """Play fresh episodes with a run's agent; in games `against` an opponent: random, perfect, mcts,
    mcts:SIMULATIONS or another run. Episodes are cut after `max_steps`, by default the run's `eval_max_steps`. With
    `trust` it may import the code that the run names. `env` and `net` are classes or functions, where that can't be
    imported."""
    folder = RunFolder.open(run)
    cfg = resolve_device(folder.read_config(trust, env, net))
    torch.set_num_threads(int(cfg.num_threads) if cfg.num_threads != "auto" else 1)
    if cfg.env.name == NO_ENV:
        raise UserError(f"{run} was trained without an environment; train with --env NAME to evaluate in it")
    with folder.restricted():
        vector = _evaluation_env(cfg, folder)
    try:
        with folder.restricted():
            learner: Learner = algorithms.get(cfg.algorithm).make(cfg, vector.spaces, torch.device(cfg.device))
        agent = folder.load_agent(checkpoint)
        with fitting(folder):
            learner.policy.load_state_dict(agent["policy"])
        if against is not None:
            evaluator: Evaluator = Matches(game_of(cfg.env.name), learner.policy, against)
        else:
            evaluator = _evaluator(cfg, learner.policy, torch.device(cfg.device), folder, vector)
        most = max_steps or cfg.eval_max_steps or default_eval_steps(vector.max_episode_steps, agent["longest_episode"])
        evaluation = evaluator.evaluate(episodes, seed, max_steps=most)
    finally:
        vector.close()
    return replace(evaluation, references=folder.read_references())


def _evaluator(
    cfg: RunConfig, policy: Policy, device: torch.device, folder: RunFolder, env: envs.VectorEnv | None = None
) -> Actor | Matches:
    """Who plays fresh episodes: of those that look ahead in games, matches."""
    if isinstance(cfg, SearchConfig) and cfg.env.name in GAMES:
        return Matches(game_of(cfg.env.name), policy, cfg.opponent or "random")
    return Actor(policy, env or _evaluation_env(cfg, folder), device=device)


def _evaluation_env(cfg: RunConfig, folder: RunFolder) -> envs.VectorEnv:
    num = min(cfg.eval_episodes, max(10, cfg.num_envs))
    options = {**cfg.env.options, **cfg.eval_env}
    faults = envs.Faults.of(cfg.vector, folder.crashes)
    backend = "serial" if cfg.vector.backend == "ray" else cfg.vector.backend  # few episodes aren't worth the way
    return envs.make_vector(cfg.env.name, num, backend=backend, options=options, faults=faults)


def default_out(cfg: RunConfig) -> Path:
    """A new folder, which nobody else gets who starts in the same second."""
    names = [Path(name).name if importing.FILE.fullmatch(name) else name for name in (cfg.env.name, cfg.algorithm)]
    task, algorithm = (re.sub(r"[^\w.-]+", "-", name)[-60:] for name in names)
    out = Path("runs") / f"{algorithm}-{task}-{cfg.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    for folder in itertools.chain([out], (out.with_name(f"{out.name}-{i}") for i in itertools.count(2))):
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return folder


def resolve(cfg: RunConfig, spaces: Spaces, env: envs.VectorEnv | None) -> RunConfig:
    """What is `auto` decided once, so that the configuration in the run is what ran."""
    vector, threads = cfg.vector, cfg.num_threads
    if env is not None:
        vector = vector.model_copy(update={"backend": env.backend, "workers": env.workers})
    elif vector.backend == "auto" and is_spread(cfg):
        # workers step theirs at the same time already, unless somebody asks for more
        own = vector.isolated or (isinstance(vector.workers, int) and vector.workers > 1)
        vector = vector.model_copy(update={"backend": "process" if own else "serial"})
    if threads == "auto":
        # small matrices are slower on several threads; convolutions gain from them
        sizes = tree_leaves(tree_map(lambda f: math.prod(f.shape) if len(f.shape) == 3 else 0, spaces.fields()["obs"]))
        threads = cpu_count() if max(sizes) >= 32 * 32 else 1
    imports, module = cfg.imports, registering_module(cfg.env.name)
    if module is not None and module.partition(".")[0] not in [package.partition(".")[0] for package in imports]:
        imports = [*imports, module]
    decided: dict[str, Any] = {"vector": vector, "num_threads": threads, "imports": imports}
    if getattr(cfg, "normalize_obs", None) == "auto":
        decided["normalize_obs"] = cfg.net.kind == "auto"  # type: ignore[attr-defined]
    return resolve_device(cfg).model_copy(update=decided)


def resolve_device(cfg: RunConfig) -> RunConfig:
    if cfg.device == "auto":
        return cfg.model_copy(update={"device": "cuda" if torch.cuda.is_available() else "cpu"})
    if cfg.device.startswith("npu"):
        with suppress(ImportError):
            importlib.import_module("torch_npu")  # which tells torch of that device
    try:
        torch.zeros(1, device=cfg.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"device={cfg.device!r} can't be used here: {reason} (try device=cpu)") from None
    return cfg


def _number(value: int | str) -> int | None:
    return value if isinstance(value, int) else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@contextmanager
def _interrupts(loop: Loop) -> Iterator[None]:
    """Ctrl-C, SIGTERM or SIGHUP ends training after the present iteration; a second one ends it at once.

    A second SIGHUP doesn't: a terminal that is closed sends it twice, by its shell and by the kernel. Where SIGHUP is
    ignored (`nohup`) it stays so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if loop.interrupt_requested:
            if number == signal.SIGHUP:
                return
            raise KeyboardInterrupt
        loop.stop(INTERRUPTED)
        write_stderr("\nstopping after this iteration or evaluation step (again to stop at once)")

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
