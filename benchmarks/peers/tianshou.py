"""A row of the benchmark done by Tianshou: `python tianshou.py ROW`, the row as JSON. Prints one line of JSON.

It has no limit of gradients in DQN. After each step its trainer looks through the whole replay for numbers that are
none, which is most of what one environment with a long replay costs there.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

TITLE = "Tianshou"
REQUIREMENTS = ["torch==2.13.0", "tianshou==2.0.1", "numpy==2.4.6", "gymnasium==1.4.0"]
CONSTRAINED = False  # one of its tools wants an older package than ours

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
        **twins(row, env),
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
        **twins(row, env),
    )


ALGORITHMS = {"ppo": ppo, "dqn": dqn, "sac": sac, "td3": td3}


def body(row: Row, env: Any, **further: Any) -> Any:
    from tianshou.utils.net.common import Net
    from torch import nn

    activation = {"tanh": nn.Tanh, "relu": nn.ReLU}[row["activation"]]
    shape = env.observation_space.shape
    return Net(state_shape=shape, hidden_sizes=row["hidden_sizes"], activation=activation, **further)


def twins(row: Row, env: Any) -> Row:
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


def params(row: Row, collector: Any, steps: int, mark: Any) -> Any:
    """Of its trainer, for so many environment steps."""
    from tianshou.trainer import OffPolicyTrainerParams, OnPolicyTrainerParams

    common: Row = {
        "max_epochs": 1,
        "epoch_num_steps": steps,
        "training_collector": collector,
        "test_collector": None,
        "training_fn": lambda epoch, env_step: mark(env_step),
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
    import telling

    sys.path.remove(str(Path(__file__).resolve().parent))  # else this file is what `import tianshou` finds
    import gymnasium as gym
    import torch
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv

    row = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(row["seed"])
    made: list[torch.optim.Adam] = []
    start = torch.optim.Adam.__init__

    def noted(self: Any, *words: Any, **named: Any) -> None:
        start(self, *words, **named)
        made.append(self)

    torch.optim.Adam.__init__ = noted  # its optimizers are hidden in several places
    env = gym.make(row["env"])
    algorithm = ALGORITHMS[row["algorithm"]](row, env)
    groups = [optimizer.param_groups[0]["params"] for optimizer in made]
    # each of two critics has an optimizer; the two step together and count as one
    sizes = [sum(p.numel() for p in group) for group in groups]
    counted = [i for i, size in enumerate(sizes) if size not in sizes[:i]]
    random_steps = row.get("random_steps", 0)
    marks: list[Any] = []

    def mark(env_step: int) -> None:
        if random_steps + env_step in (row["warmup_steps"], row["warmup_steps"] + row["measured_steps"]):
            steps = sum(int(made[i].state[groups[i][0]]["step"]) for i in counted)
            marks.append(telling.mark(env_step, steps))

    vector = DummyVectorEnv([lambda: gym.make(row["env"]) for _ in range(row["num_envs"])])
    capacity = row.get("replay_capacity", row["num_envs"] * row.get("rollout_steps", 1))
    replay = VectorReplayBuffer(capacity, row["num_envs"])
    collector = Collector(algorithm, vector, replay, exploration_noise=row["algorithm"] != "ppo")
    collector.reset()
    if random_steps:
        collector.collect(n_step=random_steps, random=True)
    steps = row["warmup_steps"] + row["measured_steps"] - random_steps
    algorithm.run_training(params(row, collector, steps, mark))
    mark(steps)
    telling.tell(marks, sum(sizes), {TITLE: version("tianshou")})


if __name__ == "__main__":
    main()
