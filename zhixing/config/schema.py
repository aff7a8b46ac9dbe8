"""The settings of every run, of each training scheme, and of what they share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from zhixing.config.yaml_files import parse_yaml

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Threads = Annotated[int, Field(gt=0, le=1024)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
UpdatesPerStep = Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]  # more would look like a hanging run
Auto = Literal["auto"]
SHORT = {"env": "name", "net": "kind"}  # groups of settings of which one may stand for the group


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
    workers: Positive | Auto = "auto"  # processes that share the copies, with backend=process, mixed or ray
    on_crash: Literal["stop", "replace"] = "stop"  # a copy that fails ends the run, or a new one takes its place
    step_timeout: PositiveFloat | None = None  # how long a step of a copy may take, with backend=process
    call_timeout: PositiveFloat | None = None  # how long any other call (constructor, reset, ...) may take, likewise

    @property
    def isolated(self) -> bool:
        """Whether nothing of a task runs in the process that trains: it runs in worker processes that can be ended."""
        guarded = self.on_crash == "replace" or self.step_timeout is not None or self.call_timeout is not None
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
    num_envs: Positive = 1  # parallel environments; `zhixing train ... num_envs=auto` measures how many are fastest
    vector: VectorConfig = VectorConfig()
    distributed: DistributedConfig = DistributedConfig()
    gamma: Fraction = 0.99  # discount of the future per step
    device: str = "auto"  # cpu, cuda, mps, npu, or auto: cuda where there is one
    num_threads: Threads | Auto = "auto"  # of torch on the CPU; unset 1, for pictures all CPUs; auto measures
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # of matrix products in updates; weights are always fp32
    compile: bool = False  # compile the update to one graph: faster, after compiling once (needs a C++ compiler)
    init_from: str | None = None  # a run whose weights this one starts from
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

    scheme: ClassVar[str] = ""  # kind of training, such as on_policy
    trainer: ClassVar[Callable[[Any], None] | None] = None  # a training function; None: that of the scheme's class
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

    rollout_steps: Positive = 128  # steps of each environment between updates
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
    rollout_steps: Positive = 1  # steps of each environment between looks at the budget
    opponent: str | None = None  # games: whom evaluations are against, see `zhixing eval --against`; none is random

    scheme: ClassVar[str] = "play"


class SelfPlayConfig(SearchConfig):
    """Settings of algorithms that learn from games against themselves."""

    batch_size: Positive = 256  # positions per update
    capacity: Positive = 100_000  # newest positions that are kept to learn from
    rollout_steps: Positive = 8  # moves in each game between updates
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
    her: bool = False  # tasks with goals: learn also as if what was reached later had been the goal
    her_ratio: Fraction = 0.8  # hindsight: share of sampled transitions that get such a goal
    frame_stack: Positive = 1  # observations are stacks of so many frames, stored once each
    on_device: bool = False  # keep the replay on the learner's device
    on_disk: bool = False  # keep the replay in memory-mapped files in the run's folder
    start: str | None = None  # recorded experience that the replay holds from the beginning


class DataConfig(RunConfig):
    """Settings of algorithms that can learn from recorded experience."""

    net: NetConfig = NetConfig()
    batch_size: Positive = 64  # transitions per update
    optimizer_eps: PositiveFloat = 1e-8  # added to the denominator of Adam and RMSProp
    normalize_obs: bool = False  # running mean and spread of observations
    dataset: str | None = None  # recorded experience to learn from instead of an environment
    offline_updates: Positive = 30_000  # budget with a dataset: updates, which all intervals of steps then count

    scheme: ClassVar[str] = "offline"
    needs_data: ClassVar[bool] = True


class OffPolicyConfig(DataConfig):
    """Settings of algorithms that learn from a replay of all that was done."""

    train_every: Positive = 1  # steps of each environment between updates
    updates_per_step: UpdatesPerStep = 1.0  # updates per environment step, on average
    learning_starts: Count = 1_000  # environment steps of random actions before the first update
    async_collect: bool = False  # act in another thread while learning, with weights one iteration old
    replay: ReplayConfig = ReplayConfig()

    scheme: ClassVar[str] = "off_policy"
    needs_data: ClassVar[bool] = False


class QLearningConfig(OffPolicyConfig):
    """Settings of algorithms that learn the values of discrete actions."""

    lr: PositiveFloat = 1e-3  # learning rate
    optimizer: Literal["adam", "rmsprop"] = "adam"  # what moves the weights
    max_grad_norm: PositiveFloat | None = 10.0  # gradients are clipped to this norm
    target_update_interval: Positive = 200  # how often the target network moves
    tau: Fraction = 1.0  # how far it moves then; 1 copies the network
    epsilon_start: Fraction = 1.0  # chance of a random action at the start
    epsilon_end: Fraction = 0.05  # and when it has fallen
    epsilon_fraction: Fraction = 0.2  # share of the budget over which it falls
    eval_epsilon: Fraction = 0.0  # chance of a random action in evaluations
    net: NetConfig = NetConfig(hidden_sizes=[128, 128], activation="relu")


class OffPolicyActorCriticConfig(OffPolicyConfig):
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
