"""Several policies in one environment: each learns with its own algorithm, is frozen, follows a script, or is a league.

A learning policy is an ordinary learner for the environment of its agents only. A single-agent algorithm learns from
each of its agents as from a separate environment; a multi-agent algorithm learns for all of them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from zhixing import algorithms
from zhixing.algorithms import register
from zhixing.algorithms.common.agents import group_agents, match_agents, member_spaces
from zhixing.algorithms.common.league_results import LeagueResults
from zhixing.config import MultiPolicyConfig, RunConfig, is_learner, policy_config
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner, Update
from zhixing.core.optimizer import Optimizer
from zhixing.core.policy import Policy
from zhixing.core.seeding import derive_seed
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Field, Tree, tree_map
from zhixing.errors import UserError
from zhixing.nets.joint_policy import DECISIONS, JointPolicy, RandomPolicy, Seating
from zhixing.nets.league import LeaguePolicy
from zhixing.utils.importing import import_object


@register("multi_policy", "several policies in one environment, with algorithms of their own, frozen runs and leagues")
class MultiPolicy(Learner):
    settings = MultiPolicyConfig
    metrics: ClassVar[tuple[str, ...]] = ()
    multi_agent = True
    mixed_agents = True
    policy: JointPolicy

    def __init__(self, cfg: MultiPolicyConfig, spaces: Spaces, device: torch.device | str = "cpu") -> None:
        super().__init__(cfg, spaces, device)
        if cfg.distributed.learners > 1:
            raise UserError(
                f"distributed.learners={cfg.distributed.learners}: multi_policy updates in one process; set 1"
            )
        self.cfg = cfg
        names, num = spaces.agent_names, spaces.num_agents
        policy_of = match_agents(cfg.agents, names, "agents")
        for name in names:
            if name not in policy_of:
                raise UserError(f"agents has no policy for {name}: set agents.{name}=POLICY, or agents.*=POLICY")
        agents = group_agents(policy_of, names)
        eval_agents = group_agents({**policy_of, **match_agents(cfg.eval_agents, names, "eval_agents")}, names)
        self.learners: dict[str, Learner] = {}
        self.configs: dict[str, RunConfig] = {}
        policies: dict[str, Policy] = {}
        for name, settings in sorted(cfg.policies.items(), key=lambda item: "league" in item[1]):
            used = sorted({*agents.get(name, []), *eval_agents.get(name, [])})
            if not used:
                raise UserError(f"no agent has the policy {name}: set agents.{names[-1]}={name}, or remove it")
            if is_learner(settings) and name not in agents:
                raise UserError(f"the policy {name} only acts in evaluations, so it can't learn: set frozen=true")
            if "league" in settings:
                policies[name] = self._league(name, settings, policies[settings["league"]], agents)
            elif "script" in settings:
                policies[name] = self._script(settings["script"], used)
            else:
                policies[name] = self._algorithm(name, settings, agents.get(name, used), used)
            team = policies[name].spaces.num_agents
            if 1 < team < num and len(eval_agents.get(name, used)) != team:
                raise UserError(f"eval_agents: the policy {name} acts for {team} agents together; give it as many")
        seating = Seating(agents, num, cfg.rotate)
        self.policy = JointPolicy(spaces, policies, seating, Seating(eval_agents, num, cfg.rotate)).to(self.device)
        self.policy.learning = {name: getattr(self.configs[name], "learning_starts", 0) for name in self.learners}
        self.metrics = tuple(f"{name}/{key}" for name, part in self.learners.items() for key in part.metrics)  # type: ignore[misc]
        self._optimizers = [optimizer for learner in self.learners.values() for optimizer in learner._optimizers]
        self._extra_fields = self._decision_fields()
        self.policy.fields = {name: list(fields) for name, fields in self._extra_fields.items()}
        self.results = {
            name: LeagueResults(league, seating, name, cfg.policies[name]["league"], cfg.num_envs)
            for name, league in self.leagues.items()
            if name in agents
        }

    @property
    def leagues(self) -> dict[str, LeaguePolicy]:
        items = self.policy.policies.items()
        return {name: policy for name, policy in items if isinstance(policy, LeaguePolicy)}

    # --- parts ---

    def _algorithm(self, name: str, settings: Mapping[str, Any], agents: list[int], used: list[int]) -> Policy:
        algorithm = algorithms.get(settings["algorithm"])
        is_team = algorithm.multi_agent is True
        of_other_run = not is_learner(settings) and settings["init_policy"] is None
        size = self.spaces.num_agents if of_other_run else len(agents)  # a frozen team observes all agents, as there
        if is_team and size == 1:
            raise UserError(
                f"policies.{name}: {algorithm.name} needs several agents, but this policy has only "
                f"{self.spaces.agent_names[agents[0]]}: use a single-agent algorithm, such as ppo or dqn"
            )
        num_envs = self.cfg.num_envs * (1 if is_team else len(agents))
        cfg = policy_config(self.cfg, name, num_envs, derive_seed(self.cfg.seed, f"policy {name}"))
        try:
            learner = algorithm.make(cfg, member_spaces(self.spaces, used, size if is_team else 1), self.device)
        except UserError as error:
            raise UserError(f"policies.{name} of multi_policy: {error}") from None
        if is_learner(settings):
            self.learners[name], self.configs[name] = learner, cfg
        else:
            learner.policy.requires_grad_(False)
        return learner.policy

    def _league(
        self, name: str, settings: Mapping[str, Any], policy: Policy, agents: Mapping[str, list[int]]
    ) -> LeaguePolicy:
        if policy.spaces.agents:
            raise UserError(f"policies.{name}: a league needs a single-agent algorithm, such as ppo or dqn")
        if settings["league"] not in agents:
            raise UserError(f"policies.{name}: the policy {settings['league']} of the league has no agent")
        return LeaguePolicy(policy, settings["size"], settings["sampling"] == "prioritized")

    def _script(self, script: str, agents: list[int]) -> Policy:
        spaces = member_spaces(self.spaces, agents, 1)
        if script == "random":
            return RandomPolicy(spaces)
        policy = import_object(script)
        if not (isinstance(policy, type) and issubclass(policy, Policy)):
            raise UserError(f"script={script!r} must be a class that derives from zhixing.Policy")
        return policy(spaces)

    def _decision_fields(self) -> dict[str, dict[str, Tree]]:
        """Return what to store of each policy's decisions: fields `[k,...]` for k agents, or `[...]` of a team."""
        fields: dict[str, dict[str, Tree]] = {}
        for name, learner in self.learners.items():
            fields[name] = learner.extra_fields
            if not learner.spaces.agents:
                fields[name] = tree_map(lambda field, name=name: self._stacked(name, field), fields[name])
        for name in self.leagues:
            if name in self.policy.seating.agents:
                fields[name] = {"snapshot": self._stacked(name, Field((), np.dtype(np.float32)))}
        return {name: tree for name, tree in fields.items() if tree}

    def _stacked(self, name: str, field: Field) -> Field:
        return Field((len(self.policy.seating.agents[name]), *field.shape), field.dtype)

    # --- for the trainer ---

    @property
    def extra_fields(self) -> dict[str, Tree]:
        return {DECISIONS: self._extra_fields} if self._extra_fields else {}

    def view(self, name: str, batch: Batch) -> Batch:
        """Return the steps of a joint batch `[T,N]` as the learner `name` reads them."""
        return self.policy.view(name, batch)

    def start_leagues(self) -> None:
        """Take the first snapshots, after the weights of policies were loaded."""
        for name, league in self.leagues.items():
            league.num_taken.zero_()
            league.add(self.learners[self.cfg.policies[name]["league"]].policy)

    def update_leagues(self, batch: Batch, env_steps: int) -> None:
        """Count the results of episodes that ended in a joint batch `[T,N]`, and take the snapshots that are due."""
        for name, league in self.leagues.items():
            settings = self.cfg.policies[name]
            if name in self.results:
                self.results[name].update(batch)
            while env_steps >= int(league.num_taken) * settings["every"]:
                league.add(self.learners[settings["league"]].policy)

    def count_updates(self) -> None:
        self.updates = sum(learner.updates for learner in self.learners.values())

    def update(self, batch: Batch) -> Update:
        """Raise an error: each learner has updates of its own, which the trainer calls."""
        raise UserError("a multi_policy learner has no update: call learners[name].update(view(name, batch))")

    def set_progress(self, fraction: float) -> None:
        for learner in self.learners.values():
            learner.set_progress(fraction)

    # --- state ---

    def networks(self) -> dict[str, nn.Module]:
        return {f"{name}/{key}": net for name, part in self.learners.items() for key, net in part.networks().items()}

    def optimizers(self) -> dict[str, Optimizer]:
        return {f"{name}/{key}": one for name, part in self.learners.items() for key, one in part.optimizers().items()}

    def load_networks(self, state: dict[str, Any]) -> None:
        for name, learner in self.learners.items():
            if name in state["learners"]:
                learner.load_networks(state["learners"][name])

    def state_dict(self) -> dict[str, Any]:
        learners = {name: learner.state_dict() for name, learner in self.learners.items()}
        margins = {name: torch.from_numpy(results.margin.copy()) for name, results in self.results.items()}
        return {**super().state_dict(), "learners": learners, "margins": margins}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for name, learner in self.learners.items():
            learner.load_state_dict(state["learners"][name])
        for name, results in self.results.items():
            results.margin[:] = state["margins"][name].numpy()
