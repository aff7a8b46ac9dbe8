"""Settings of a run with several policies: what each policy is, and which agents it acts for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import model_validator

from zhixing.config.schema import Group, OffPolicyConfig, Positive, RunConfig, StrictModel
from zhixing.config.validation import validate
from zhixing.config.yaml_files import read_yaml
from zhixing.errors import UserError, unknown
from zhixing.utils import importing

NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
RANDOM = "random"  # a script that zhixing has
KINDS = ("algorithm", "run", "script", "league")
INHERITED = ("gamma", "precision")  # settings of the run that a policy may change
OWN_SETTINGS = ("algorithm", *INHERITED)  # those of `RunConfig` that belong to a policy
LEARNER_EXTRAS = ("frozen", "init_from", "init_policy")  # what the settings of an algorithm may have in addition


class LeagueConfig(StrictModel):
    """Opponents that are earlier versions of a policy."""

    league: str
    """Policy that the snapshots are taken of."""
    every: Positive = 10_000
    """Environment steps between snapshots. The first one is the initial policy."""
    size: Positive = 10
    """Maximum number of snapshots; a new one replaces the oldest."""
    sampling: Literal["uniform", "prioritized"] = "uniform"
    """Choice of a snapshot per episode: uniform, or prioritized by (1 - score)^2, where score is that of the policy."""


class ScriptConfig(StrictModel):
    """A policy that doesn't learn."""

    script: str
    """random, or your.module:YourPolicy, a zhixing.Policy that is called with the spaces of one agent."""


class FrozenRunConfig(StrictModel):
    """A policy with the weights of another run."""

    run: str
    """Run folder."""
    policy: str | None = None
    """Policy in that run, if it has several."""


class MultiPolicyConfig(RunConfig):
    """Settings of a run with several policies."""

    algorithm: str = "multi_policy"
    group: ClassVar[Group] = Group.COLLECTION

    num_envs: Annotated[Positive, Group.ENVIRONMENT] = 8
    policies: dict[str, Any] = {}  # noqa: RUF012  (pydantic copies defaults)
    """Policies by name: {algorithm: NAME, its settings}, {run: FOLDER}, {script: CODE} or {league: POLICY}."""
    agents: dict[str, str] = {"*": "ppo"}  # noqa: RUF012
    """Policy of each agent, by its name or a pattern; may also be an algorithm with default settings, or random."""
    eval_agents: Annotated[dict[str, str], Group.EVALUATION] = {}  # noqa: RUF012
    """Policies in evaluations of agents that have another one in training."""
    rotate: bool = False
    """Shift the policies by one agent from each environment to the next, so every policy plays as every agent."""

    scheme: ClassVar[str] = "multi_policy"

    @model_validator(mode="after")
    def _expand_policies(self) -> MultiPolicyConfig:
        given = dict(self.policies)
        for name in (*self.agents.values(), *self.eval_agents.values()):
            if name not in given:  # algorithms and `random` need no entry
                given[name] = _expand_name(name, given)
        self.policies = {name: _expand(name, settings, self) for name, settings in given.items()}
        for name, settings in self.policies.items():
            target = settings.get("league")
            if target is not None and not is_learner(self.policies.get(target, {})):
                learners = [other for other, values in self.policies.items() if is_learner(values)]
                raise unknown(f"league in policies.{name}: no learning policy", target, learners)
        return self


def is_learner(settings: Mapping[str, Any]) -> bool:
    """Return whether the settings are those of a policy that learns in this run."""
    return "algorithm" in settings and not settings["frozen"]


def policy_config(cfg: MultiPolicyConfig, name: str, num_envs: int, seed: int) -> RunConfig:
    """Return the configuration of the algorithm of a policy, which acts in `num_envs` environments."""
    settings = {key: value for key, value in cfg.policies[name].items() if key not in LEARNER_EXTRAS}
    return _validate(settings, cfg, {"num_envs": num_envs, "seed": seed})


def _expand_name(name: str, policies: Mapping[str, Any]) -> Any:
    from zhixing import algorithms

    if name == RANDOM:
        return {"script": RANDOM}
    if name in algorithms.names():
        return {"algorithm": name}
    hint = "(define it as policies.NAME, or write random or the name of an algorithm)"
    raise unknown("policy", name, [*policies, RANDOM, *algorithms.names()], hint)


def _expand(name: str, settings: Any, cfg: MultiPolicyConfig) -> dict[str, Any]:
    """Return the complete settings of a policy."""
    if not NAME.fullmatch(name):
        raise UserError(f"policies.{name}: the name of a policy may have letters, digits and _, such as opponent_2")
    if isinstance(settings, str):
        settings = _expand_text(settings)
    kinds = [kind for kind in KINDS if isinstance(settings, Mapping) and kind in settings]
    if len(kinds) != 1:
        raise UserError(
            f"policies.{name}={settings!r}: it needs exactly one of {', '.join(KINDS)}, for example "
            f"policies.{name}.algorithm=ppo"
        )
    try:
        if kinds[0] == "run":
            settings = _expand_run(validate(FrozenRunConfig, settings))
        if "algorithm" in settings:
            return _expand_algorithm(settings, cfg)
        return validate(LeagueConfig if kinds[0] == "league" else ScriptConfig, settings).model_dump()
    except UserError as error:
        raise UserError(f"policies.{name}: {error}") from None


