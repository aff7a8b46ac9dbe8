"""Configuration: typed, strict and complete. What isn't a setting is refused, with the nearest right name.

Later words win: defaults, preset of the algorithm for the task, files in their order, overrides in theirs.
The settings of an algorithm stand beside it, as a class derived from `OnPolicyConfig` or `OffPolicyConfig`.
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
import os
import re
import tokenize
import types
import typing
from collections.abc import Mapping, Sequence
from importlib import resources
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from zhixing import importing, named_objects
from zhixing.errors import UserError, unknown
from zhixing.other_libraries import OTHER_NAMES
from zhixing.tree import check_size

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Threads = Annotated[int, Field(gt=0, le=1024)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
UpdatesPerStep = Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]  # more would look like a hanging run
Auto = Literal["auto"]


class Strict(BaseModel):
    """No unknown names, no silent conversions; `1e6` is a whole number all the same."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        """Whole numbers as such, and `none`; groups of settings given in part keep the rest of their defaults."""
        if not isinstance(values, Mapping):
            return values
        return {key: _complete(cls.model_fields.get(key), value) for key, value in values.items()}


def _complete(field: FieldInfo | None, value: Any) -> Any:
    if field is None:
        return value
    if isinstance(value, Mapping) and isinstance(field.default, BaseModel):
        return {**field.default.model_dump(), **value}
    kind = str(field.annotation)
    if isinstance(value, str) and "," in value and kind.startswith("list["):  # 256,256 as the shell leaves it
        value = parse_yaml(f"[{value}]", "a list")
    if value == "none" and "None" in kind:  # as `zhixing show` writes it
        return None
    if "int" not in kind or "float" in kind:
        return value
    return [_whole(part) for part in value] if isinstance(value, list) else _whole(value)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


class EnvConfig(Strict):
    model_config = ConfigDict(extra="allow")

    name: str  # the task, as `zhixing list envs` names it, or your.module:YourEnv; further keys are its options

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


Backend = Literal["auto", "serial", "process", "mixed", "native", "envpool", "torch", "ray"]


class VectorConfig(Strict):
    backend: Backend = "auto"  # what runs copies; auto measures
    num: Positive = 1  # copies of the task; `zhixing train ... vector.num=auto` measures how many are fastest
    workers: Positive | Auto = "auto"  # processes that share the copies, with backend=process, mixed or ray
    on_crash: Literal["stop", "replace"] = "stop"  # a copy that fails ends the run, or a new one takes its place
    step_seconds: PositiveFloat | None = None  # how long a step of a copy may take, with backend=process
    call_seconds: PositiveFloat | None = None  # how long any other call (constructor, reset, ...) may take, likewise

    @property
    def isolated(self) -> bool:
        """Whether nothing of a task runs in the process that trains: it runs in worker processes that can be ended."""
        guarded = self.on_crash == "replace" or self.step_seconds is not None or self.call_seconds is not None
        return self.backend == "process" or (self.backend == "auto" and guarded)


class DistributedConfig(Strict):
    workers: Count = 0  # Ray workers that act, each with its share of the copies; 0: this process acts itself
    learners: Positive = 1  # processes that learn, each from its share of every batch
    servers: Count = 0  # Ray processes that hold the weights, a slice each, for the workers of a3c
    address: str | None = None  # a Ray cluster to join, such as 10.0.0.1:6379 or auto; none starts one on this machine


class NetConfig(Strict):
    kind: str = "auto"  # auto (from the observation's shape), or your.module:Net, called with the observation space
    hidden_sizes: list[Positive] = [64, 64]  # units of the fully connected layers
    activation: Literal["tanh", "relu", "silu", "elu", "gelu"] = "tanh"  # after each fully connected layer
    cnn: Literal["auto", "nature", "small", "simple"] = "auto"  # convolutions for images; auto: simple below 36 pixels
    recurrent: Literal["none", "gru", "lstm"] = "none"  # memory after the fully connected layers
    recurrent_size: Positive = 64  # units of the memory


class RunConfig(Strict):
    """Settings of every run."""

    algorithm: str  # what learns, as `zhixing list algorithms` names it, or your.module:YourLearner
    env: EnvConfig  # the task
    imports: list[str] = []  # packages to import first, which register environments with Gymnasium
    seed: Count = 0  # fixes every random number of the run
    env_steps: Positive = 100_000  # budget: steps of the environment, over all copies
    episodes: Positive | None = None  # budget: training episodes
    duration: str | PositiveFloat | None = None  # budget: training time, such as 90s, 10m, 1h30m
    stop_return: Finite | None = None  # end when 100 fresh evaluation episodes average at least this
    vector: VectorConfig = VectorConfig()
    distributed: DistributedConfig = DistributedConfig()
    gamma: Fraction = 0.99  # discount of the future per step
    device: str = "auto"  # cpu, cuda, mps, npu, or auto: cuda where there is one
    threads: Threads | Auto = "auto"  # threads that torch computes with; unset 1, for pictures all CPUs; auto measures
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # of matrix products in updates; weights are always fp32
    graph: bool = False  # compile the update to one graph: faster, after compiling once (needs a C++ compiler)
    init: str | None = None  # a run whose weights this one starts from
    log_every_steps: Positive = 1_000  # a row of metrics every so many environment steps
    eval_every_steps: Count = 5_000  # evaluate every so many environment steps; 0 is never
    eval_episodes: Positive = 10  # episodes of each evaluation
    eval_max_steps: Positive | None = (
        None  # cut evaluation episodes here; none: see docs/reliability.md, Endless episodes
    )
    eval_env: dict[str, Any] = {}  # options of the task that are others in evaluations, such as levels=test
    eval_video: bool = False  # film an episode at each evaluation, as videos/STEPS.mp4 in the run
    plot: str | None = None  # draw this column of metrics.csv at each evaluation, as plot.png in the run
    checkpoint_every_steps: Count = 20_000  # save every so many environment steps; 0 is only at the end
    keep_checkpoints: Positive = 2  # newest checkpoints kept, besides the best
    tensorboard: bool = True  # write TensorBoard events too

    scheme: ClassVar[str] = ""  # which trainer drives it
    needs_data: ClassVar[bool] = False  # learns from recorded experience, whatever else it does

    @model_validator(mode="before")
    @classmethod
    def _env_by_name(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        short = {key: {part: values[key]} for key, part in SHORT.items() if isinstance(values.get(key), str)}
        return {**values, **short}

    @field_validator("device")
    @classmethod
    def _gpu_is_cuda(cls, device: str) -> str:
        return re.sub(r"^gpu(?=$|:)", "cuda", device)

    @model_validator(mode="after")
    def _duration_is_readable(self) -> RunConfig:
        if self.duration is not None:
            seconds(self.duration)
        return self


class OnPolicyConfig(RunConfig):
    """Settings of algorithms that learn from what the current policy has just done."""

    steps_per_iteration: Positive = 128  # steps of each environment between updates
    optimizer_eps: PositiveFloat = 1e-8  # added to the denominator of Adam and RMSProp
    net: NetConfig = NetConfig()

    scheme: ClassVar[str] = "on_policy"


class AsynchronousConfig(OnPolicyConfig):
    """Settings of algorithms that learn from whoever is ready: actors with weights that are some updates old."""

    actors: Positive = 2  # who take turns in this process, unless there are distributed.workers

    scheme: ClassVar[str] = "asynchronous"


class SearchConfig(RunConfig):
    """Settings of algorithms that look ahead."""

    simulations: Positive = 100  # of each search, before each move
    c: PositiveFloat = 1.4  # how much a search explores beside what looks best
    steps_per_iteration: Positive = 1  # steps of each environment between looks at the budget
    opponent: str | None = None  # games: whom evaluations are against, see `zhixing eval --against`; none is random

    scheme: ClassVar[str] = "play"


class SelfPlayConfig(SearchConfig):
    """Settings of algorithms that learn from games against themselves."""

    batch_size: Positive = 256  # positions per update
    capacity: Positive = 100_000  # newest positions that are kept to learn from
    steps_per_iteration: Positive = 8  # moves in each game between updates
    updates_per_step: UpdatesPerStep = 0.02  # updates per move, on average
    optimizer_eps: PositiveFloat = 1e-8  # added to the denominator of Adam and RMSProp

    scheme: ClassVar[str] = "self_play"


class ReplayConfig(Strict):
    capacity: Positive = 100_000  # transitions kept
    n_step: Positive = 1  # rewards summed before bootstrapping
    prioritized: bool = False  # sample by the size of the last error instead of uniformly
    alpha: Fraction = 0.6  # prioritized: how much priorities count
    beta_start: Fraction = 0.4  # prioritized: importance correction at the start, growing to 1
    sequence_length: Positive = 20  # recurrent networks: steps of a sample that are learned from
    burn_in: Count = 5  # recurrent networks: steps before these that only warm up the memory
    hindsight: bool = False  # tasks with goals: learn also as if what was reached later had been the goal
    hindsight_ratio: Fraction = 0.8  # hindsight: share of sampled transitions that get such a goal
    frame_stack: Positive = 1  # observations are stacks of so many frames, stored once each
    on_device: bool = False  # keep the replay on the learner's device
    on_disk: bool = False  # keep the replay in memory-mapped files in the run's folder
    start: str | None = None  # recorded experience that the replay holds from the beginning


class DataConfig(RunConfig):
    """Settings of algorithms that can learn from recorded experience."""

    net: NetConfig = NetConfig()
    batch_size: Positive = 64  # transitions per update
    optimizer_eps: PositiveFloat = 1e-8  # added to the denominator of Adam and RMSProp
    normalise_obs: bool = False  # running mean and spread of observations
    dataset: str | None = None  # recorded experience to learn from instead of an environment
    offline_updates: Positive = 30_000  # budget with a dataset: updates, which all intervals of steps then count

    scheme: ClassVar[str] = "offline"
    needs_data: ClassVar[bool] = True


class OffPolicyConfig(DataConfig):
    """Settings of algorithms that learn from a replay of all that was done."""

    steps_per_iteration: Positive = 1  # steps of each environment between updates
    updates_per_step: UpdatesPerStep = 1.0  # updates per environment step, on average
    warmup_steps: Count = 1_000  # environment steps of random actions before the first update
    overlap: bool = False  # act in another thread while learning, with weights one iteration old
    replay: ReplayConfig = ReplayConfig()

    scheme: ClassVar[str] = "off_policy"
    needs_data: ClassVar[bool] = False


class ValueConfig(OffPolicyConfig):
    """Settings of algorithms that learn the values of discrete actions."""

    lr: PositiveFloat = 1e-3  # learning rate
    optimizer: Literal["adam", "rmsprop"] = "adam"  # what moves the weights
    max_grad_norm: PositiveFloat | None = 10.0  # gradients are clipped to this norm
    sync_every_updates: Positive = 200  # how often the target network moves
    tau: Fraction = 1.0  # how far it moves then; 1 copies the network
    epsilon_start: Fraction = 1.0  # chance of a random action at the start
    epsilon_end: Fraction = 0.05  # and when it has fallen
    epsilon_fraction: Fraction = 0.2  # share of the budget over which it falls
    eval_epsilon: Fraction = 0.0  # chance of a random action in evaluations
    net: NetConfig = NetConfig(hidden_sizes=[128, 128], activation="relu")


class ContinuousConfig(OffPolicyConfig):
    """Settings of algorithms with an actor and critics that learn from a replay."""

    lr: PositiveFloat = 1e-3  # learning rate
    actor_lr: PositiveFloat | None = None  # the actor's own learning rate
    tau: Fraction = 0.005  # how far targets move towards the networks at each update
    batch_size: Positive = 256  # transitions per update
    critic_norm: bool = False  # zero mean and unit spread before each activation of a critic
    net: NetConfig = NetConfig(hidden_sizes=[256, 256], activation="relu")


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(duration: str | float) -> float:
    """`90`, `90s`, `10m` and `1h30m` in seconds."""
    if isinstance(duration, (int, float)):
        return float(duration)
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", duration)
    if not parts or "".join(number + unit for number, unit in parts) != duration:
        raise ValueError(f"{duration!r} is no duration; write for example 90s, 10m or 1h30m")
    total = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if total <= 0:
        raise ValueError(f"{duration!r} is no time at all; a duration must be positive")
    return total


# --- reading -----------------------------------------------------------------------------------------------------


LARGEST = 1 << 20  # bytes of a configuration


class _Loader(yaml.SafeLoader):
    """YAML in which `3e-4` is a number, as everywhere else, and whose references don't multiply without end."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > 10_000:
            raise yaml.constructor.ConstructorError(problem="it merges itself again and again")


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_yaml(text: str, where: str) -> Any:
    try:
        values = yaml.load(text, _Loader)  # a SafeLoader
        check_size(values, len(text))
        return values
    # its constructors let many errors through, on values such as `!!bool x`
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).split("\n")[0] or type(error).__name__
        raise UserError(f"{where} is not readable YAML{line}: {problem}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > LARGEST:
            raise UserError(f"the configuration file {path} is larger than {LARGEST >> 20} MB")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"there is no configuration file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the configuration file {path} can't be read: {error}") from None
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"{path} must hold settings, one `name: value` per line; it holds {type(values).__name__}")
    return values


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Return `["lr=3e-4", "vector.num=8"]` as nested settings."""
    values: dict[str, Any] = {}
    for word in words:
        key, sign, text = word.partition("=")
        if not sign or not key or key.startswith("-"):
            raise UserError(
                f"{word!r} is no setting; write name=value, for example lr=3e-4 or vector.num=8 "
                f"(environments are named by --env)"
            )
        values = merge(values, nest(key, parse_yaml(text, f"the value of {key!r}")))
    return values


def nest(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


SHORT = {"env": "name", "net": "kind"}  # groups of settings of which one may stand for the group


def merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, key by key; a task given by name takes options later."""
    merged = dict(base)
    for key, value in over.items():
        mine = merged.get(key)
        if key in SHORT:
            mine, value = ({SHORT[key]: part} if isinstance(part, str) else part for part in (mine, value))
        if key == "env":
            # another task doesn't inherit the options of the one before
            named = [part.get("name") for part in (mine, value) if isinstance(part, dict)]
            if None not in named and named[1:] not in ([], named[:1]):
                mine = None
        if isinstance(value, dict) and mine is not None and not isinstance(mine, dict):
            first = next(iter(value), "...")
            raise UserError(f"{key}={mine!r} and {key}.{first} can't both be set: {key} is a group of settings")
        merged[key] = merge(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return merged


def preset(algorithm: str, env: str) -> dict[str, Any]:
    """The tuned settings of an algorithm for a task, or none. Presets are `presets/<algorithm>.yaml`, by task."""
    name = preset_name(algorithm, env)
    return {} if name is None else dict(presets(algorithm)[name])


def preset_name(algorithm: str, env: str) -> str | None:
    """Return the pattern of environments whose preset counts for this one, or None where there is none."""
    env = env.rpartition(":")[2]  # of package:Id-v0 the id counts
    return next((pattern for pattern in presets(algorithm) if fnmatch.fnmatchcase(env, pattern)), None)


@functools.cache
def presets(algorithm: str) -> dict[str, dict[str, Any]]:
    file = resources.files("zhixing") / "presets" / f"{algorithm}.yaml"
    if ":" in algorithm or "/" in algorithm or not file.is_file():
        return {}
    return parse_yaml(file.read_text(encoding="utf-8"), f"preset {algorithm}") or {}


def load(*files: str | Path, **overrides: Any) -> RunConfig:
    """Read configuration files, in order, and settings by name on top of them (`vector__num=8` or a dict)."""
    return build([read_yaml(Path(file)) for file in files], nested(overrides))


def nested(named: Mapping[str, Any]) -> dict[str, Any]:
    """`vector__num` and the like as groups of settings."""
    values: dict[str, Any] = {}
    for key, value in named.items():
        *_, last = key.split("__")
        values = merge(values, nest(key.replace("__", "."), _without_objects(last, value)))
    return values


def _without_objects(key: str, value: Any) -> Any:
    """The names of classes, functions and environments in the place of these."""
    if isinstance(value, Mapping):
        parts = {name: _without_objects(key if name == SHORT.get(key) else name, part) for name, part in value.items()}
        # an environment may have become its name and options
        return {**parts.pop("name"), **parts} if isinstance(parts.get("name"), Mapping) else parts
    if value is None or isinstance(value, (str, int, float, list, tuple, Path)):
        return value
    if key == "env":
        from zhixing.envs.portable import reference

        return reference(value)
    return named_objects.name_object(value) if callable(value) else value


def build(layers: Sequence[Mapping[str, Any]], overrides: Mapping[str, Any]) -> RunConfig:
    """A checked configuration of the algorithm and task that the layers name."""
    from zhixing import algorithms

    values: dict[str, Any] = {}
    for layer in (*layers, overrides):
        values = merge(values, layer)
    values = _with_paths(values)
    algorithm, env = values.get("algorithm"), values.get("env")
    if env is None and isinstance(values.get("dataset"), str):
        env = values["env"] = _env_of_data(values["dataset"])
    name = env.get("name") if isinstance(env, dict) else env
    if not isinstance(algorithm, str):
        raise UserError("no algorithm is named; set `algorithm`, for example algorithm=ppo (see `zhixing list`)")
    if not isinstance(name, str):
        raise UserError("no environment is named; set `env`, for example env=CartPole-v1 (see `zhixing list envs`)")
    algorithm, _, _, settings, _ = algorithms.get(algorithm)
    values["algorithm"] = algorithm  # as it is registered: PPO is ppo
    if values.get("dataset") is not None and "dataset" not in settings.model_fields:
        raise UserError(
            f"{algorithm} takes no dataset: it learns from what it has just done itself; those with a replay take one, "
            f"such as dqn, sac and iql"
        )
    cfg = absolute_paths(validate(settings, merge(preset(algorithm, name), values)))
    if cfg.imports:
        from zhixing.envs.gymnasium_tasks import import_packages

        import_packages(cfg.imports)
    return cfg


def absolute_paths(cfg: RunConfig) -> RunConfig:
    """Make paths of the configuration absolute: an environment may change the current folder, and a run may be resumed
    from another one."""

    def absolute(values: Any, *names: str) -> dict[str, str]:
        given = {name: getattr(values, name, None) for name in names}
        return {name: os.path.abspath(value) for name, value in given.items() if value and os.path.exists(value)}

    changes: dict[str, Any] = {**absolute(cfg, "init", "dataset", "expert", "opponent")}
    if isinstance(cfg, OffPolicyConfig):
        changes["replay"] = cfg.replay.model_copy(update=absolute(cfg.replay, "start"))
    return cfg.model_copy(update=changes)


def provide(values: Mapping[str, Any], **objects: Any) -> None:
    """Let the names in a run's settings stand for objects: `env` for a class, a function or an environment, `net` for
    a class of networks."""
    for group, given in objects.items():
        if given is None:
            continue
        if isinstance(given, str):
            raise UserError(f"{group}={given!r} is a name; give the class itself, or a function that makes one")
        settings = values.get(group)
        name = settings.get(SHORT[group]) if isinstance(settings, Mapping) else settings
        if not isinstance(name, str):
            raise UserError(f"{group} can't be given: the run names none")
        if group == "env":
            from zhixing.envs.portable import factory_of

            given = factory_of(given)
        named_objects.provide(name, given)


def _with_paths(values: Any) -> Any:
    """Names such as `my_env.py:MyEnv` with the whole path of the file: the run may be loaded from another folder."""
    if isinstance(values, Mapping):
        return {key: _with_paths(value) for key, value in values.items()}
    return importing.absolute(values) if isinstance(values, str) else values


def _env_of_data(source: str) -> dict[str, Any]:
    from zhixing import datasets

    data = datasets.open(source)
    if data.env is None:
        raise UserError(
            f"{source} doesn't name its environment; name it with --env, or learn without evaluations with --env none"
        )
    env = {"name": data.env, **data.options}
    try:
        importing.check_names(env)
    except UserError as error:
        raise UserError(f"{source}: {error}, or name the environment with --env") from None
    return env


def validate(model: type[RunConfig], values: Mapping[str, Any]) -> RunConfig:
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise UserError("\n".join(_explain(model, problem) for problem in error.errors())) from None


def _explain(model: type[BaseModel], problem: Any) -> str:
    path = [str(part) for part in problem["loc"] if not str(part).startswith(("function-", "constrained-", "literal["))]
    name = ".".join(path)
    if problem["type"] == "extra_forbidden":
        owner: Any = model
        for part in path[:-1]:
            owner = owner.model_fields[part].annotation
        prefix = "".join(part + "." for part in path[:-1])
        return _unknown_setting(name, model, [prefix + field for field in owner.model_fields])
    if problem["type"] == "missing":
        return f"the setting {name!r} is missing"
    if name == "vector.num" and problem["input"] == "auto":
        return "vector.num='auto' is decided when training begins, by `zhixing train` or zx.train: write a number here"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if problem["type"] == "list_type":
        message += ", such as [64, 64]"
    if not name:
        return message
    # for a union pydantic also names the alternative; people don't need it
    name = ".".join(part for part in path if part not in ("int", "float", "str", "bool"))
    return f"{name}={problem['input']!r}: {message}"


def _unknown_setting(name: str, model: type[BaseModel], allowed: list[str]) -> str:
    """Name the setting that other libraries, or other algorithms, have by this name; else the most similar names."""
    from zhixing import algorithms

    other = OTHER_NAMES.get(name.rpartition(".")[2])
    if other is not None:
        setting = next((one for one in other.here if one.startswith("-") or has_setting(model, one)), None)
        if setting is not None or not other.here:
            return f"unknown setting: {other.sentence(name, setting)}"
    known_by = [each for each in algorithms.names() if has_setting(algorithms.get(each).settings, name)]
    if known_by:
        these = ", ".join(known_by[:6]) + (" and others" if len(known_by) > 6 else "")
        return f"unknown setting {name!r}: only other algorithms have it, such as {these}"
    return str(unknown("setting", name, allowed))


def setting_type(model: type[BaseModel], name: str) -> Any:
    """Return the annotation of a setting by its dotted name, or None where there is no such setting."""
    first, _, rest = name.partition(".")
    field = model.model_fields.get(first)
    if field is None or not rest:
        return None if field is None else field.annotation
    group = field.annotation
    return setting_type(group, rest) if isinstance(group, type) and issubclass(group, BaseModel) else None


def has_setting(model: type[BaseModel], name: str) -> bool:
    return setting_type(model, name) is not None


def dump(cfg: RunConfig) -> str:
    return yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def allowed(annotation: Any, limits: Sequence[Any] = ()) -> str:
    """Return the type and the allowed values of a setting: `integer > 0`, `adam | rmsprop`, `number or none`."""
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        inner = [limit for one in arguments[1:] for limit in getattr(one, "metadata", [one])]
        return allowed(arguments[0], [*inner, *limits])
    if origin is Literal:
        return " | ".join(str(choice) for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(allowed(one) for one in arguments)
    if origin is list:
        return f"list of {allowed(arguments[0]).replace('integer', 'integers')}"
    names = {int: "integer", float: "number", str: "text", bool: "true | false", type(None): "none"}
    name = names.get(annotation, "options" if origin is dict else "text")
    bounds = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    found = {sign: getattr(limit, key) for limit in limits for key, sign in bounds.items() if hasattr(limit, key)}
    if found.keys() == {">=", "<="}:
        return f"{name} {found['>=']:g} to {found['<=']:g}"
    return f"{name} {' and '.join(f'{sign} {value:g}' for sign, value in found.items())}".strip()


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return groups of settings by dotted names."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= flat_settings(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """The meaning of each setting: the comment behind it in the source."""
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if not (isinstance(cls, type) and issubclass(cls, BaseModel)) or cls in (BaseModel, Strict):
            continue
        name = ""
        depth_of_class = None
        for token in tokenize.generate_tokens(StringIO(inspect.getsource(cls)).readline):
            if depth_of_class is None and token.type == tokenize.INDENT:
                depth_of_class = len(token.string)
            if token.type == tokenize.NAME and token.start[1] == depth_of_class:
                name = token.string
            elif token.type == tokenize.COMMENT and name in cls.model_fields and token.line.strip() != token.string:
                found[name] = token.string.lstrip("# ").strip()
    return found
