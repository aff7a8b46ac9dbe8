"""Train without a session: build the learner, actor and buffer, then call a trainer or write the loop yourself.

Run it with `python building_blocks.py`.
"""

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import zhixing as zx
from zhixing.algorithms.dqn import DQN
from zhixing.buffers import NStep, Prioritized

GOAL = 9.0  # mean return; the best is 10, random actions get 2.5


def make_net(space: gym.Space) -> nn.Module:
    """Build a network from observations to features `[B,64]`; the learner adds the output head."""
    return nn.Sequential(nn.Linear(space.shape[0], 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())


def train_with_trainer(cfg: zx.config.OffPolicyConfig) -> float:
    env = zx.envs.make_vector("toy/match", num_envs=4)
    learner = DQN(cfg, env.spaces, net=make_net)
    actor = zx.Actor(learner.policy, env, learner.extra_fields, seed=cfg.seed)
    buffer = zx.Buffer({**env.spaces.fields(), **learner.extra_fields}, capacity=10_000, num_envs=4)
    zx.off_policy(zx.TrainingLoop(cfg, actor, learner, buffer=buffer))
    return evaluate(learner)


def train_with_custom_loop(cfg: zx.config.OffPolicyConfig) -> float:
    """Do the same in a hand-written loop, with prioritized replay and fewer, larger updates."""
    env = zx.envs.make_vector("toy/match", num_envs=4)
    learner = DQN(cfg, env.spaces, net=make_net)
    actor = zx.Actor(learner.policy, env, learner.extra_fields, seed=cfg.seed)
    fields = {**env.spaces.fields(), **learner.extra_fields}
    buffer = zx.Buffer(fields, capacity=10_000, num_envs=4, sampler=Prioritized(), view=NStep(1, cfg.gamma))
    rng = np.random.default_rng(cfg.seed)

    while actor.env_steps < cfg.env_steps:
        phase = zx.Phase.RANDOM if actor.env_steps < cfg.learning_starts else zx.Phase.COLLECT
        experience = actor.collect(steps=4, phase=phase)  # 4 steps in each of 4 environments
        buffer.add(experience.batch)
        if phase is zx.Phase.RANDOM:
            continue
        for _ in range(4):
            batch = buffer.sample(256, rng)
            update = learner.update(batch)
            buffer.set_priority(batch.index, update.priority)
    return evaluate(learner)


def evaluate(learner: zx.Learner) -> float:
    """Return the mean return of 100 episodes, played in separate environments."""
    actor = zx.Actor(learner.policy, zx.envs.make_vector("toy/match", num_envs=10))
    return actor.evaluate(100, seed=1).mean_return


def main() -> dict:
    torch.set_num_threads(1)  # faster for small matrices
    cfg = zx.config.load(
        algorithm="dqn", env="toy/match", seed=0, env_steps=6_000, learning_starts=500, updates_per_step=0.25
    )
    trainer, custom = train_with_trainer(cfg), train_with_custom_loop(cfg)
    print(f"trainer: {trainer:.2f}, custom loop: {custom:.2f}")
    return {"final_return": min(trainer, custom)}


if __name__ == "__main__":
    main()
