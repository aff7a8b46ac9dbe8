"""REINFORCE with a baseline (Williams, 1992).   ∇J = E[Σ_t ∇ log π(a_t|s_t) (G_t - V(s_t))]

A custom algorithm is one file outside the package, with a settings class and a learner. All commands accept it as
`module:Class`. In the folder of this file:

    zhixing train custom_algorithm:Reinforce --env CartPole-v1 stop_return=475 --out runs/reinforce
    zhixing eval runs/reinforce --trust

Differs from the paper: V is learned together with the policy, and bootstraps the return where a rollout or a time limit
cuts an episode off.
"""

import numpy as np
import torch

import zhixing as zx
from zhixing.config import Fraction, NonNegative, OnPolicyConfig, Positive, PositiveFloat
from zhixing.core.tree import Field
from zhixing.nets.actor_critic import ActorCritic
from zhixing.nets.policies import ActorCriticPolicy
from zhixing.ops.returns import gae, next_values

GOAL = 475.0  # mean return on CartPole-v1, reached within 100,000 steps


class ReinforceConfig(OnPolicyConfig):
    """Each setting has a default and a description; `zhixing show custom_algorithm:Reinforce` prints them.

    The last five override defaults that all on-policy algorithms share.
    """

    value_coef: NonNegative = 0.5
    """Weight of the value loss."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    lr: PositiveFloat = 2e-3
    max_grad_norm: PositiveFloat | None = 1.0
    gamma: Fraction = 0.98
    rollout_steps: Positive = 16
    num_envs: Positive = 8


class Reinforce(zx.Learner):
    """Monte-Carlo policy gradient with a learned baseline."""

    settings = ReinforceConfig
    metrics = ("policy_loss", "value_loss", "entropy", "grad_norm")

    def __init__(self, cfg: ReinforceConfig, spaces: zx.Spaces, device: torch.device | str = "cpu") -> None:
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        with self.seeded_init():  # initial weights depend only on the run's seed
            self.net = ActorCritic(spaces, cfg.net).to(self.device)
        self.policy = ActorCriticPolicy(spaces, self.net)  # acts in training, evaluations and videos
        self.optimizer = self.make_optimizer(self.net.parameters(), cfg.lr, max_grad_norm=cfg.max_grad_norm)

    @property
    def extra_fields(self) -> dict[str, Field]:
        """Steps hold the policy's value estimate, a float32 scalar, in addition to the base fields."""
        return {"value": Field((), np.dtype(np.float32))}

    @torch.no_grad()
    def returns(self, batch: zx.Batch) -> torch.Tensor:
        """Compute the returns G `[T,N]`. V estimates the rest where the rollout or a time limit cuts an episode off."""
        boundary = batch.terminated | batch.truncated
        boundary[-1] = True
        bootstrap = self.net(batch.next_obs[boundary]).value
        next_value = next_values(batch.value, boundary, bootstrap)
        advantage = gae(
            batch.reward, batch.value, next_value, batch.terminated, batch.truncated, gamma=self.cfg.gamma, lam=1.0
        )
        return advantage + batch.value

    @zx.train_step
    def update(self, batch: zx.Batch) -> zx.Update:
        returns = self.returns(batch)
        advantage = returns - batch.value
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)

        steps = batch.flatten()  # [T,N] -> [B]
        out = self.net(steps.obs)
        policy_loss = -(out.distribution.log_prob(steps.action) * advantage.flatten()).mean()
        value_loss = (out.value - returns.flatten()).square().mean()
        entropy = out.distribution.entropy().mean()
        loss = policy_loss + self.cfg.value_coef * value_loss - self.cfg.entropy_coef * entropy
        grad_norm = self.optimizer.step(loss)
        metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        return zx.Update({**metrics, "grad_norm": grad_norm})

    def value(self, obs: torch.Tensor) -> torch.Tensor:
        return self.net(obs).value


def main() -> dict:
    return zx.train("custom_algorithm:Reinforce", env="CartPole-v1", stop_return=GOAL)


if __name__ == "__main__":
    result = main()
    print(f"{result['final_return']:.1f} after {result['env_steps']:,} steps")
