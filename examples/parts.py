"""Parts: an actor, a buffer, a learner with your own network, and a loop: the platform's, then one written by hand.

Run it with `python parts.py`.
"""

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import zhixing as zx
from zhixing.algorithms.dqn import DQN
from zhixing.buffers import NStep, Prioritized

GOAL = 9.0  # of 10 right answers per episode; guessing finds 2.5


def my_net(space: gym.Space) -> nn.Module:
    """From observations to features; the learner puts its head on top."""
    return nn.Sequential(nn.Linear(space.shape[0], 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())


def with_the_platforms_loop(cfg: zx.config.OffPolicyConfig) -> float:
    env = zx.envs.make_vector("toy/match", num_envs=4)
    learner = DQN(cfg, env.spaces, net=my_net)
    actor = zx.Actor(learner.policy, env, learner.extra_fields, seed=cfg.seed)
    buffer = zx.Buffer({**env.spaces.fields(), **learner.extra_fields}, capacity=10_000, num_envs=4)
    zx.off_policy(zx.TrainingLoop(cfg, actor, learner, buffer=buffer))
    return score(learner)


def with_a_loop_by_hand(cfg: zx.config.OffPolicyConfig) -> float:
    """The same path of the data in the open, here with priorities and fewer, larger updates."""
    env = zx.envs.make_vector("toy/match", num_envs=4)
    learner = DQN(cfg, env.spaces, net=my_net)
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
    return score(learner)


def score(learner: zx.Learner) -> float:
    """Evaluations have an actor and environments of their own."""
    return zx.Actor(learner.policy, zx.envs.make_vector("toy/match", num_envs=10)).evaluate(100, seed=1).mean_return


def main() -> dict:
    torch.set_num_threads(1)  # small matrices are slower on several
    cfg = zx.config.load(
        algorithm="dqn", env="toy/match", seed=0, env_steps=6_000, learning_starts=500, updates_per_step=0.25
    )
    one = with_the_platforms_loop(cfg)
    two = with_a_loop_by_hand(cfg)
    print(f"the platform's loop: {one:.2f}, the loop by hand: {two:.2f}")
    return {"final_return": min(one, two)}


if __name__ == "__main__":
    main()
