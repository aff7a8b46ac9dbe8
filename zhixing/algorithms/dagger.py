"""DAgger (Ross et al., 2011).   L = E_{s ~ student}[-log π(π*(s)|s)], or for continuous actions E[(π(s) - π*(s))²]

The student acts, and the expert π* labels every state that it visits with an action. So the data contains the states
that the student's mistakes lead to. With a probability β that falls to zero, the expert acts instead.
Differs from the paper: one network is trained continuously on a growing replay buffer, instead of a new one in each
round; β falls linearly, and who acts is chosen at every step.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from zhixing.algorithms import register
from zhixing.algorithms.common.checks import check_plain_replay
from zhixing.algorithms.common.cloning import cloning_loss, make_clone
from zhixing.config import Fraction, Group, NetConfig, OffPolicyConfig, Positive
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner, LearnsFromExpert, Update, train_step
from zhixing.core.policy import Policy
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.errors import UserError
from zhixing.nets.policies import ExpertMixturePolicy
from zhixing.nets.torso import NetFactory
from zhixing.ops.schedules import linear_schedule


class DAggerConfig(OffPolicyConfig):
    algorithm: str = "dagger"
    expert: Annotated[str | None, Group.COLLECTION] = None
    """Run whose agent is the expert that labels observations."""
    expert_fraction: Annotated[Fraction, Group.COLLECTION] = 0.2
    """Fraction of the budget over which the probability that the expert acts falls to zero."""
    batch_size: Positive = 256
    net: NetConfig = NetConfig(hidden_sizes=[256, 256], activation="relu")


@register("dagger", "imitation of an expert that labels the states visited by the learner")
class DAgger(Learner, LearnsFromExpert):
    settings = DAggerConfig
    metrics = ("loss", "grad_norm")
    policy: ExpertMixturePolicy

    def __init__(
        self, cfg: DAggerConfig, spaces: Spaces, device: torch.device | str = "cpu", net: NetFactory | None = None
    ) -> None:
        check_plain_replay(cfg, "learns from single labeled steps")
        if cfg.dataset is not None:
            raise UserError(
                f"{cfg.algorithm} queries its expert while it acts and can't learn from dataset={cfg.dataset}; set env"
            )
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        with self.seeded_init():
            self.actor, student = make_clone(spaces, cfg, net)
            self.actor.to(self.device)
        self.actor_optimizer = self.make_optimizer(self.actor.parameters(), cfg.lr)
        self.policy = ExpertMixturePolicy(student, self.expert_probability)

    def expert_probability(self, env_steps: int) -> float:
        return linear_schedule(1.0, 0.0, env_steps / max(1.0, self.cfg.expert_fraction * self.cfg.env_steps))

    def set_expert(self, expert: Policy) -> None:
        self.policy.expert = [expert]

    @property
    def extra_fields(self) -> dict[str, Tree]:
        return {"expert_action": self.spaces.fields()["action"]}

    def loss(self, batch: Batch) -> Tensor:
        return cloning_loss(self.actor, batch, batch.expert_action)

    @train_step
    def update(self, batch: Batch) -> Update:
        loss = self.loss(batch)
        return Update({"loss": loss, "grad_norm": self.actor_optimizer.step(loss)})
