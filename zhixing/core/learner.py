"""Learners: the networks, losses and optimizers of algorithms. They never step an environment or write files."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from zhixing.config import LearnerConfig, RunConfig
from zhixing.core.batch import Batch
from zhixing.core.optimizer import Optimizer
from zhixing.core.policy import Policy
from zhixing.core.schedule import Coefficient, Schedule, make_schedule
from zhixing.core.seeding import derive_seed
from zhixing.core.spaces import Spaces
from zhixing.core.state import read_count
from zhixing.core.tree import Tree
from zhixing.errors import UserError

if TYPE_CHECKING:
    from zhixing.search import SelfPlay


AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Update(NamedTuple):
    """Result of an update: metrics to log and, if the learner computes them, new priorities `[B]` of the samples."""

    metrics: Mapping[str, Tensor]
    priority: Tensor | None = None


class LazyMetrics(Mapping[str, Tensor]):
    """Metrics of one update, stored as a vector and unpacked lazily."""

    def __init__(self, names: tuple[str, ...], values: Tensor) -> None:
        self._names, self._values = names, values
        self._unpacked: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if not self._unpacked:
            self._unpacked = dict(zip(self._names, self._values.unbind(), strict=True))
        return self._unpacked[name]

    def floats(self) -> list[float]:
        return self._values.tolist()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def mean_metrics(updates: list[Update]) -> dict[str, Tensor]:
    """Return the mean of each metric over updates that report the same ones."""
    metrics = [update.metrics for update in updates]
    return {name: torch.stack([one[name] for one in metrics]).mean() for name in metrics[0]}


StepMethod = Callable[..., Update]  # (learner, batch, **options): the body of a train step
Step = TypeVar("Step", bound=StepMethod)


class Executor(Protocol):
    """Runs the train steps of a learner in another way than eagerly: compiled, or with several learners."""

    def run_step(self, method: StepMethod, batch: Batch, options: dict[str, Any]) -> Update: ...

    def close(self) -> None: ...


def train_step(method: Step) -> Step:
    """Mark the method of a learner that makes one update from one (mini)batch.

    It counts in `learner.updates` before it starts. It runs under autocast with `precision`, as one compiled graph with
    `compile=true`, and on a shard of the batch in each of several learners, whose gradients `Optimizer.step` averages.
    """

    @functools.wraps(method)
    def step(self: Learner, batch: Batch, **options: Any) -> Update:
        if self.executor is not None:
            return self.executor.run_step(method, batch, options)
        if self._needs_executor:
            raise UserError(
                f"compile=true, but this {type(self).__name__} has no compiled updates: make it with "
                f"zx.algorithms.get(name).make(cfg, spaces), or set compile=false"
            )
        return self.run_step(method, batch, options)

    return cast(Step, step)


class Learner(ABC):
    """An algorithm. `policy` acts with its weights; `metrics` are the names of the metrics of every update."""

    settings: ClassVar[type[RunConfig]]
    metrics: ClassVar[tuple[str, ...]]
    multi_agent: ClassVar[bool | None] = False  # True: only for several agents; False: only for one; None: for both
    mixed_agents: ClassVar[bool] = False  # whether agents may have different kinds of spaces
    shard_dim: ClassVar[int] = 0  # dimension along which several learners split the batch of a train step
    policy: Policy

    def __init__(self, cfg: RunConfig, spaces: Spaces, device: torch.device | str = "cpu") -> None:
        if self.multi_agent is not None and self.multi_agent != bool(spaces.agents):
            wanted, given = ("several agents", "one") if self.multi_agent else ("one agent", "several")
            examples = "ppo or dqn" if self.multi_agent else "mappo or qmix"
            raise UserError(f"{cfg.algorithm} needs an environment with {wanted}, this one has {given}: use {examples}")
        if spaces.agent_spaces and not self.mixed_agents:
            kinds = ", ".join(dict.fromkeys(f"{obs} and {action}" for obs, action in spaces.agent_spaces))
            raise UserError(
                f"{cfg.algorithm} needs agents whose spaces can be padded to equal ones, these have {kinds}: use "
                f"multi_policy with a policy for each kind"
            )
        self.spaces, self.device = spaces, torch.device(device)
        # for the order of minibatches and the noise of losses
        self.rng = torch.Generator(self.device).manual_seed(derive_seed(cfg.seed, "learner"))
        self._init_seed = derive_seed(cfg.seed, "networks")
        self.updates = 0
        self._optimizers: list[Optimizer] = []
        self._optimizer_settings = _optimizer_settings(cfg) if isinstance(cfg, LearnerConfig) else {}
        self._coefficient_schedules: dict[str, tuple[float, Schedule]] = {}  # with the initial values
        self.amp_dtype: torch.dtype | None = AMP_DTYPES.get(cfg.precision)
        if self.amp_dtype is not None and cfg.scheme == "play":
            raise UserError(f"precision={cfg.precision} is for updates, and {cfg.algorithm} makes none: set fp32")
        self.executor: Executor | None = None  # runs train steps in place of `run_step`
        self._needs_executor = cfg.compile

    # --- for algorithms: construction ---

    @contextmanager
    def seeded_init(self) -> Iterator[None]:
        """Initialize the networks built inside from the run's seed, without touching torch's global generator."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._init_seed)
            yield

    def make_optimizer(self, parameters: Iterable[nn.Parameter], lr: float, **settings: Any) -> Optimizer:
        """Return an optimizer with the run's settings, such as `weight_decay`, or `settings` in place of them."""
        settings = {**self._optimizer_settings, **settings}
        optimizer = Optimizer(parameters, lr, loss_scaling=self.amp_dtype is torch.float16, **settings)
        self._optimizers.append(optimizer)
        return optimizer

    def make_coefficient(self, name: str, value: float, schedule: str) -> Coefficient:
        """Return the coefficient for the attribute `name`, which `set_progress` changes if there is a schedule."""
        factor = make_schedule(f"{name}_schedule", schedule)
        if factor is None:
            return value
        self._coefficient_schedules[name] = value, factor
        return torch.tensor(value * factor(0.0), device=self.device)

    # --- for trainers ---

    @property
    def extra_fields(self) -> dict[str, Tree]:
        """Fields to store with every step in addition to the base fields: names to trees of `Field`."""
        return {}

    @property
    def sample_type(self) -> Literal["transitions", "sequences", "episodes"]:
        """Kind of samples that `update` takes from a replay buffer. Recurrent networks need sequences or episodes."""
        return "transitions"

    @abstractmethod
    def update(self, batch: Batch) -> Update:
        """Update the networks from a rollout or a sample of the replay buffer."""

    def run_step(self, method: StepMethod, batch: Batch, options: dict[str, Any]) -> Update:
        """Run a train step eagerly, in the configured precision."""
        self.updates += 1
        if self.amp_dtype is None:
            update = method(self, batch, **options)
        else:
            with torch.autocast(self.device.type, self.amp_dtype):
                update = method(self, batch, **options)
        return Update({name: value.detach() for name, value in update.metrics.items()}, update.priority)

    def set_progress(self, fraction: float) -> None:
        """Set schedules to the used fraction of the training budget. Called before each iteration."""
        for optimizer in self._optimizers:
            optimizer.set_progress(fraction)
        for name, (value, factor) in self._coefficient_schedules.items():
            getattr(self, name).fill_(value * factor(fraction))

    def update_normalizers(self, batch: Batch) -> None:
        """Update the running statistics of observations in all networks that normalize."""
        for part in vars(self).values():
            if hasattr(part, "update_norm"):
                part.update_norm(batch.obs)

    def priority(self, batch: Batch) -> Tensor | None:
        """Return the initial priorities of new transitions `[B]`, or None if the learner can't compute them."""
        return None

    def value(self, obs: Tree) -> Tensor | None:
        """Return the estimated value of observations `[B,...]`, or None for algorithms without an estimate."""
        return None

    # --- skipped steps ---

    def skipped_steps(self) -> int:
        """Return the number of steps skipped because of gradients that weren't finite. Waits for the device."""
        return int(sum(float(optimizer.skipped) for optimizer in self._optimizers))

    @property
    def has_nonfinite_step(self) -> bool:
        """Whether a step was skipped, without waiting: on devices other than the CPU use `skipped_steps`."""
        return any(optimizer.nonfinite_parameters for optimizer in self._optimizers)

    def nonfinite_parameters(self) -> list[str]:
        """Return the names of the parameters whose gradients weren't finite in the first skipped step."""
        names = {id(p): f"{part}.{name}" for part, net in self.networks().items() for name, p in net.named_parameters()}
        skipped = [p for optimizer in self._optimizers for p in optimizer.nonfinite_parameters]
        return [names[id(p)] for p in skipped if id(p) in names]

    # --- state ---

    def networks(self) -> dict[str, nn.Module]:
        """Return all networks by name. The policy is made of these."""
        return {name: part for name, part in vars(self).items() if isinstance(part, nn.Module) and name != "policy"}

    def optimizers(self) -> dict[str, Optimizer]:
        """Return all optimizers by name."""
        return {name: part for name, part in vars(self).items() if isinstance(part, Optimizer)}

    def load_networks(self, state: dict[str, Any]) -> None:
        """Load the networks of another learner's state, not its optimizers and counters."""
        for name, part in vars(self).items():
            if isinstance(part, nn.Module) and name in state["parts"]:
                part.load_state_dict(state["parts"][name])

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next update depends on: networks, optimizers and tensors among the attributes."""
        parts = {name: part.state_dict() for name, part in vars(self).items() if isinstance(part, _STATEFUL)}
        tensors = {name: part.clone() for name, part in vars(self).items() if isinstance(part, Tensor)}
        return {"parts": parts, "tensors": tensors, "updates": self.updates, "rng": self.rng.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in list(vars(self).items()):
            if isinstance(part, _STATEFUL):
                part.load_state_dict(state["parts"][name])
            elif isinstance(part, Tensor):
                setattr(self, name, state["tensors"][name].to(self.device))
        self.updates = read_count("the learner", state, "updates")
        self.rng.set_state(state["rng"])


_STATEFUL = (nn.Module, Optimizer)


def _optimizer_settings(cfg: LearnerConfig) -> dict[str, Any]:
    """Return the arguments that all optimizers of a learner share."""
    beta1, beta2 = cfg.optimizer_betas
    settings = {"kind": cfg.optimizer, "schedule": cfg.lr_schedule, "epsilon": cfg.optimizer_eps}
    return {
        **settings,
        "betas": (beta1, beta2),
        "momentum": cfg.optimizer_momentum,
        "weight_decay": cfg.weight_decay,
    }


# --- mixins: what some algorithms need in addition to an environment ---


class LearnsFromDemonstrations(ABC):
    """A learner that needs recorded steps of an expert."""

    @abstractmethod
    def set_demonstrations(self, demonstrations: Batch) -> None:
        """Set the recorded steps `[B]` of an expert. Called once before training."""


class LearnsFromExpert(ABC):
    """A learner that queries an expert policy."""

    @abstractmethod
    def set_expert(self, expert: Policy) -> None:
        """Set the expert policy to query. Called once before training."""


class LearnsFromSelfPlay(ABC):
    """A learner that collects games against itself."""

    @abstractmethod
    def self_play(self) -> SelfPlay:
        """Return the collector that plays games against itself."""


class Gradients(NamedTuple):
    """Gradients of a rollout, computed by a worker, and metrics."""

    tensors: list[Tensor]  # as `Optimizer.compute_gradients` returns them
    metrics: dict[str, Tensor]

    def to(self, device: torch.device) -> Gradients:
        return Gradients([t.to(device) for t in self.tensors], {k: v.to(device) for k, v in self.metrics.items()})

    @property
    def finite(self) -> bool:
        return all(bool(tensor.isfinite().all()) for tensor in self.tensors)


class LearnsOnWorkers(ABC):
    """A learner whose workers compute gradients; the gradients are applied in one place."""

    optimizer: Optimizer

    @abstractmethod
    def compute_gradients(self, rollout: Batch) -> Gradients:
        """Return the gradients of a rollout `[T,N]`, copied, without changing the weights."""

    @abstractmethod
    def apply_gradients(self, gradients: Gradients) -> Update:
        """Move the weights along gradients that a worker computed."""
