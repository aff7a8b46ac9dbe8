"""A training program whose parts are all custom: actor, learner, trainer, settings, and the run.

Q-learning without random actions. Initial Q-values are optimistic, and the actor adds a bonus β/√n(s, a) to the reward
(MBIE-EB, Strehl and Littman, 2008), so the agent tries what it has rarely done, and finds the only reward of
FrozenLake. The trainer updates after each episode. Run it with `python five_parts.py`.

Or on the command line, in the folder of this file. The last command replaces the trainer of a built-in algorithm:

    zhixing train five_parts:QLearning --env FrozenLake-v1 env.is_slippery=false env_steps=5000
    zhixing train dqn --env CartPole-v1 trainer=five_parts:train_after_episodes env_steps=10000
"""

import copy

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import zhixing as zx
from zhixing.config import Count, Fraction, NonNegative, OffPolicyConfig, Positive, PositiveFloat
from zhixing.core.optimizer import TargetUpdater
from zhixing.nets.policies import GreedyPolicy
from zhixing.ops.returns import td_target
from zhixing.training.updates import add_to_buffer, num_updates_due, update_from_samples

GOAL = 1.0  # mean return: every episode ends at the goal. With random actions, 1 % of them do


class CuriousActor(zx.Actor):
    """1. The actor acts with the learner's policy, and rewards actions that it has rarely taken."""

    def __init__(self, cfg: "Settings", learner: zx.Learner, env: zx.envs.VectorEnv) -> None:
        super().__init__(learner.policy, env, learner.extra_fields, seed=cfg.seed, device=cfg.device)
        self.bonus = cfg.bonus
        self.counts = np.zeros((env.spaces.obs.n, env.spaces.num_actions))  # [states, actions]

    def collect(self, steps=None, episodes=None, phase=zx.Phase.COLLECT) -> zx.Experience:
        experience = super().collect(steps, episodes, phase)
        batch = experience.batch
        state, action = batch.obs, batch.action  # [T,N]
        np.add.at(self.counts, (state, action), 1)
        reward = batch.reward + self.bonus / np.sqrt(self.counts[state, action])
        return experience._replace(batch=batch.replace(reward=reward.astype(np.float32)))

    def state_dict(self) -> dict:
        """A resumed run continues with these counts."""
        return {**super().state_dict(), "counts": self.counts}

    def load_state_dict(self, state: dict) -> list[int]:
        self.counts = state["counts"]
        return super().load_state_dict(state)


class QNet(nn.Module):
    """Q-values of all actions. Policies call `net(obs, hidden)`; this network isn't recurrent."""

    def __init__(self, spaces: zx.Spaces) -> None:
        super().__init__()
        self.table = nn.Embedding(spaces.obs.n, spaces.num_actions)
        nn.init.constant_(self.table.weight, 1.0)  # optimistic, so untried actions are tried

    def forward(self, obs: torch.Tensor, hidden: None = None) -> tuple[torch.Tensor, None]:
        return self.table(obs), None


def train_after_episodes(loop: zx.TrainingLoop) -> None:
    """3. The trainer collects an episode, then makes the updates that its steps require."""
    cfg = loop.cfg
    with loop.running():
        for _ in loop.iterations():
            experience = loop.collector.collect(episodes=1)
            add_to_buffer(loop, cfg, experience.batch)
            num_updates = num_updates_due(loop, cfg.updates_per_step)
            metrics = update_from_samples(loop, cfg.batch_size, num_updates)
            loop.iteration_end(experience.episodes, metrics)


class Settings(OffPolicyConfig):
    """4. The settings name the other parts, and have defaults and descriptions for `zhixing show`."""

    trainer = train_after_episodes
    collector = CuriousActor

    bonus: NonNegative = 0.05
    """Weight β of the exploration bonus."""
    target_update_interval: Positive = 100
    """Updates between changes of the target network."""
    learning_starts: Count = 0
    gamma: Fraction = 0.95
    lr: PositiveFloat = 0.02


class QLearning(zx.Learner):
    """2. The learner computes the loss and moves the weights."""

    settings = Settings
    metrics = ("loss", "grad_norm")

    def __init__(self, cfg: Settings, spaces: zx.Spaces, device: torch.device | str = "cpu") -> None:
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        with self.seeded_init():  # initial weights depend only on the run's seed
            self.net = QNet(spaces).to(self.device)
        self.optimizer = self.make_optimizer(self.net.parameters(), cfg.lr)
        self.target_net = copy.deepcopy(self.net)
        self.target_updater = TargetUpdater((self.target_net, self.net))
        self.policy = GreedyPolicy(spaces, self.net, epsilon=lambda env_steps: 0.0, eval_epsilon=0.0)

    @zx.train_step
    def update(self, batch: zx.Batch) -> zx.Update:
        with torch.no_grad():
            target = td_target(batch, self.target_net(batch.next_obs)[0].amax(-1))
        q = self.net(batch.obs)[0].gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)  # [B]
        loss = F.mse_loss(q, target)
        grad_norm = self.optimizer.step(loss)
        if self.updates % self.cfg.target_update_interval == 0:
            self.target_updater.polyak_update(1.0)
        return zx.Update({"loss": loss, "grad_norm": grad_norm})


def main() -> dict:
    """5. The run."""
    return zx.train(
        "five_parts:QLearning", env="FrozenLake-v1", env__is_slippery=False, env_steps=6_000, stop_return=GOAL,
        eval_every=500,
    )  # fmt: skip


if __name__ == "__main__":
    result = main()
    print(f"mean return {result['final_return']:.2f} after {result['env_steps']:,} steps")
