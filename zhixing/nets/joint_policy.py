"""A policy for all agents of an environment that consists of several policies, each of which acts for some agents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zhixing.core.batch import Batch
from zhixing.core.flat_space import FlatSpace
from zhixing.core.policy import Decision, Phase, Policy, as_tensor
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_leaves, tree_map
from zhixing.errors import UserError, unknown

Array = np.ndarray[Any, Any]
DECISIONS = "decisions"  # the field with what learners store of their policies' decisions, by policy
AGENT_FIELDS = ("obs", "next_obs", "action", "reward", "mask", "next_mask", "alive", "next_alive")
END_OF_TRAINING = 2**62  # as `env_steps`, for schedules of policies that don't learn


@dataclass(frozen=True)
class Seating:
    """The agents of each policy. With `rotate`, environment i shifts them by i."""

    agents: Mapping[str, Sequence[int]]
    num_agents: int
    rotate: bool = False

    def index(self, policy: str, num_envs: int) -> tuple[Array, Array]:
        """Return the index `([N,1], [N,k])` of the k agents of a policy in arrays `[N,A,...]`."""
        rows = np.arange(num_envs)[:, None]
        agents = np.array(self.agents[policy])[None]
        return rows, (agents + rows) % self.num_agents if self.rotate else np.repeat(agents, num_envs, 0)


class RandomPolicy(Policy):
    """Choose uniformly among the valid actions."""

    def act(
        self, obs: Tree, hidden: Tree, mask: Tensor | None, phase: Phase, rng: torch.Generator, env_steps: int
    ) -> Decision:
        return Decision(self.random_action(len(tree_leaves(obs)[0]), mask, rng))


class MemberSpaces:
    """Converts between the vectors of an environment whose agents have different kinds of spaces and a policy's own."""

    def __init__(self, spaces: Spaces) -> None:
        self.spaces, self.obs, self.action = spaces, FlatSpace(spaces.obs), FlatSpace(spaces.action)

    def read_obs(self, vectors: Tensor) -> Tree:
        return as_tensor(self.obs.unflatten(vectors.cpu().numpy()), vectors.device)

    def read_mask(self, mask: Tensor | None) -> Tensor | None:
        return None if mask is None or self.spaces.mask is None else mask[..., : self.spaces.mask]

    def write_action(self, action: Tensor, size: int) -> Tensor:
        """Return actions as vectors of `size` floats in the environment's range."""
        vectors = torch.as_tensor(self.action.flatten(self.spaces.to_env(action.cpu().numpy())), device=action.device)
        return nn.functional.pad(vectors, (0, size - vectors.shape[-1]))

    def read_fields(self, fields: dict[str, Tree]) -> dict[str, Tree]:
        """Convert the fields of a batch."""
        for name in ("obs", "next_obs"):
            if name in fields:
                fields[name] = lambda read=fields[name]: self.obs.unflatten(read())
        action = self.spaces.from_env(self.action.unflatten(fields["action"]()))
        for name in ("mask", "next_mask"):
            if name in fields and self.spaces.mask is None:
                del fields[name]
            elif name in fields:
                fields[name] = lambda read=fields[name]: read()[..., : self.spaces.mask]
        return fields | {"action": action}


