"""A loss that uses a value of `info`: a policy gradient that avoids costs, which the reward doesn't contain.

`env.info_fields=[cost]` stores `info["cost"]` of each step as `batch.info["cost"]`.

Run it with `python custom_info_loss.py`.

Or on the command line, in the folder of this file:

    zhixing train custom_info_loss:Careful --env custom_info_loss:Delivery 'env.info_fields=[cost]' env_steps=8000
"""

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete

import zhixing as zx
from zhixing.config import NonNegative, OnPolicyConfig, Positive, PositiveFloat
from zhixing.core.tree import Field
from zhixing.nets.actor_critic import ActorCritic
from zhixing.nets.policies import ActorCriticPolicy
from zhixing.ops.returns import gae, next_values

GOAL = 7.0  # mean return; avoiding all costs returns 7.5 on average, always rushing 10, random actions 5


class Delivery(gym.Env):
    """Deliver ten parcels: wait, walk or rush. Rushing is faster, but on a busy road it has a cost."""

    observation_space, action_space = Box(0, 1, (1,)), Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.parcels = 0
        return self._next_road(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        cost = float(action == 2 and self.busy)
        self.parcels += 1
        return self._next_road(), (0.0, 0.5, 1.0)[action], self.parcels == 10, False, {"cost": cost}

    def _next_road(self) -> np.ndarray:
        self.busy = bool(self.np_random.integers(2))
        return np.array([self.busy], np.float32)


class CarefulConfig(OnPolicyConfig):
    cost_coef: NonNegative = 2.0
    """Weight of costs."""
    entropy_coef: NonNegative = 0.02
    """Weight of the entropy bonus."""
    lr: PositiveFloat = 3e-3
    rollout_steps: Positive = 10
    num_envs: Positive = 16


class Careful(zx.Learner):
    """Policy gradient for reward - cost_coef * cost, with a learned baseline."""

    settings = CarefulConfig
    metrics = ("policy_loss", "value_loss", "cost")

    def __init__(self, cfg: CarefulConfig, spaces: zx.Spaces, device: torch.device | str = "cpu") -> None:
        super().__init__(cfg, spaces, device)
        if "cost" not in spaces.info:
            raise zx.UserError(f"{cfg.algorithm} needs info['cost'] of every step: set env.info_fields=[cost]")
        self.cfg = cfg
        with self.seeded_init():
            self.net = ActorCritic(spaces, cfg.net).to(self.device)
        self.policy = ActorCriticPolicy(spaces, self.net)
        self.optimizer = self.make_optimizer(self.net.parameters(), cfg.lr, max_grad_norm=cfg.max_grad_norm)

    @property
    def extra_fields(self) -> dict[str, Field]:
        return {"value": Field((), np.dtype(np.float32))}

    @zx.train_step
    def update(self, batch: zx.Batch) -> zx.Update:
        utility = batch.reward - self.cfg.cost_coef * batch.info["cost"]  # [T,N]
        boundary = batch.terminated | batch.truncated
        boundary[-1] = True
        with torch.no_grad():
            next_value = next_values(batch.value, boundary, self.net(batch.next_obs[boundary]).value)
            advantage = gae(
                utility, batch.value, next_value, batch.terminated, batch.truncated, gamma=self.cfg.gamma, lam=0.5
            )
        steps = batch.flatten()  # [T,N] -> [B]
        out = self.net(steps.obs)
        policy_loss = -(out.distribution.log_prob(steps.action) * advantage.flatten()).mean()
        value_loss = (out.value - (advantage + batch.value).flatten()).square().mean()
        entropy = out.distribution.entropy().mean()
        self.optimizer.step(policy_loss + 0.5 * value_loss - self.cfg.entropy_coef * entropy)
        return zx.Update({"policy_loss": policy_loss, "value_loss": value_loss, "cost": batch.info["cost"].mean()})


def main(**settings: object) -> dict:
    return zx.train(
        "custom_info_loss:Careful", env="custom_info_loss:Delivery", env__info_fields=["cost"], env_steps=12_000,
        eval_episodes=50, eval_every=0, **settings,
    )  # fmt: skip


if __name__ == "__main__":
    result = main()
    print(f"mean return {result['final_return']:.2f} without costs; always rushing returns 10")
