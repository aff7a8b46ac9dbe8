"""REINFORCE with a baseline (Williams, 1992).   ∇J = E[Σ_t ∇ log π(a_t|s_t) (G_t - V(s_t))]

An algorithm of your own is one file, settings and a learner, anywhere outside the package. It is trained, evaluated,
resumed, filmed and plotted by its name, `module:Class`. From the folder of this file:

    zhixing train own_algorithm:Reinforce --env CartPole-v1 stop_return=475 --out runs/mine
    zhixing eval runs/mine --trust

Differs from the paper: V is learned beside the policy, and gives the rest of the return where a rollout or a time
limit cuts an episode short.
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
    """Each setting has a default and a description; `zhixing show own_algorithm:Reinforce` prints them.

    The last five are settings of all on-policy algorithms, here with other defaults.
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
    """policy gradient with whole returns and a baseline"""

    settings = ReinforceConfig
    metrics = ("policy_loss", "value_loss", "entropy", "grad_norm")

    def __init__(self, cfg: ReinforceConfig, spaces: zx.Spaces, device: torch.device | str = "cpu") -> None:
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        with self.seeded_init():  # weights depend on the run's seed only
            self.net = ActorCritic(spaces, cfg.net).to(self.device)
        self.policy = ActorCriticPolicy(spaces, self.net)  # acts in training, evaluations and videos
        self.optimizer = self.make_optimizer(self.net.parameters(), cfg.lr, max_grad_norm=cfg.max_grad_norm)

    @property
    def extra_fields(self) -> dict[str, Field]:
        """Fields of a step besides obs, action, reward, terminated and truncated: the policy's value."""
        return {"value": Field((), np.dtype(np.float32))}

    @torch.no_grad()
    def returns(self, batch: zx.Batch) -> torch.Tensor:
        """Return G `[T,N]`: rewards to the end of the episode. Where the rollout ends first, V estimates the rest."""
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
    return zx.train("own_algorithm:Reinforce", env="CartPole-v1", stop_return=GOAL)


if __name__ == "__main__":
    result = main()
    print(f"{result['final_return']:.1f} after {result['env_steps']:,} steps")