class JointPolicy(Policy):
    """Acts with several policies. `seating` and `eval_seating` are the agents of each in training and in evaluations.

    A policy for a single agent acts for each of its agents separately: `[N,A,...]` becomes `[N*k,...]`. A policy for a
    team gets `[N,k,...]`; if it is a policy for all agents, it gets `[N,A,...]` and acts for its own. Policies that
    don't learn act as at the end of their training, in evaluations too.
    """

    def __init__(
        self, spaces: Spaces, policies: Mapping[str, Policy], seating: Seating, eval_seating: Seating | None = None
    ) -> None:
        super().__init__(spaces)
        self.policies = nn.ModuleDict(policies)
        self.seating, self.eval_seating = seating, eval_seating or seating
        mixed = policies.items() if spaces.agent_spaces else ()
        self.members = {name: MemberSpaces(policy.spaces) for name, policy in mixed}
        self.learning: dict[str, int] = {}  # policies that learn, and the environment step at which they begin
        self.fields: dict[str, Sequence[str]] = {}  # by policy: what to store of its decisions

    def seats(self, phase: Phase) -> Seating:
        return self.eval_seating if phase is Phase.EVAL else self.seating

    def initial_hidden(self, num: int) -> Tree:
        """Return the hidden states by policy: `[N,A,...]`, or `[N,...]` of a team."""
        hidden: dict[str, Tree] = {}
        for name, policy in self._items():
            if policy.spaces.agents:
                state = policy.initial_hidden(num)
            else:
                state = policy.initial_hidden(num * self.spaces.num_agents)
                if state is not None:
                    state = tree_map(lambda leaf: leaf.reshape(num, -1, *leaf.shape[1:]), state)
            if state is not None:
                hidden[name] = state
        return hidden or None

    def act(
        self, obs: Tree, hidden: Tree, mask: Tensor | None, phase: Phase, rng: torch.Generator, env_steps: int
    ) -> Decision:
        num, seating = len(tree_leaves(obs)[0]), self.seats(phase)
        action: Tensor | None = None
        next_hidden: dict[str, Tree] = dict(hidden or {})
        stored: dict[str, Any] = {}
        for name, policy in self._items():
            if name not in seating.agents:
                continue
            index = tuple(torch.from_numpy(part).to(rng.device) for part in seating.index(name, num))
            is_team = bool(policy.spaces.agents)
            observes_all = is_team and policy.spaces.num_agents > len(seating.agents[name])

            def take(leaf: Tensor, index: Any = index, is_team: bool = is_team, all_: bool = observes_all) -> Tensor:
                return leaf if all_ else leaf[index] if is_team else leaf[index].flatten(0, 1)

            before = next_hidden.get(name)
            if before is not None and not is_team:
                before = tree_map(take, before)
            own_obs, own_mask = tree_map(take, obs), None if mask is None else take(mask)
            member = self.members.get(name)
            if member is not None:
                own_obs, own_mask = member.read_obs(own_obs), member.read_mask(own_mask)
            own_phase, steps = self._phase(name, phase, env_steps)
            decision = policy.act(own_obs, before, own_mask, own_phase, rng, steps)
            chosen = decision.action
            if member is not None:
                chosen = member.write_action(chosen, self.spaces.num_actions)
            if action is None:
                action = chosen.new_zeros(num, self.spaces.num_agents, *chosen.shape[2 if is_team else 1 :])
            action[index] = chosen[index] if observes_all else _per_agent(chosen, index, is_team)
            if decision.hidden is not None:
                next_hidden[name] = decision.hidden if is_team else _put(next_hidden[name], index, decision.hidden)
            if phase is not Phase.EVAL and self.fields.get(name):
                stored[name] = {
                    key: tree_map(lambda leaf, i=index, t=is_team: _per_agent(leaf, i, t), decision.field(key, before))
                    for key in self.fields[name]
                }
        assert action is not None
        return Decision(action, hidden=next_hidden or None, extras={DECISIONS: stored})

    def _phase(self, name: str, phase: Phase, env_steps: int) -> tuple[Phase, int]:
        """Return the phase of a policy and the steps for its schedules."""
        if name not in self.learning:
            return Phase.COLLECT, END_OF_TRAINING
        begins_later = phase is Phase.COLLECT and env_steps < self.learning[name]
        return Phase.RANDOM if begins_later else phase, env_steps

    def _items(self) -> list[tuple[str, Policy]]:
        return list(self.policies.items())  # type: ignore[arg-type]

    # --- returns of episodes ---

    def summarize_returns(self, returns: Array, env: int, phase: Phase) -> tuple[float, dict[str, float]]:
        """Return the mean return of the agents with learning policies, and each policy's mean return as `NAME/return`.

        In a game of a learning policy against another one, the numbers include `won`, `drawn` and `lost`.
        """
        seating = self.seats(phase)
        shift = env if seating.rotate else 0
        own = {
            name: returns[(np.array(agents) + shift) % len(returns)].tolist() for name, agents in seating.agents.items()
        }
        means = {name: float(np.mean(values)) for name, values in own.items()}
        learned = [value for name in own if name in self.learning for value in own[name]]
        numbers = {f"{name}/return": mean for name, mean in means.items()}
        if self._is_duel(seating):
            me = next(name for name in means if name in self.learning)
            margin = means[me] - next(mean for name, mean in means.items() if name != me)
            numbers |= {"won": float(margin > 0), "drawn": float(margin == 0), "lost": float(margin < 0)}
        return float(np.mean(learned or returns)), numbers

    @property
    def logged_info_keys(self) -> tuple[str, ...]:
        seatings = (self.seating, self.eval_seating)
        names = [name for name in self.policies if any(name in seating.agents for seating in seatings)]
        outcomes = ("won", "drawn", "lost") if any(map(self._is_duel, seatings)) else ()
        return (*(f"{name}/return" for name in names), *outcomes)

    def _is_duel(self, seating: Seating) -> bool:
        """Return whether a learning policy plays against another one, each as one of two agents."""
        learning = [name for name in seating.agents if name in self.learning]
        opposed = self.spaces.reward_kind == "opposed" and self.spaces.num_agents == 2
        return opposed and len(seating.agents) == 2 and len(learning) == 1

    # --- a single policy ---

    def member(self, name: str) -> Policy:
        """Return a policy by its name."""
        if name not in self.policies:
            raise unknown("policy", name, self.policies)
        return self.policies[name]  # type: ignore[return-value]

    def main(self) -> str:
        """Return the name of the only policy that learns. Raise `UserError` if there are several."""
        if len(self.learning) != 1:
            raise UserError(f"the run has {len(self.learning)} learning policies: {', '.join(self.learning)}; name one")
        return next(iter(self.learning))

    def alone(self, name: str) -> JointPolicy:
        """Return a joint policy in which one of the policies acts for all agents."""
        policy, num = self.member(name), self.spaces.num_agents
        if policy.spaces.agents:
            raise UserError(f"the policy {name} acts for {policy.spaces.num_agents} agents together, so not for all")
        joint = JointPolicy(self.spaces, {name: policy}, Seating({name: range(num)}, num))
        joint.learning = {name: 0}
        return joint

    def view(self, name: str, batch: Batch) -> Batch:
        """Return the steps `[T,N]` of the agents of a policy, as its learner reads them.

        A learner for a single agent gets `[T,N*k]`. If agents may leave, an agent's steps terminate when it leaves.
        """
        is_team = bool(self.policies[name].spaces.agents)  # type: ignore[union-attr]
        rows, agents = self.seating.index(name, batch.terminated.shape[1])

        def take(leaf: Array) -> Array:
            own = leaf[:, rows, agents]
            return own if is_team else own.reshape(len(own), -1, *own.shape[3:])

        def take_field(field: str) -> Tree:
            return tree_map(take, getattr(batch, field))

        fields: dict[str, Tree] = {}
        for field in batch.fields:
            if field in AGENT_FIELDS:  # when it is read: most learners don't read all
                fields[field] = lambda field=field: take_field(field)
            elif is_team and field != DECISIONS:
                fields[field] = getattr(batch, field)
        if name in self.members:
            fields = self.members[name].read_fields(fields)
        if not is_team:
            for field in ("alive", "next_alive", "state", "next_state"):
                fields.pop(field, None)
            terminated, truncated = (
                np.repeat(getattr(batch, flag), agents.shape[1], 1) for flag in ("terminated", "truncated")
            )
            if self.spaces.individual_termination:
                terminated = terminated | ~take(batch.next_alive)
            fields |= {"terminated": terminated, "truncated": truncated & ~terminated}
        stored = batch.get(DECISIONS) or {}
        flat = (lambda leaf: leaf) if is_team else (lambda leaf: leaf.reshape(len(leaf), -1, *leaf.shape[3:]))
        return Batch(**fields, **{key: tree_map(flat, tree) for key, tree in stored.get(name, {}).items()})


def _per_agent(leaf: Tensor, index: tuple[Tensor, ...], is_team: bool) -> Tensor:
    """Return what a policy returned for its agents as `[N,k,...]`, or `[N,...]` for a team."""
    return leaf if is_team else leaf.reshape(*index[1].shape, *leaf.shape[1:])


def _put(tree: Tree, index: tuple[Tensor, ...], values: Tree) -> Tree:
    """Return a copy of a tree `[N,A,...]` with new values at an index."""

    def put(leaf: Tensor, value: Tensor) -> Tensor:
        return leaf.index_put(index, _per_agent(value, index, is_team=False))

    return tree_map(put, tree, values)
