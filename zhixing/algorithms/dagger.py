"""DAgger (Ross et al., 2011).   L = E_{s ~ student}[-log π(π*(s)|s)], or of continuous actions E[(π(s) - π*(s))²]

The student acts, the expert π* says what it would have done there, and all that it said is learned from: so the student
learns what to do where its own mistakes lead. At first the expert acts, with a chance that falls to zero.
Differs from the paper: one network learns on and on from a growing replay instead of one anew per round, and the expert
takes over for single steps.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from zhixing.algorithms import register
from zhixing.algorithms.common.cloning import cloning_loss, make_clone
from zhixing.config import Fraction, Group, NetConfig, OffPolicyConfig, Positive
from zhixing.core.batch import Batch
from zhixing.core.learner import Gradients, Learner
from zhixing.core.policy import Policy
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.errors import UserError
from zhixing.nets.policies import ExpertMixturePolicy
from zhixing.nets.torso import NetFactory
from zhixing.ops.schedules import linear_schedule


class DAggerConfig(OffPolicyConfig):
    expert: Annotated[str | None, Group.COLLECTION] = None
    """Run whose agent is the expert that labels observations."""
    expert_fraction: Annotated[Fraction, Group.COLLECTION] = 0.2
    """Fraction of the budget over which the expert's share of the actions falls to zero."""
    batch_size: Positive = 256
    net: NetConfig = NetConfig(hidden_sizes=[256, 256], activation="relu")


@register("dagger", "cloning of an expert that is asked about what the student meets")
class DAgger(Learner):
    settings = DAggerConfig
    metrics = ("loss", "grad_norm")
    policy: ExpertMixturePolicy

    def __init__(
        self, cfg: DAggerConfig, spaces: Spaces, device: torch.device | str = "cpu", net: NetFactory | None = None
    ) -> None:
        for name, only in (("prioritized", False), ("n_step", 1), ("her", False)):
            if getattr(cfg.replay, name) != only:
                raise UserError(f"{cfg.algorithm} learns what an expert says of single steps: set replay.{name}={only}")
        if cfg.dataset is not None:
            raise UserError(f"{cfg.algorithm} asks its expert while it acts: give it an env and no dataset")
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        with self.building():
            self.actor, student = make_clone(spaces, cfg, net)
            self.actor.to(self.device)
        self.actor_optimizer = self.make_optimizer(self.actor.parameters(), cfg.lr)
        self.policy = ExpertMixturePolicy(student, self.expert_share)

    def expert_share(self, env_steps: int) -> float:
        return linear_schedule(1.0, 0.0, env_steps / max(1.0, self.cfg.expert_fraction * self.cfg.env_steps))

    def ask(self, expert: Policy) -> None:
        self.policy.expert = [expert]

    @property
    def fields(self) -> dict[str, Tree]:
        return {"expert_action": self.spaces.fields()["action"]}

    def loss(self, batch: Batch) -> Tensor:
        return cloning_loss(self.actor, batch, batch.expert_action)

    def gradients(self, batch: Batch) -> Gradients:
        loss = self.loss(batch)
        return Gradients({"actor_optimizer": self.actor_optimizer.gradient(loss)}, {"loss": loss.detach()})
