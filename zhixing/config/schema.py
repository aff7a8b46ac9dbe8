"""Settings of every run, of each training scheme and of the parts they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, overload

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from zhixing.config.intervals import check_interval, check_positive_interval, check_train_every, parse_duration
from zhixing.config.yaml_files import parse_yaml
from zhixing.errors import unknown
from zhixing.utils import named_objects

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Threads = Annotated[int, Field(gt=0, le=1024)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Target = Annotated[str, Field(min_length=1)]
UpdatesPerStep = Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]  # with more, a run seems to hang
Auto = Literal["auto"]


def name_object(value: Any) -> Any:
    """Replace a function or class by its name."""
    return named_objects.register_object(value) if callable(value) else value


def _name_or_code(*names: str) -> AfterValidator:
    """Allow some names, and `your.module:Thing` for code."""

    def check(value: str) -> str:
        if value not in names and ":" not in value:
            raise ValueError(str(unknown("name", value, names, "(or write your.module:Thing for your own)")))
        return value

    return AfterValidator(check)


# for type checkers, the types of arguments: validation replaces code by its name, and an environment by `EnvConfig`
if TYPE_CHECKING:
    import gymnasium as gym

    Schedule = Literal["constant", "linear", "cosine"] | Any
    OptimizerName = Literal["adam", "adamw", "rmsprop", "sgd"] | Any
    NetKind = Literal["auto", "simba"] | Any

    class EnvSetting:
        """An environment is assigned in many forms, and read as `EnvConfig`."""

        @overload
        def __get__(self, cfg: None, owner: type) -> EnvSetting: ...
        @overload
        def __get__(self, cfg: object, owner: type) -> EnvConfig: ...
        def __get__(self, cfg: object, owner: type) -> EnvSetting | EnvConfig: ...
        def __set__(
            self,
            cfg: object,
            env: str | EnvConfig | Mapping[str, Any] | gym.Env[Any, Any] | Callable[..., gym.Env[Any, Any]],
        ) -> None: ...
else:
    Code = BeforeValidator(name_object)
    SCHEDULES, OPTIMIZERS = ("constant", "linear", "cosine"), ("adam", "adamw", "rmsprop", "sgd")
    Schedule = Annotated[Literal[SCHEDULES] | str, Code, _name_or_code(*SCHEDULES)]
    OptimizerName = Annotated[Literal[OPTIMIZERS] | str, Code, _name_or_code(*OPTIMIZERS)]
    NetKind = Annotated[str, Code]
Beta = Annotated[float, Field(ge=0, lt=1)]
BUILT_IN_NETS = ("auto", "simba")  # kinds of networks with settings for their layers
SHORTHANDS = {"env": "name", "net": "kind"}  # env=CartPole-v1 is short for env.name=CartPole-v1


class Group(Enum):
    """Groups of settings in `zhixing show`.

    A setting is in the group of its annotation (`Annotated[Positive, Group.NETWORK]`), otherwise in the `group` of the
    class that introduces it. The settings of a nested class are in the group of the field that holds it.
    """

    RUN = "run"
    ENVIRONMENT = "environment"
    COLLECTION = "collection"
    OPTIMIZATION = "optimization"
    NETWORK = "network"
    EVALUATION = "evaluation"
    LOGGING = "logging"


class StrictModel(BaseModel):
    """Settings without unknown names or implicit conversions, except that whole floats such as `1e6` are integers."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        validate_default=True,
        use_attribute_docstrings=True,
        ignored_types=(type,),  # so a derived class may set `collector = MyCollector`
    )

    if not TYPE_CHECKING:  # type checkers read the arguments from the fields

        def __init__(self, **settings: Any) -> None:
            """Raise `UserError` for invalid settings."""
            try:
                super().__init__(**self._complete(settings))
            except ValidationError as error:
                from zhixing.config.validation import explain

                raise explain(type(self), error) from None

        # validation of the groups in a configuration doesn't call it, so errors name the group
        __init__.__pydantic_base_init__ = True

    @classmethod
    def _complete(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings to validate, given those of the user."""
        return values

    @model_validator(mode="before")
    @classmethod
    def _convert_values(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {key: _convert(cls.model_fields.get(key), value) for key, value in values.items()}


def _convert(field: FieldInfo | None, value: Any) -> Any:
    """Convert whole floats, `none` and lists without brackets. A partial group keeps the rest of its defaults."""
    if field is None:
        return value
    if isinstance(value, Mapping) and isinstance(field.default, BaseModel):
        return {**field.default.model_dump(), **value}
    annotation = str(field.annotation)
    if isinstance(value, str) and "," in value and annotation.startswith("list["):  # 256,256 as the shell passes it
        value = parse_yaml(f"[{value}]", "a list")
    if value == "none" and "None" in annotation:  # as `zhixing show` prints it
        return None
    if "int" not in annotation or "float" in annotation:
        return value
    return [_to_int(item) for item in value] if isinstance(value, list) else _to_int(value)


def _to_int(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


class EnvConfig(StrictModel):
    """The environment: its name and its options, which depend on the environment."""

    model_config = ConfigDict(extra="allow")

    name: str
    """Environment id from `zhixing list envs`, or your.module:YourEnv; env.KEY=VALUE sets its options."""

    if TYPE_CHECKING:

        def __init__(self, *, name: str, **options: Any) -> None: ...

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


if not TYPE_CHECKING:
    EnvSetting = Annotated[EnvConfig, Group.ENVIRONMENT]
Backend = Literal["auto", "serial", "process", "mixed", "native", "envpool", "torch", "ray"]


class VectorConfig(StrictModel):
    """How the parallel environments run."""

    backend: Backend = "auto"
    """Implementation of the vector environment; auto picks the fastest by measuring."""
    workers: Positive | Auto = "auto"
    """Worker processes that share the environments, with backend=process, mixed or ray."""
    on_crash: Literal["stop", "replace"] = "stop"
    """Reaction to an environment that fails: stop the run, or replace the environment and continue."""
    step_timeout: PositiveFloat | None = None
    """Time limit in seconds of one environment step, with backend=process."""
    call_timeout: PositiveFloat | None = None
    """Time limit in seconds of any other environment call, such as reset, with backend=process."""

    @property
    def isolated(self) -> bool:
        """Whether the environments only run in worker processes, which can be killed without ending the training."""
        guarded = self.on_crash == "replace" or self.step_timeout is not None or self.call_timeout is not None
        return self.backend == "process" or (self.backend == "auto" and guarded)


class DistributedConfig(StrictModel):
    """Processes that collect and learn, on one machine or a Ray cluster."""

    workers: Count = 0
    """Ray workers that collect, each with a share of the environments; 0 collects in the main process."""
    learners: Positive = 1
    """Learner processes, each of which computes gradients on a share of every batch."""
    servers: Count = 0
    """Ray parameter servers, each of which holds a slice of the weights for the workers of a3c."""
    address: str | None = None
    """Ray cluster to join, such as 10.0.0.1:6379 or auto; none starts one on this machine."""


class NetConfig(StrictModel):
    """The network between observations and outputs."""

    kind: NetKind = "auto"
    """Network class: auto chooses by the observation's shape, simba has residual blocks, or your.module:Net."""
    hidden_sizes: list[Positive] = [64, 64]
    """Units of the fully connected layers; with kind=simba, of the residual blocks, which have one width."""
    activation: Literal["tanh", "relu", "silu", "elu", "gelu"] = "tanh"
    """Activation after each fully connected layer."""
    cnn: Literal["auto", "nature", "small", "simple"] = "auto"
    """Convolutional network for images; auto is simple below 36 pixels."""
    recurrent: Literal["none", "gru", "lstm"] = "none"
    """Recurrent layer after the fully connected layers."""
    recurrent_size: Positive = 64
    """Units of the recurrent layer."""


class RunConfig(StrictModel):
    """Settings of every run."""

    group: ClassVar[Group] = Group.RUN

    algorithm: str
    """Algorithm from `zhixing list algorithms`, or your.module:YourLearner."""
    env: EnvSetting
    preset: bool = True
    """Use the preset for the environment, if there is one; false starts from the defaults."""
    imports: Annotated[list[str], Group.ENVIRONMENT] = []
    """Packages to import first because they register environments with Gymnasium."""
    seed: Count = 0
    """Seed of all random number generators."""
    env_steps: Positive = 100_000
    """Budget in environment steps, summed over all environments."""
    episodes: Positive | None = None
    """Budget in training episodes."""
    duration: str | PositiveFloat | None = None
    """Budget in training time, such as 90s, 10m or 1h30m; a number is in seconds."""
    stop_return: Finite | None = None
    """Stop training when 100 fresh evaluation episodes average at least this return."""
    num_envs: Annotated[Positive, Group.ENVIRONMENT] = 1
    """Number of parallel environments; `zhixing train ... num_envs=auto` measures which number is fastest."""
    vector: Annotated[VectorConfig, Group.ENVIRONMENT] = VectorConfig()
    distributed: DistributedConfig = DistributedConfig()
    gamma: Annotated[Fraction, Group.OPTIMIZATION] = 0.99
    """Discount factor per step."""
    device: str = "auto"
    """Device of the networks: cpu, cuda, npu, mps, gpu (the first of these but cpu), or auto (gpu if any, else cpu)."""
    num_threads: Threads | Auto = "auto"
    """CPU threads of torch: by default 1, or all CPUs for images; num_threads=auto measures which number is fastest."""
    precision: Annotated[Literal["fp32", "bf16", "fp16"], Group.OPTIMIZATION] = "fp32"
    """Precision of matrix products in updates; weights are always fp32."""
    compile: Annotated[bool, Group.OPTIMIZATION] = False
    """Compile the update to one graph, which is faster after the first call; needs a C++ compiler."""
    init_from: str | None = None
    """Run whose weights initialize the networks."""
    trainer: str | Callable[[Any], None] | None = None
    """Function with the training loop, as your.module:your_trainer; none uses that of the algorithm."""
    collector: Annotated[str | type | None, Group.COLLECTION] = None
    """Class that collects experience, as your.module:YourCollector; none chooses a built-in one."""
    log_every: Annotated[int | str, BeforeValidator(check_positive_interval), Group.LOGGING] = 1_000
    """Environment steps between rows of metrics, or an interval such as "10 episodes", "100 updates" or "60 s"."""
    eval_every: Annotated[int | str, BeforeValidator(check_interval), Group.EVALUATION] = 5_000
    """Environment steps between evaluations, or an interval such as "10 episodes"; 0 disables them."""
    eval_episodes: Annotated[Positive, Group.EVALUATION] = 10
    """Episodes per evaluation during training."""
    eval_num_envs: Annotated[Positive | Auto, Group.EVALUATION] = "auto"
    """Number of parallel evaluation environments; auto is min(eval_episodes, max(10, num_envs))."""
    eval_max_steps: Annotated[Positive | None, Group.EVALUATION] = None
    """Maximum steps per evaluation episode; none uses the time limit, else max(5000, 2 * longest training episode)."""
    eval_env: Annotated[dict[str, Any], Group.EVALUATION] = {}
    """Environment options to change in evaluations, such as eval_env.levels=test."""
    eval_video: Annotated[bool, Group.EVALUATION] = False
    """Record one episode per evaluation to videos/STEPS.mp4 in the run folder."""
    plot: Annotated[str | None, Group.LOGGING] = None
    """Column of metrics.csv to plot to plot.png in the run folder at each evaluation."""
    checkpoint_every: Annotated[int | str, BeforeValidator(check_interval), Group.LOGGING] = 20_000
    """Environment steps between checkpoints, or an interval such as "10 m"; 0 saves only at the end."""
    keep_checkpoints: Annotated[Positive, Group.LOGGING] = 2
    """Number of newest checkpoints to keep in addition to the best."""
    tensorboard: Annotated[bool, Group.LOGGING] = True
    """Write TensorBoard event files to the run folder."""
    wandb: Annotated[Target | None, Group.LOGGING] = None
    """Project of Weights & Biases to log to, as PROJECT or ENTITY/PROJECT."""
    mlflow: Annotated[Target | None, Group.LOGGING] = None
    """MLflow tracking server or database to log to, such as http://127.0.0.1:5000 or sqlite:///mlflow.db."""

    scheme: ClassVar[str] = ""  # training scheme, such as on_policy
    needs_data: ClassVar[bool] = False  # whether training requires a dataset
    gradients_on_workers: ClassVar[bool] = False  # whether workers compute the gradients

    @classmethod
    def _complete(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the preset, and replace objects by their names."""
        from zhixing.config.loading import complete

        return complete(cls, values)

    @model_validator(mode="before")
    @classmethod
    def _expand_shorthands(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        groups = {key: {part: values[key]} for key, part in SHORTHANDS.items() if isinstance(values.get(key), str)}
        return {**values, **groups}

    @field_validator("trainer", "collector", mode="before")
    @classmethod
    def _name_code(cls, value: Any) -> Any:
        """Replace a function or class, which may be the default of a derived class, by its name."""
        if isinstance(value, str) and ":" not in value:
            raise ValueError("not a name of code; write your.module:Name, or none for the built-in one")
        return name_object(value)

    @model_validator(mode="after")
    def _check_duration(self) -> RunConfig:
        if self.duration is not None:
            parse_duration(self.duration)
        return self

    @model_validator(mode="after")
    def _import_packages(self) -> RunConfig:
        if self.imports:
            from zhixing.config.loading import import_packages

            import_packages(self.imports)
        return self


class LearnerConfig(RunConfig):
    """Settings of algorithms that train networks."""

    group: ClassVar[Group] = Group.OPTIMIZATION

    lr: PositiveFloat = 1e-3
    """Learning rate of all networks."""
    lr_schedule: Schedule = "constant"
    """Learning rate over the budget: constant, linear or cosine to zero, or your.module:function of the fraction."""
    optimizer: OptimizerName = "adam"
    """Optimizer: adam, adamw, rmsprop, sgd, or your.module:Optimizer, called with parameters and lr, as in torch."""
    optimizer_eps: PositiveFloat = 1e-8
    """Epsilon of Adam, AdamW and RMSProp, added to the denominator."""
    optimizer_betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """Decay rates of the moments of Adam and AdamW."""
    optimizer_momentum: Beta = 0.0
    """Momentum of SGD."""
    weight_decay: NonNegative = 0.0
    """Factor of the weights that is added to the gradients, or with adamw shrinks the weights directly."""

    @model_validator(mode="before")
    @classmethod
    def _normalize_for_simba(cls, values: Any) -> Any:
        """Let SimBa networks normalize observations unless a setting says otherwise."""
        net = values.get("net") if isinstance(values, Mapping) else None
        kind = net.get("kind") if isinstance(net, Mapping) else net
        if kind != "simba" or "normalize_obs" not in cls.model_fields or "normalize_obs" in values:
            return values
        return {**values, "normalize_obs": True}

    @model_validator(mode="after")
    def _check_optimizer(self) -> LearnerConfig:
        users = {"optimizer_betas": ("adam", "adamw"), "optimizer_momentum": ("sgd",)}
        users["weight_decay"] = ("adam", "adamw", "rmsprop", "sgd")
        for name, optimizers in users.items():
            value = getattr(self, name)
            if self.optimizer not in optimizers and value != type(self).model_fields[name].default:
                hint = "; pass it in your class or function" if ":" in self.optimizer else ""
                raise ValueError(
                    f"{name}={value} is for optimizer={' or '.join(optimizers)}, not for {self.optimizer}: leave it "
                    f"out{hint}"
                )
        return self


class EntropyBonusConfig(StrictModel):
    """Settings of algorithms with an entropy bonus."""

    group: ClassVar[Group] = Group.OPTIMIZATION

    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    entropy_coef_schedule: Schedule = "constant"
    """Entropy bonus over the budget: constant, linear or cosine to zero, or your.module:function of the fraction."""


class ClipRangeConfig(StrictModel):
    """Settings of algorithms with PPO's clipped objective."""

    group: ClassVar[Group] = Group.OPTIMIZATION

    clip_range: PositiveFloat = 0.2
    """Clip range of the probability ratio."""
    clip_range_schedule: Schedule = "constant"
    """Clip range over the budget: constant, linear or cosine to zero, or your.module:function of the fraction."""


class EpsilonGreedyConfig(LearnerConfig):
    """Settings of algorithms that explore with random actions, less and less often."""

    epsilon_start: Annotated[Fraction, Group.COLLECTION] = 1.0
    """Initial exploration rate, the probability of a random action."""
    epsilon_end: Annotated[Fraction, Group.COLLECTION] = 0.05
    """Final exploration rate, the probability of a random action."""
    epsilon_fraction: Annotated[Fraction, Group.COLLECTION] = 0.2
    """Fraction of the budget over which the exploration rate falls."""
    eval_epsilon: Annotated[Fraction, Group.EVALUATION] = 0.0
    """Probability of a random action in evaluations."""


class MultiAgentConfig(LearnerConfig):
    """Settings of algorithms whose agents have networks with the same structure."""

    share_weights: Annotated[bool, Group.NETWORK] = True
    """Share one network between all agents, which receive their index as an input."""
    last_action: Annotated[bool, Group.NETWORK] = False
    """Add each agent's last action to its observation."""


class OnPolicyConfig(LearnerConfig):
    """Settings of algorithms that learn from rollouts of the current policy."""

    rollout_steps: Annotated[Positive, Group.COLLECTION] = 128
    """Steps per environment between updates."""
    max_grad_norm: PositiveFloat | None = 0.5
    """Maximum norm of the gradients; none disables clipping."""
    net: Annotated[NetConfig, Group.NETWORK] = NetConfig()

    scheme: ClassVar[str] = "on_policy"


class AsynchronousConfig(OnPolicyConfig):
    """Settings of algorithms that update as soon as any actor is ready, with rollouts of slightly older weights."""

    actors: Annotated[Positive, Group.COLLECTION] = 2
    """Actors that alternate in the main process; ignored with distributed.workers."""

    scheme: ClassVar[str] = "asynchronous"


class SearchConfig(RunConfig):
    """Settings of algorithms that plan by tree search."""

    group: ClassVar[Group] = Group.COLLECTION

    simulations: Positive = 100
    """Simulations per search, which precedes every move."""
    c: PositiveFloat = 1.4
    """Exploration constant of the tree search."""
    rollout_steps: Positive = 1
    """Steps per environment between checks of the budget."""
    opponent: Annotated[str | None, Group.EVALUATION] = None
    """Opponent of evaluation games, as in `zhixing eval --against`; none plays against random."""

    scheme: ClassVar[str] = "play"


class SelfPlayConfig(SearchConfig, LearnerConfig):
    """Settings of algorithms that learn from games against themselves."""

    batch_size: Annotated[Positive, Group.OPTIMIZATION] = 256
    """Positions per update."""
    capacity: Positive = 100_000
    """Capacity of the replay buffer in positions."""
    rollout_steps: Positive = 8
    """Moves per game between updates."""
    updates_per_step: Annotated[UpdatesPerStep, Group.OPTIMIZATION] = 0.02
    """Average number of updates per move."""

    scheme: ClassVar[str] = "self_play"


class ReplayConfig(StrictModel):
    """The replay buffer."""

    capacity: Positive = 100_000
    """Capacity of the replay buffer in transitions."""
    n_step: Positive = 1
    """Number of rewards summed before bootstrapping."""
    prioritized: bool = False
    """Sample transitions in proportion to their last TD error instead of uniformly."""
    alpha: Fraction = 0.6
    """Exponent of the priorities in prioritized replay; 0 samples uniformly."""
    beta_start: Fraction = 0.4
    """Initial importance-sampling exponent of prioritized replay, which grows to 1."""
    sequence_length: Positive = 20
    """Training steps per sampled sequence, for recurrent networks."""
    burn_in: Count = 5
    """Steps before each sampled sequence that only warm up the hidden state, for recurrent networks."""
    her: bool = False
    """Hindsight experience replay: relabel transitions with goals that were reached later."""
    her_ratio: Fraction = 0.8
    """Fraction of the sampled transitions that get a hindsight goal."""
    on_device: bool = False
    """Store the replay buffer on the learner's device."""
    on_disk: bool = False
    """Store the replay buffer in memory-mapped files in the run folder."""
    start: str | None = None
    """Dataset that fills the replay buffer before training."""


class DataConfig(LearnerConfig):
    """Settings of algorithms that can learn from a dataset."""

    net: Annotated[NetConfig, Group.NETWORK] = NetConfig()
    batch_size: Positive = 64
    """Transitions per update."""
    normalize_obs: bool = False
    """Normalize observations by their running mean and standard deviation; the default is true with net.kind=simba."""
    dataset: Annotated[str | None, Group.COLLECTION] = None
    """Dataset to learn from instead of an environment."""
    offline_updates: Annotated[Positive, Group.RUN] = 30_000
    """Budget in updates when training on a dataset; intervals in steps then count updates."""

    scheme: ClassVar[str] = "offline"
    needs_data: ClassVar[bool] = True


class OffPolicyConfig(DataConfig):
    """Settings of algorithms that learn from a replay buffer."""

    train_every: Annotated[int | str, BeforeValidator(check_train_every), Group.COLLECTION] = 1
    """Steps per environment between updates, or a number of episodes, such as "1 episode"."""
    updates_per_step: UpdatesPerStep = 1.0
    """Average number of updates per environment step."""
    learning_starts: Annotated[Count, Group.COLLECTION] = 1_000
    """Environment steps with random actions before the first update."""
    async_collect: Annotated[bool, Group.COLLECTION] = False
    """Collect in a second thread while updating, with the weights from the start of the iteration."""
    replay: Annotated[ReplayConfig, Group.COLLECTION] = ReplayConfig()

    scheme: ClassVar[str] = "off_policy"
    needs_data: ClassVar[bool] = False


class QLearningConfig(OffPolicyConfig, EpsilonGreedyConfig):
    """Settings of algorithms that learn Q-values of discrete actions."""

    max_grad_norm: PositiveFloat | None = 10.0
    """Maximum norm of the gradients; none disables clipping."""
    target_update_interval: Positive = 200
    """Updates between changes of the target network."""
    tau: Fraction = 1.0
    """Polyak coefficient of the target network; 1 copies the weights."""
    net: NetConfig = NetConfig(hidden_sizes=[128, 128], activation="relu")


class OffPolicyActorCriticConfig(OffPolicyConfig):
    """Settings of algorithms that train an actor and critics from a replay buffer."""

    actor_lr: PositiveFloat | None = None
    """Learning rate of the actor; none uses lr."""
    tau: Fraction = 0.005
    """Polyak coefficient of the target networks."""
    batch_size: Positive = 256
    critic_hidden_sizes: Annotated[list[Positive] | None, Group.NETWORK] = None
    """Units of the critics' fully connected layers or residual blocks; none uses net.hidden_sizes."""
    critic_norm: Annotated[bool, Group.NETWORK] = False
    """Apply layer normalization before each activation of the critics; net.kind=simba always has it."""
    net: NetConfig = NetConfig(hidden_sizes=[256, 256], activation="relu")
