"""MADDPG (Lowe et al., 2017).   y_i = r_i + γ (1 - terminated) Q'_i(x', μ'_1(o'_1), ..., μ'_A(o'_A))

Each agent acts by what it sees itself and has a critic of its own, of all observations x and all actions; the actor of
agent i climbs Q_i(x, a_1, ..., μ_i(o_i), ..., a_A), the others' actions being those of the replay. Choices are one-hot
in critics; the actor's gradient passes through Gumbel-softmax samples, one-hot forward (straight-through).
Differs from the paper: critics see observations alone, also where the task tells a state; targets take each target
actor's likeliest choice, not a sample; noise is normal, not a drifting process; no ensembles and no guesses of the
others' policies. An agent that has left does nothing in the joint action, and its actor doesn't learn. Its critic goes
on to learn a reward that the team shares, as in EPyMARL's version; rewards per agent end for it when it leaves.
"""

from __future__ import annotations

import copy
from typing import Annotated

import torch
from gymnasium.spaces import Discrete
from torch import Tensor
from torch.nn import functional as F

from zhixing.algorithms import register
from zhixing.algorithms.common.team_policy import TeamActorPolicy
from zhixing.config import Fraction, Group, NetConfig, NonNegative, OffPolicyActorCriticConfig, PositiveFloat
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner, Update, train_step
from zhixing.core.optimizer import TargetUpdater
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.nets.critics import check_box
from zhixing.nets.multi_agent_critics import CentralizedCritics, MultiAgentActors
from zhixing.nets.torso import NetFactory
from zhixing.ops.distributions import MASKED_LOGIT
from zhixing.ops.policy_gradient import masked_mean
from zhixing.ops.returns import td_target


class MADDPGConfig(OffPolicyActorCriticConfig):
    updates_per_step: PositiveFloat = 0.25
    tau: Fraction = 0.01
    exploration_noise: Annotated[NonNegative, Group.COLLECTION] = 0.1
    """Standard deviation of exploration noise on continuous actions, relative to half the action range."""
    gumbel_temperature: PositiveFloat = 1.0
    """Temperature of the Gumbel-softmax samples of discrete actions."""
    output_penalty: NonNegative = 1e-3
    """Weight of the actors' squared outputs in the loss; higher values keep discrete policies more random."""
    max_grad_norm: PositiveFloat | None = 0.5
    """Maximum norm of the gradients of all agents together; none disables clipping."""
    net: NetConfig = NetConfig(hidden_sizes=[64, 64], activation="relu")


