"""MADDPG (Lowe et al., 2017).   y_i = r_i + γ^k (1 - terminated) Q'_i(x', μ'_1(o'_1), ..., μ'_A(o'_A))

Each agent i has an actor μ_i of its own observation o_i, and a critic Q_i of all observations x and all actions. The
actor maximizes Q_i(x, a_1, ..., μ_i(o_i), ..., a_A), where the other actions come from the replay buffer. Discrete
actions are one-hot for critics; actors get gradients through Gumbel-softmax samples, which are one-hot in the forward
pass (straight-through). An agent that has left has a zero action, and its actor is not trained. Its critic is still
trained if the reward is shared, as in EPyMARL; individual rewards end when the agent leaves.
Differs from the paper: critics don't use a global state, even if there is one; targets use the most likely discrete
action of each target actor, not a sample; exploration noise is Gaussian, not an Ornstein-Uhlenbeck process; no policy
ensembles and no models of the other agents' policies.
"""

from __future__ import annotations

import copy
from typing import Annotated

import torch
from gymnasium.spaces import Discrete
from torch import Tensor
from torch.nn import functional as F

from zhixing.algorithms import register
from zhixing.config import Fraction, Group, NetConfig, NonNegative, OffPolicyActorCriticConfig, PositiveFloat
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner, Update, train_step
from zhixing.core.optimizer import TargetUpdater
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.nets.critics import check_box
from zhixing.nets.multi_agent_critics import CentralizedCritics, MultiAgentActors
from zhixing.nets.multi_agent_policies import MultiAgentActorPolicy
from zhixing.nets.torso import NetFactory
from zhixing.ops.distributions import mask_logits
from zhixing.ops.losses import weighted_mean
from zhixing.ops.policy_gradient import masked_mean
from zhixing.ops.returns import td_target


class MADDPGConfig(OffPolicyActorCriticConfig):
    algorithm: str = "maddpg"
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
        self.policy = MultiAgentActorPolicy(spaces, self.actor, cfg.exploration_noise)

    # --- actions as inputs of the critics, [B,A,n] ---

    def greedy_action(self, out: Tensor, mask: Tensor | None) -> Tensor:
        """Return the most likely actions, one-hot, or continuous actions, given the actors' outputs."""
        return F.one_hot(mask_logits(out, mask).argmax(-1), out.shape[-1]).float() if self.discrete else out.tanh()

    def differentiable_action(self, out: Tensor, mask: Tensor | None) -> Tensor:
        """Return Gumbel-softmax samples, or continuous actions, through which the actors get gradients."""
        if not self.discrete:
            return out.tanh()
        # -log of an exponential variable is Gumbel noise, so argmax(logits + noise) is a sample of the softmax
        gumbel_noise = -torch.empty_like(out).exponential_(generator=self.rng).log()
        soft = ((mask_logits(out, mask) + gumbel_noise) / self.cfg.gumbel_temperature).softmax(-1)
        hard = F.one_hot(soft.argmax(-1), out.shape[-1])
        return hard + soft - soft.detach()

    def replayed_action(self, batch: Batch) -> Tensor:
        action = F.one_hot(batch.action, self.spaces.num_actions).float() if self.discrete else batch.action
        return _zero_dead(action, batch.get("alive"))

    # --- losses ---

    @torch.no_grad()
    def target_value(self, batch: Batch) -> Tensor:
        action = self.greedy_action(self.target_actor(batch.next_obs), batch.get("next_mask"))
        q = self.target_critics(batch.next_obs, _zero_dead(action, batch.get("next_alive")))  # [B,A]
        return td_target(batch, q * batch.next_alive if self.spaces.individual_termination else q)

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, the absolute TD errors averaged over agents `[B]`, and the mean value."""
        q = self.critics(batch.obs, self.replayed_action(batch))  # [B,A]
        trained = batch.alive if self.spaces.individual_termination else torch.ones_like(q, dtype=torch.bool)
        td_error = (q - self.target_value(batch)) * trained
        priority = td_error.detach().abs().sum(-1) / trained.sum(-1).clamp_min(1)
        return weighted_mean(td_error.square().sum(-1), batch), priority, masked_mean(q.detach(), trained)

    def actor_loss(self, batch: Batch) -> Tensor:
        out, alive = self.actor(batch.obs), batch.get("alive")
        action = _zero_dead(self.differentiable_action(out, batch.get("mask")), alive)
        diagonal = torch.eye(self.spaces.num_agents, dtype=torch.bool, device=self.device)[:, None, :, None]
        # [A,B,A,n]: for critic i only action i is new
        joint = torch.where(diagonal, action, self.replayed_action(batch))
        loss = self.cfg.output_penalty * out.square().mean(-1) - self.critics(batch.obs, joint)  # [B,A]
        return (loss if alive is None else loss * alive).sum(-1).mean()

    @train_step
    def update(self, batch: Batch) -> Update:
        critic_loss, td_error, q_mean = self.critic_loss(batch)
        grad_norm = self.critic_optimizer.step(critic_loss)
        actor_loss = self.actor_loss(batch)  # uses the critics just updated
        self.actor_optimizer.step(actor_loss)
        self.target_updater.polyak_update(self.cfg.tau)
        metrics = {"critic_loss": critic_loss, "actor_loss": actor_loss, "q_mean": q_mean, "grad_norm": grad_norm}
        return Update(metrics, td_error)

    def value(self, obs: Tree) -> Tensor:
        """Return the value of each agent, `[B,A]`."""
        return self.critics(obs, self.greedy_action(self.actor(obs), None))


def _zero_dead(action: Tensor, alive: Tensor | None) -> Tensor:
    """Set the actions `[B,A,n]` of agents that have left to zero."""
    return action if alive is None else action * alive.unsqueeze(-1)
