"""Train a row with TorchRL: `python torchrl.py ROW`, with the row as JSON. Prints one line of JSON.

TorchRL provides no training loop; the one here is that of its examples, without logging.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

TITLE = "TorchRL"
REQUIREMENTS = ["torch==2.13.0", "torchrl==0.14.0", "gymnasium==1.4.0"]

Row = dict[str, Any]


class Parts(NamedTuple):
    policy: Any  # with exploration
    learn: Callable[[Any], None]  # updates from the collector's data
    optimizers: list[Any]


def ppo(row: Row, env: Any) -> Parts:
    import torch
    from tensordict.nn import TensorDictModule
    from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
    from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    spec = env.full_action_spec_unbatched
    logits = TensorDictModule(net(row, 4, 2), in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(
        logits, in_keys=["logits"], spec=spec, distribution_class=OneHotCategorical, return_log_prob=True
    )
    critic = ValueOperator(net(row, 4, 1), in_keys=["observation"])
    advantage = GAE(gamma=row["gamma"], lmbda=row["gae_lambda"], value_network=critic, average_gae=False)
    loss = ClipPPOLoss(
        actor_network=actor,
        critic_network=critic,
        clip_epsilon=row["clip_range"],
        entropy_coeff=row["entropy_coef"],
        critic_coeff=row["value_coef"],
        normalize_advantage=True,
        loss_critic_type="l2",
    )
    size = row["num_envs"] * row["rollout_steps"]
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(size), sampler=SamplerWithoutReplacement(), batch_size=row["minibatch_size"]
    )
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = adam(row, parameters)

    def learn(data: Any) -> None:
        with torch.no_grad():
            advantage(data)
        buffer.empty()
        buffer.extend(data.reshape(-1))
        for _ in range(row["epochs"] * size // row["minibatch_size"]):
            losses = loss(buffer.sample())
            step(optimizer, losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"], row)

    return Parts(actor, learn, [optimizer])


def dqn(row: Row, env: Any) -> Parts:
    from tensordict.nn import TensorDictSequential
    from torchrl.modules import EGreedyModule, QValueActor
    from torchrl.objectives import DQNLoss, HardUpdate

    spec = env.action_spec_unbatched
    actor = QValueActor(net(row, 4, 2), spec=spec, in_keys=["observation"])
    explore = EGreedyModule(annealing_num_steps=1, eps_init=row["epsilon"], eps_end=row["epsilon"], spec=spec)
    loss = DQNLoss(actor, loss_function="smooth_l1", delay_value=True)
    loss.make_value_estimator(gamma=row["gamma"])
    target = HardUpdate(loss, value_network_update_interval=row["target_update_interval"])
    optimizer, buffer = adam(row, list(actor.parameters())), make_buffer(row)

    def learn(data: Any) -> None:
        buffer.extend(data.reshape(-1))
        if len(buffer) > row["random_steps"]:
            step(optimizer, loss(buffer.sample())["loss"], row)
            target.step()

    return Parts(TensorDictSequential(actor, explore), learn, [optimizer])


def sac(row: Row, env: Any) -> Parts:
    from tensordict.nn import NormalParamExtractor, TensorDictModule
    from torch import nn
    from torchrl.modules import ProbabilisticActor, TanhNormal
    from torchrl.objectives import SACLoss, SoftUpdate

    spec = env.action_spec_unbatched
    body = nn.Sequential(net(row, 3, 2), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(body, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=spec,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": spec.space.low, "high": spec.space.high, "tanh_loc": False},
    )
    loss = SACLoss(actor, critic(row), num_qvalue_nets=2, loss_function="l2", delay_qvalue=True)
    loss.make_value_estimator(gamma=row["gamma"])
    target = SoftUpdate(loss, tau=row["tau"])
    parts = (weights(loss.actor_network_params), weights(loss.qvalue_network_params), [loss.log_alpha])
    optimizers, buffer = [adam(row, part) for part in parts], make_buffer(row)

    def learn(data: Any) -> None:
        buffer.extend(data.reshape(-1))
        if len(buffer) > row["random_steps"]:
            losses = loss(buffer.sample())
            (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            target.step()

    return Parts(actor, learn, optimizers)


def td3(row: Row, env: Any) -> Parts:
    from tensordict.nn import TensorDictModule, TensorDictSequential
    from torchrl.modules import AdditiveGaussianModule, TanhModule
    from torchrl.objectives import SoftUpdate, TD3Loss

    spec = env.action_spec_unbatched
    actor = TensorDictSequential(
        TensorDictModule(net(row, 3, 1), in_keys=["observation"], out_keys=["param"]),
        TanhModule(in_keys=["param"], out_keys=["action"], spec=spec),
    )
    noise = AdditiveGaussianModule(sigma_init=1.0, sigma_end=1.0, mean=0.0, std=row["exploration_noise"], spec=spec)
    loss = TD3Loss(
        actor,
        critic(row),
        num_qvalue_nets=2,
        loss_function="l2",
        delay_actor=True,
        delay_qvalue=True,
        action_spec=spec,
        policy_noise=row["target_policy_noise"],
        noise_clip=row["target_noise_clip"],
    )
    loss.make_value_estimator(gamma=row["gamma"])
    target = SoftUpdate(loss, tau=row["tau"])
    actor_optimizer = adam(row, weights(loss.actor_network_params))
    critic_optimizer = adam(row, weights(loss.qvalue_network_params))
    buffer, updates = make_buffer(row), 0

    def learn(data: Any) -> None:
        nonlocal updates
        buffer.extend(data.reshape(-1))
        if len(buffer) > row["random_steps"]:
            updates += 1
            batch = buffer.sample()
            step(critic_optimizer, loss.value_loss(batch)[0], row)
            if updates % row["policy_delay"] == 0:
                step(actor_optimizer, loss.actor_loss(batch)[0], row)
                target.step()

    return Parts(TensorDictSequential(actor, noise), learn, [actor_optimizer, critic_optimizer])


ALGORITHMS = {"ppo": ppo, "dqn": dqn, "sac": sac, "td3": td3}


def net(row: Row, inputs: int, outputs: int) -> Any:
    from torch import nn
    from torchrl.modules import MLP

    activation = {"tanh": nn.Tanh, "relu": nn.ReLU}[row["activation"]]
    return MLP(in_features=inputs, out_features=outputs, num_cells=row["hidden_sizes"], activation_class=activation)


def critic(row: Row) -> Any:
    from torchrl.modules import ValueOperator

    return ValueOperator(net(row, 4, 1), in_keys=["action", "observation"])


def make_buffer(row: Row) -> Any:
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    return TensorDictReplayBuffer(storage=LazyTensorStorage(row["replay_capacity"]), batch_size=row["batch_size"])


def weights(params: Any) -> list[Any]:
    return [part for part in params.flatten_keys().values() if part.requires_grad]  # not the action bounds


def adam(row: Row, parameters: list[Any]) -> Any:
    import torch

    return torch.optim.Adam(parameters, lr=row["lr"], eps=row["adam_epsilon"])


def step(optimizer: Any, loss: Any, row: Row) -> None:
    import torch

    loss.backward()
    if "max_grad_norm" in row:
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], row["max_grad_norm"])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def main() -> None:
    from measurement import print_measurement, take_snapshot

    sys.path.remove(str(Path(__file__).resolve().parent))  # otherwise `import torchrl` finds this file
    os.environ["TQDM_DISABLE"] = "1"
    warnings.simplefilter("ignore")
    import torch
    from torchrl.collectors import Collector
    from torchrl.envs import DoubleToFloat, GymEnv, SerialEnv, TransformedEnv

    row = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(row["seed"])
    single = row["num_envs"] == 1
    base = GymEnv(row["env"]) if single else SerialEnv(row["num_envs"], lambda: GymEnv(row["env"]))
    env = TransformedEnv(base, DoubleToFloat())
    parts = ALGORITHMS[row["algorithm"]](row, env)
    groups = [optimizer.param_groups[0]["params"] for optimizer in parts.optimizers]
    snapshots: list[Any] = []
    total, done = row["warmup_steps"] + row["measured_steps"], 0
    collector = Collector(
        env,
        parts.policy,
        frames_per_batch=row["num_envs"] * row.get("rollout_steps", 1),
        total_frames=total,
        init_random_frames=row.get("random_steps"),
    )
    for data in collector:
        parts.learn(data)
        done += data.numel()
        if done in (row["warmup_steps"], total):
            pairs = zip(parts.optimizers, groups, strict=True)
            steps = sum(int(optimizer.state[group[0]]["step"]) for optimizer, group in pairs)
            snapshots.append(take_snapshot(done, steps))
    print_measurement(snapshots, sum(p.numel() for group in groups for p in group), {TITLE: version("torchrl")})


if __name__ == "__main__":
    main()