@register("maddpg", "multi-agent DDPG with centralized critics over all observations and actions")
class MADDPG(Learner):
    settings = MADDPGConfig
    metrics = ("critic_loss", "actor_loss", "q_mean", "grad_norm")
    multi_agent = True

    def __init__(
        self, cfg: MADDPGConfig, spaces: Spaces, device: torch.device | str = "cpu", net: NetFactory | None = None
    ) -> None:
        self.discrete = isinstance(spaces.action, Discrete)
        if not self.discrete:
            check_box(spaces, cfg.algorithm)
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        with self.seeded_init():
            self.actor = MultiAgentActors(spaces, cfg, net).to(self.device)
            self.critics = CentralizedCritics(spaces, cfg, net).to(self.device)
        clip = {"max_grad_norm": cfg.max_grad_norm}
        self.actor_optimizer = self.make_optimizer(self.actor.parameters(), cfg.actor_lr or cfg.lr, **clip)
        self.critic_optimizer = self.make_optimizer(self.critics.parameters(), cfg.lr, **clip)
        self.target_actor, self.target_critics = copy.deepcopy(self.actor), copy.deepcopy(self.critics)
        self.target_updater = TargetUpdater((self.target_actor, self.actor), (self.target_critics, self.critics))
        self.policy = TeamActorPolicy(spaces, self.actor, cfg.exploration_noise)

    # --- actions as critics see them, [B,A,n] ---

    def best(self, out: Tensor, mask: Tensor | None) -> Tensor:
        """What actors do at their best, of what they say."""
        return F.one_hot(_masked(out, mask).argmax(-1), out.shape[-1]).float() if self.discrete else out.tanh()

    def differentiable(self, out: Tensor, mask: Tensor | None) -> Tensor:
        """What actors do, for gradients to pass through: of choices a sample."""
        if not self.discrete:
            return out.tanh()
        # the minus logarithm of an exponential clock is Gumbel noise, and the largest sum a fair draw of the softmax
        noise = -torch.empty_like(out).exponential_(generator=self.rng).log()
        soft = ((_masked(out, mask) + noise) / self.cfg.gumbel_temperature).softmax(-1)
        hard = F.one_hot(soft.argmax(-1), out.shape[-1])
        return hard + soft - soft.detach()

    def taken(self, batch: Batch) -> Tensor:
        action = F.one_hot(batch.action, self.spaces.num_actions).float() if self.discrete else batch.action
        return _of_the_living(action, batch)

    # --- losses ---

    @torch.no_grad()
    def target_value(self, batch: Batch) -> Tensor:
        out = self.target_actor(batch.next_obs)
        action = self.best(out, batch.next_mask if "mask" in batch else None)
        future = self.target_critics(batch.next_obs, _of_the_living(action, batch, use_next=True))  # [B,A]
        if self.spaces.individual_termination:
            future = future * batch.next_alive
        return td_target(batch, future)

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Also returns the errors, for priorities, and the mean value."""
        q = self.critics(batch.obs, self.taken(batch))  # [B,A]
        counted = _counted(batch) if self.spaces.individual_termination else torch.ones_like(q)
        error = (q - self.target_value(batch)) * counted
        losses = error.square().sum(-1)
        weighted = losses * batch.weight if "weight" in batch else losses
        size = error.detach().abs().sum(-1) / counted.sum(-1).clamp_min(1)
        return weighted.mean(), size, masked_mean(q.detach(), counted)

    def actor_loss(self, batch: Batch) -> Tensor:
        out = self.actor(batch.obs)
        mine = _of_the_living(self.differentiable(out, batch.mask if "mask" in batch else None), batch)
        own = torch.eye(self.spaces.num_agents, dtype=torch.bool, device=self.device)[:, None, :, None]
        joint = torch.where(own, mine, self.taken(batch))  # [A,B,A,n]: for critic i only agent i's action is new
        loss = self.cfg.output_penalty * out.square().mean(-1) - self.critics(batch.obs, joint)
        return (loss * _counted(batch)).sum(-1).mean()

    @train_step
    def update(self, batch: Batch) -> Update:
        critic_loss, td_error, q_mean = self.critic_loss(batch)
        grad_norm = self.critic_optimizer.step(critic_loss)
        actor_loss = self.actor_loss(batch)  # sees the critics just updated
        self.actor_optimizer.step(actor_loss)
        self.target_updater.polyak_update(self.cfg.tau)
        metrics = {"critic_loss": critic_loss, "actor_loss": actor_loss, "q_mean": q_mean, "grad_norm": grad_norm}
        return Update(metrics, td_error)

    def value(self, obs: Tree) -> Tensor:
        """Of each agent, `[B,A]`."""
        return self.critics(obs, self.best(self.actor(obs), None))


def _masked(out: Tensor, mask: Tensor | None) -> Tensor:
    return out if mask is None else out.masked_fill(~mask, MASKED_LOGIT)


def _counted(batch: Batch) -> Tensor:
    """1 where an agent was there, `[B,A]`."""
    return batch.alive.float() if "alive" in batch else torch.ones_like(batch.reward)


def _of_the_living(action: Tensor, batch: Batch, use_next: bool = False) -> Tensor:
    """Zeros for those who have left: what they are said to do mustn't look like a deed."""
    if "alive" not in batch:
        return action
    return action * (batch.next_alive if use_next else batch.alive).unsqueeze(-1)
