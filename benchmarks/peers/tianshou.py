"""Train a row with Tianshou: `python tianshou.py ROW`, with the row as JSON. Prints one line of JSON.

Its DQN doesn't clip gradients. After each step, its trainer checks the whole replay buffer for NaN, which takes most of
the time with one environment and a large buffer.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

TITLE = "Tianshou"
REQUIREMENTS = ["torch==2.13.0", "tianshou==2.0.1", "numpy==2.4.6", "gymnasium==1.4.0"]
CONSTRAINED = False  # a dependency requires an older package than constraints.txt

Row = dict[str, Any]


def ppo(row: Row, env: Any) -> Any:
    from tianshou.algorithm import PPO
    from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
    from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic

    actor = DiscreteActor(preprocess_net=body(row, env), action_shape=env.action_space.n, softmax_output=False)
    return PPO(
        policy=DiscreteActorPolicy(actor=actor, action_space=env.action_space),
        critic=DiscreteCritic(preprocess_net=body(row, env)),
        optim=adam(row),
        eps_clip=row["clip_range"],
        vf_coef=row["value_coef"],
        ent_coef=row["entropy_coef"],
        max_grad_norm=row["max_grad_norm"],
        gae_lambda=row["gae_lambda"],
        gamma=row["gamma"],
    )


def dqn(row: Row, env: Any) -> Any:
    from tianshou.algorithm import DQN
    from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy

    net = body(row, env, action_shape=env.action_space.n)
    return DQN(
        policy=DiscreteQLearningPolicy(model=net, action_space=env.action_space, eps_training=row["epsilon"]),
        optim=adam(row),
        gamma=row["gamma"],
        target_update_freq=row["target_update_interval"],
        is_double=False,
        huber_loss_delta=1.0,
    )


def sac(row: Row, env: Any) -> Any:
    from tianshou.algorithm import SAC
    from tianshou.algorithm.modelfree.sac import AutoAlpha, SACPolicy
    from tianshou.utils.net.continuous import ContinuousActorProbabilistic

    actor = ContinuousActorProbabilistic(
        preprocess_net=body(row, env),
        action_shape=env.action_space.shape,
        unbounded=True,
        conditioned_sigma=True,
    )
    return SAC(
        policy=SACPolicy(actor=actor, action_space=env.action_space),
        alpha=AutoAlpha(-1.0, 0.0, adam(row)),
        **twin_critics(row, env),
    )


def td3(row: Row, env: Any) -> Any:
    from tianshou.algorithm import TD3
    from tianshou.algorithm.modelfree.ddpg import ContinuousDeterministicPolicy
    from tianshou.exploration import GaussianNoise
    from tianshou.utils.net.continuous import ContinuousActorDeterministic

    actor = ContinuousActorDeterministic(preprocess_net=body(row, env), action_shape=env.action_space.shape)
    noise = GaussianNoise(sigma=row["exploration_noise"])
    return TD3(
        policy=ContinuousDeterministicPolicy(actor=actor, exploration_noise=noise, action_space=env.action_space),
        policy_noise=row["target_policy_noise"],
        noise_clip=row["target_noise_clip"],
        update_actor_freq=row["policy_delay"],
        **twin_critics(row, env),
    )


ALGORITHMS = {"ppo": ppo, "dqn": dqn, "sac": sac, "td3": td3}


def body(row: Row, env: Any, **options: Any) -> Any:
    from tianshou.utils.net.common import Net
    from torch import nn

    activation = {"tanh": nn.Tanh, "relu": nn.ReLU}[row["activation"]]
    shape = env.observation_space.shape
    return Net(state_shape=shape, hidden_sizes=row["hidden_sizes"], activation=activation, **options)


def twin_critics(row: Row, env: Any) -> Row:
    from tianshou.utils.net.continuous import ContinuousCritic

    critics = [
        ContinuousCritic(preprocess_net=body(row, env, action_shape=env.action_space.shape, concat=True))
        for _ in range(2)
    ]
    return {
        "policy_optim": adam(row),
        "critic": critics[0],
        "critic_optim": adam(row),
        "critic2": critics[1],
        "critic2_optim": adam(row),
        "tau": row["tau"],
        "gamma": row["gamma"],
    }


def adam(row: Row) -> Any:
    from tianshou.algorithm.optim import AdamOptimizerFactory

    return AdamOptimizerFactory(lr=row["lr"], eps=row["adam_epsilon"])


def trainer_params(row: Row, collector: Any, steps: int, snapshot: Any) -> Any:
    """Make the trainer's parameters for a number of environment steps."""
    from tianshou.trainer import OffPolicyTrainerParams, OnPolicyTrainerParams

    common: Row = {
        "max_epochs": 1,
        "epoch_num_steps": steps,
        "training_collector": collector,
        "test_collector": None,
        "training_fn": lambda epoch, env_step: snapshot(env_step),
        "verbose": False,
        "show_progress": False,
    }
    if row["algorithm"] == "ppo":
        return OnPolicyTrainerParams(
            collection_step_num_env_steps=row["num_envs"] * row["rollout_steps"],
            batch_size=row["minibatch_size"],
            update_step_num_repetitions=row["epochs"],
            **common,
        )
    return OffPolicyTrainerParams(collection_step_num_env_steps=row["num_envs"], batch_size=row["batch_size"], **common)


def main() -> None:
    from measurement import print_measurement, take_snapshot

    sys.path.remove(str(Path(__file__).resolve().parent))  # otherwise `import tianshou` finds this file
    import gymnasium as gym
    import torch
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv

    row = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(row["seed"])
    optimizers: list[torch.optim.Adam] = []
    original_init = torch.optim.Adam.__init__

    def recording_init(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        optimizers.append(self)

    torch.optim.Adam.__init__ = recording_init  # Tianshou keeps its optimizers in several private attributes
    env = gym.make(row["env"])
    algorithm = ALGORITHMS[row["algorithm"]](row, env)
    groups = [optimizer.param_groups[0]["params"] for optimizer in optimizers]
    # the optimizers of twin critics step together and count as one
    sizes = [sum(p.numel() for p in group) for group in groups]
    counted = [i for i, size in enumerate(sizes) if size not in sizes[:i]]
    random_steps = row.get("random_steps", 0)
    snapshots: list[Any] = []

    def snapshot(env_step: int) -> None:
        if random_steps + env_step in (row["warmup_steps"], row["warmup_steps"] + row["measured_steps"]):
            steps = sum(int(optimizers[i].state[groups[i][0]]["step"]) for i in counted)
            snapshots.append(take_snapshot(env_step, steps))

    vector = DummyVectorEnv([lambda: gym.make(row["env"]) for _ in range(row["num_envs"])])
    capacity = row.get("replay_capacity", row["num_envs"] * row.get("rollout_steps", 1))
    replay = VectorReplayBuffer(capacity, row["num_envs"])
    collector = Collector(algorithm, vector, replay, exploration_noise=row["algorithm"] != "ppo")
    collector.reset()
    if random_steps:
        collector.collect(n_step=random_steps, random=True)
    steps = row["warmup_steps"] + row["measured_steps"] - random_steps
    algorithm.run_training(trainer_params(row, collector, steps, snapshot))
    snapshot(steps)
    print_measurement(snapshots, sum(sizes), {TITLE: version("tianshou")})


if __name__ == "__main__":
    main()
