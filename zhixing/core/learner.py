"""Learners: networks, losses and optimizers of an algorithm. They never step an environment, print or write a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from zhixing.config import RunConfig
from zhixing.core.batch import Batch
from zhixing.core.optimizer import Optimizer
from zhixing.core.policy import Policy
from zhixing.core.seeding import derive_seed
from zhixing.core.spaces import Spaces
from zhixing.core.state import read_count
from zhixing.core.tree import Tree
from zhixing.errors import UserError

if TYPE_CHECKING:
    from zhixing.compile import Graphs
    from zhixing.distributed.learner_group import LearnerGroup
    from zhixing.search import SelfPlay


LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Gradients(NamedTuple):
    """What `gradients(batch)` found: one gradient per optimizer, by name, and what there is to tell."""

    by_optimizer: dict[str, list[Tensor]]
    metrics: dict[str, Tensor]
    priority: Tensor | None = None

    def to(self, device: torch.device) -> Gradients:
        found = {name: [part.to(device) for part in parts] for name, parts in self.by_optimizer.items()}
        return Gradients(found, {name: value.to(device) for name, value in self.metrics.items()}, self.priority)


class Update(NamedTuple):
    metrics: Mapping[str, Tensor]
    priority: Tensor | None = None


class LazyMetrics(Mapping[str, Tensor]):
    """Numbers of an update, by name, that came as one vector. It is taken apart when somebody asks, which few do."""

    def __init__(self, names: tuple[str, ...], numbers: Tensor) -> None:
        self._names, self._numbers = names, numbers
        self._parts: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if not self._parts:
            self._parts = dict(zip(self._names, self._numbers.unbind(), strict=True))
        return self._parts[name]

    def floats(self) -> list[float]:
        return self._numbers.tolist()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Learner(ABC):
    """An algorithm. `metrics` names what every update tells; `policy` is what acts with its weights."""

    settings: ClassVar[type[RunConfig]]
    metrics: ClassVar[tuple[str, ...]]
    many_agents: ClassVar[bool | None] = False  # for tasks of several agents, and only for these; None: for any
    shard_dim: ClassVar[int] = 0  # along which several learners share a batch that `descend` gets
    gradients_on_workers = False  # workers take the gradients of their own rollouts: `rollout_gradients`
    policy: Policy

    def __init__(self, cfg: RunConfig, spaces: Spaces, device: torch.device | str = "cpu") -> None:
        if self.many_agents is not None and self.many_agents != bool(spaces.agents):
            kinds = ("one agent", "ppo and dqn"), ("many agents", "mappo and qmix")
            mine, other = kinds[self.many_agents][0], kinds[not self.many_agents]
            raise UserError(f"{cfg.algorithm} is for tasks of {mine}; for {other[0]} there are {other[1]}, for example")
        self.spaces, self.device = spaces, torch.device(device)
        # draws everything random in updates: order of minibatches, noise
        self.rng = torch.Generator(self.device).manual_seed(derive_seed(cfg.seed, "learner"))
        self._init_seed = derive_seed(cfg.seed, "networks")
        self.updates = 0
        self._made: list[Optimizer] = []
        self._optimizer_eps: float = getattr(cfg, "optimizer_eps", 1e-8)  # algorithms that only play have none
        self.low: torch.dtype | None = LOW.get(cfg.precision)  # type of matrix products, if not that of the weights
        if self.low is not None and cfg.scheme == "play":
            raise UserError(f"precision={cfg.precision} is for updates, and {cfg.algorithm} makes none: set fp32")
        self.partners: LearnerGroup | None = None  # other learners, who take the gradients of their shares
        self.graphs: Graphs | None = None  # compiled updates: with compile=true, `Algorithm.make` attaches them
        self._needs_graphs = cfg.compile

    @contextmanager
    def building(self) -> Iterator[None]:
        """Networks made inside get first weights that depend on the seed only; torch's global state isn't touched."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._init_seed)
            yield

    @property
    def fields(self) -> dict[str, Tree]:
        """What a step must hold besides the base fields: names to trees of `Field`."""
        return {}

    @property
    def reads(self) -> Literal["transitions", "sequences", "episodes"]:
        """What a sample of the replay shows: `sequences` are for networks with memory."""
        return "transitions"

    @abstractmethod
    def gradients(self, batch: Batch) -> Gradients:
        """Losses of one (mini)batch and their gradients; changes nothing."""

    def apply(self, gradients: Gradients) -> Update:
        """Move the weights along gradients, wherever they were computed."""
        norms = [getattr(self, name).step(gradient) for name, gradient in gradients.by_optimizer.items()]
        self.updates += 1
        self.after_step()
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        return Update({**gradients.metrics, "grad_norm": norm}, gradients.priority)

    def descend(self, find: Callable[..., Gradients], batch: Batch, **parts: Any) -> Update:
        """Find gradients of a (mini)batch and move the weights along them; with compile=true as one compiled graph, and
        where there are several learners, together with them."""
        if self.graphs is not None:
            return self.graphs.step(find, batch, **parts)
        if self._needs_graphs:
            raise UserError(
                f"compile=true, but this {type(self).__name__} has no compiled updates: make it with "
                f"zx.algorithms.get(name).make(cfg, spaces), or set compile=false"
            )
        if self.partners is not None:
            return self.partners.step(find, batch, **parts)
        return self.apply(self.found(find, batch, **parts))

    def found(self, find: Callable[..., Gradients], batch: Batch, **parts: Any) -> Gradients:
        """What `find` finds, in the precision that is asked for."""
        if self.low is None:
            return find(batch, **parts)
        with torch.autocast(self.device.type, self.low):
            return find(batch, **parts)

    def after_step(self) -> None:  # noqa: B027  # most algorithms have no target network
        """What follows each step of the optimizers: target networks."""

    def observe(self, batch: Batch) -> None:
        """Take what was collected into the running statistics of observations, wherever a network keeps them."""
        for part in vars(self).values():
            if hasattr(part, "update_norm"):
                part.update_norm(batch.obs)

    def show(self, demonstrations: Batch) -> None:
        """Recorded steps `[B]` of an expert, told once before learning to those who learn from one beside their own."""
        raise UserError(f"{type(self).__name__} takes no demonstrations")

    def ask(self, expert: Policy) -> None:
        """Somebody whom the policy may ask what to do, told once before learning to those who learn from one."""
        raise UserError(f"{type(self).__name__} asks no expert")

    def self_play(self) -> SelfPlay:
        """The games against itself from which an algorithm learns that does so."""
        raise UserError(f"{type(self).__name__} plays no games against itself")

    def update(self, batch: Batch) -> Update:
        """Learn from a rollout, or from a sample of the replay buffer."""
        return self.descend(self.gradients, batch)

    def rollout_gradients(self, batch: Batch) -> Gradients:
        """Of a whole rollout `[T,N]`, to be applied elsewhere, for those that `gradients_on_workers`."""
        raise UserError(f"{type(self).__name__} learns in one place")

    def priority(self, batch: Batch) -> Tensor | None:
        """How wrong it is about transitions `[B]`, before it learns from them; None for those that can't tell."""
        return None

    def networks(self) -> dict[str, nn.Module]:
        """All of them by name; the policy is made of these."""
        return {name: part for name, part in vars(self).items() if isinstance(part, nn.Module) and name != "policy"}

    def set_progress(self, fraction: float) -> None:  # noqa: B027  # only for algorithms with schedules
        """Told before each iteration how much of the budget is used, for schedules."""

    def make_optimizer(self, parameters: Iterable[nn.Parameter], lr: float, **settings: Any) -> Optimizer:
        settings = {"epsilon": self._optimizer_eps, **settings}
        made = Optimizer(parameters, lr, scaled=self.low is torch.float16, **settings)
        self._made.append(made)
        return made

    def optimizers(self) -> dict[str, Optimizer]:
        """All of them by name."""
        return {name: part for name, part in vars(self).items() if isinstance(part, Optimizer)}

    def value(self, obs: Tree) -> Tensor | None:
        """The estimated value of observations `[B,...]` under the policy; None for algorithms without an estimate."""
        return None

    def skipped_steps(self) -> int:
        """How many steps were left out since a gradient wasn't finite. Waits for the device."""
        return int(sum(float(optimizer.skipped) for optimizer in self._made))

    @property
    def failed(self) -> bool:
        """Whether a step was left out. Waits for nothing: elsewhere than on the CPU only `skipped_steps` knows."""
        return any(optimizer.broken for optimizer in self._made)

    def broken(self) -> list[str]:
        """The names of the weights whose gradients weren't finite, in the first step that was left out."""
        names: dict[int, str] = {}
        for part, module in vars(self).items():
            if isinstance(module, nn.Module):
                names = {id(p): f"{part}.{name}" for name, p in module.named_parameters()} | names
        return [names[id(p)] for optimizer in self.optimizers().values() for p in optimizer.broken if id(p) in names]

    def weights(self) -> dict[str, Tensor]:
        """What a policy elsewhere needs to act as this one."""
        return self.policy.state_dict()

    def load_networks(self, state: dict[str, Any]) -> None:
        """Take over the networks of another learner's state, not its optimizers and counters."""
        for name, part in vars(self).items():
            if isinstance(part, nn.Module) and name in state["parts"]:
                part.load_state_dict(state["parts"][name])

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on: all networks, optimizers and tensors among the attributes."""
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