def _expand_text(text: str) -> dict[str, Any]:
    """Return the settings that a short form stands for: random, code, a run folder or an algorithm."""
    if text == RANDOM or ":" in text:
        return {"script": text}
    if (Path(text) / "config.yaml").is_file():
        return {"run": text}
    return {"algorithm": text}


def _expand_algorithm(settings: Mapping[str, Any], cfg: MultiPolicyConfig) -> dict[str, Any]:
    from zhixing import algorithms
    from zhixing.config.loading import merge, preset

    values = {key: value for key, value in settings.items() if key not in LEARNER_EXTRAS}
    frozen, init_from, init_policy = (settings.get(key) for key in LEARNER_EXTRAS)
    if frozen not in (None, True, False):
        raise UserError(f"frozen={frozen!r} must be true or false")
    if frozen and init_from is None:
        raise UserError("frozen=true needs the weights of a run: set init_from=RUN, or set frozen=false")
    if init_policy is not None and init_from is None:
        raise UserError(f"init_policy={init_policy!r} is the policy in another run: set init_from=RUN, too")
    whole_run = [key for key in values if key in RunConfig.model_fields and key not in OWN_SETTINGS]
    if whole_run:
        raise UserError(f"{whole_run[0]} applies to the whole run, not to a policy; set {whole_run[0]}=... instead")
    values["algorithm"] = algorithm = algorithms.get(values["algorithm"]).name
    tuned = preset(algorithm, cfg.env.name) if cfg.preset else {}
    inherited = {name: getattr(cfg, name) for name in INHERITED if name in cfg.model_fields_set}
    tuned = inherited | {key: value for key, value in tuned.items() if key in OWN_SETTINGS or not _is_shared(key)}
    complete = _validate(merge(tuned, values), cfg)
    _check_scheme(complete, bool(frozen))
    own = {key: value for key, value in complete.model_dump(mode="json").items() if not _is_shared(key)}
    source = None if init_from is None else str(Path(init_from).absolute())
    return {**own, "frozen": bool(frozen), "init_from": source, "init_policy": init_policy}


def _is_shared(setting: str) -> bool:
    """Return whether a setting holds for the run and not for a single policy."""
    return setting in RunConfig.model_fields and setting not in OWN_SETTINGS


def _validate(settings: Mapping[str, Any], cfg: RunConfig, changes: Mapping[str, Any] | None = None) -> RunConfig:
    from zhixing import algorithms

    shared = {name: value for name, value in cfg.model_dump().items() if _is_shared(name)}
    for name in ("trainer", "collector", "init_from"):
        shared.pop(name)  # of the run
    model = algorithms.get(settings["algorithm"]).settings
    return validate(model, {**shared, **settings, **(changes or {})})


def _check_scheme(cfg: RunConfig, frozen: bool) -> None:
    """Raise `UserError` for an algorithm, or a setting, that can't share an environment with other policies."""
    if cfg.scheme in ("play", "self_play"):
        raise UserError(f"{cfg.algorithm} plans by search, and can't act next to other policies; use ppo or dqn")
    if frozen:
        return
    needs = [name for name in ("demonstrations", "expert") if name in type(cfg).model_fields]
    if cfg.scheme not in ("on_policy", "off_policy") or needs:
        reason = f"it needs {needs[0]}" if needs else f"its training scheme is {cfg.scheme}"
        raise UserError(
            f"{cfg.algorithm} can't learn next to other policies, because {reason}; use ppo, dqn or another algorithm "
            f"that learns from rollouts or a replay buffer"
        )
    if not isinstance(cfg, OffPolicyConfig):
        return
    rejected = {
        "dataset": cfg.dataset is not None,
        "async_collect": cfg.async_collect,
        "train_every in episodes": isinstance(cfg.train_every, str),
        "replay.her": cfg.replay.her,
        "replay.on_disk": cfg.replay.on_disk,
        "replay.start": cfg.replay.start is not None,
    }
    for setting, is_set in rejected.items():
        if is_set:
            raise UserError(f"{setting} isn't supported with several policies; leave it out")


def _expand_run(frozen: FrozenRunConfig) -> dict[str, Any]:
    """Return the settings of the algorithm of another run, with its weights, frozen."""
    from zhixing import algorithms

    file = Path(frozen.run) / "config.yaml"
    if not file.is_file():
        raise UserError(f"run={frozen.run!r} is not a run, because it contains no config.yaml; choose a run folder")
    values = read_yaml(file)
    choice = frozen.policy
    if isinstance(values.get("policies"), Mapping):
        learners = {name: one for name, one in values["policies"].items() if "algorithm" in one}
        choice = choice or (next(iter(learners)) if len(learners) == 1 else None)
        if choice not in learners:
            raise unknown("policy", str(choice), learners, f"(the run {frozen.run} has several: set policy=NAME)")
        values = learners[choice]
    elif choice is not None:
        raise UserError(f"policy={choice!r}: the run {frozen.run} has only one policy; leave it out")
    model = algorithms.get(str(values["algorithm"])).settings
    settings = {key: value for key, value in values.items() if key in model.model_fields and not _is_shared(key)}
    try:
        importing.check_names(settings)
    except UserError:
        names = ", ".join(sorted(importing.names_in(settings)))
        raise UserError(
            f"the run {frozen.run} names code to import ({names}); if you trust it, write the policy's settings "
            f"yourself, with init_from={frozen.run} and frozen=true"
        ) from None
    return {**settings, "frozen": True, "init_from": frozen.run, "init_policy": choice}
