"""Checks on the device of fake_npu.py. tests/unit/training/test_devices.py runs this file in a new process.

Prints the errors of all checks as JSON, by name.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import fake_npu  # first: registers the device
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete

import zhixing as zx
from zhixing.core.optimizer import Optimizer
from zhixing.envs.torch_native import TorchEnv, Transition
from zhixing.experiments.profiler import PartTimer
from zhixing.training.resolve import resolve_device

SHORT: dict[str, Any] = {
    "env_steps": 64, "num_envs": 2, "eval_every": 0, "eval_episodes": 1, "tensorboard": False, "quiet": True,
    "vector__backend": "serial", "net__hidden_sizes": [8, 8],
}  # fmt: skip
ROLLOUTS = {"rollout_steps": 16, "minibatch_size": 16, "epochs": 2}
REPLAY = {"learning_starts": 16, "batch_size": 8, "updates_per_step": 0.25}


class Momentum(torch.optim.SGD):
    """An optimizer of the user's."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr, momentum=0.9)


def weights_of(run: str) -> dict[str, torch.Tensor]:
    return zx.load(run).policy.state_dict()


def assert_equal_on_both_devices(algorithm: str, env: str, **settings: Any) -> None:
    """Train on the CPU and on the accelerator, which has the same arithmetic and random numbers."""
    runs = []
    for device in ("cpu", "npu"):
        runs.append(f"{algorithm}-{device}-{len(settings)}")
        zx.train(algorithm, env, out=runs[-1], device=device, **{**SHORT, **settings})
    expected, weights = map(weights_of, runs)
    for name, value in expected.items():
        assert torch.equal(weights[name], value), f"{name} differs"


def check_automatic_choice() -> None:
    for device in ("auto", "gpu"):
        assert resolve_device(zx.config.load(algorithm="ppo", env="CartPole-v1", device=device)).device == "npu"


def check_devices_are_not_mixed() -> None:
    """Otherwise the other checks would prove little."""
    try:
        torch.ones(2, device="npu") + torch.ones(2)
    except RuntimeError as error:
        assert "same device" in str(error)
    else:
        raise AssertionError("tensors on different devices were added")


def check_ppo_and_its_resume() -> None:
    assert_equal_on_both_devices("ppo", "CartPole-v1", **ROLLOUTS, max_grad_norm=0.1)
    zx.train(
        "ppo",
        "CartPole-v1",
        out="whole",
        device="npu",
        **{**SHORT, "env_steps": 128},
        **ROLLOUTS,
        lr_schedule="constant",
    )
    zx.train("ppo", "CartPole-v1", out="parts", device="npu", **SHORT, **ROLLOUTS, lr_schedule="constant")
    zx.Session.resume("parts", quiet=True, env_steps=128).run()
    whole, parts = weights_of("whole"), weights_of("parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def check_sac() -> None:
    assert_equal_on_both_devices("sac", "Pendulum-v1", **REPLAY)


def check_replay_on_the_device() -> None:
    """Exploration draws random actions at every step there, so the run differs from that on the CPU."""
    settings = {**SHORT, **REPLAY, "replay__on_device": True, "replay__prioritized": True}
    cfg = zx.config.load(
        algorithm="dqn", env="CartPole-v1", device="npu", **{k: v for k, v in settings.items() if k != "quiet"}
    )
    session = zx.Session(cfg, "dqn", quiet=True)
    stored = session.loop.buffer.ring.store.arrays
    assert {array.device.type for arrays in stored.values() for array in arrays} == {"npu"}
    before = {name: value.cpu().clone() for name, value in session.learner.policy.state_dict().items()}
    session.run()
    after = session.learner.policy.state_dict()
    assert any(not torch.equal(before[name], after[name].cpu()) for name in before)


def check_agent() -> None:
    obs = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    agents = [zx.load("pendulum", device=device) for device in ("cpu", "npu")]
    assert {parameter.device.type for parameter in agents[1].policy.parameters()} == {"npu"}
    for stochastic in (False, True):
        expected, actions = (agent.act(obs, stochastic=stochastic) for agent in agents)
        assert isinstance(actions, np.ndarray)
        np.testing.assert_allclose(actions, expected, rtol=1e-6)


def check_optimizers() -> None:
    for kind in ("adam", "adamw", "rmsprop", "sgd", "accelerator_checks:Momentum"):
        results = []
        for device in ("cpu", "npu"):
            torch.manual_seed(0)
            net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)).to(device)
            decay = {} if ":" in kind else {"weight_decay": 0.01}
            optimizer = Optimizer(net.parameters(), 0.1, kind=kind, max_grad_norm=0.5, **decay)
            x = torch.arange(6.0).reshape(2, 3).to(device)
            for _ in range(3):
                optimizer.step(net(x).square().mean())
            good = [p.detach().cpu().clone() for p in net.parameters()]
            optimizer.step(net(x).mean() * float("inf"))  # skipped
            assert float(optimizer.skipped) == 1.0, (kind, device)
            kept = [p.detach().cpu() for p in net.parameters()]
            assert all(torch.equal(before, now) for before, now in zip(good, kept, strict=True)), (kind, device)
            results.append(good)
        for expected, weights in zip(*results, strict=True):
            torch.testing.assert_close(weights, expected, msg=kind)


def check_loss_scaling() -> None:
    net = torch.nn.Linear(3, 1).to("npu")
    optimizer = Optimizer(net.parameters(), 0.1, loss_scaling=True)
    scale = float(optimizer.loss_scale)
    optimizer.step(net(torch.ones(2, 3, device="npu")).mean() * 1e38)  # overflows at this scale
    assert float(optimizer.loss_scale) == 0.5 * scale
    assert float(optimizer.skipped) == 0.0


def check_precision() -> None:
    for precision in ("bf16", "fp16"):
        zx.train("ppo", "CartPole-v1", out=precision, device="npu", precision=precision, **SHORT, **ROLLOUTS)


def check_environments_on_the_device() -> None:
    settings = {**SHORT, **ROLLOUTS, "vector__backend": "torch"}
    zx.train("ppo", "CartPole-v1", out="torch-env", device="npu", **settings)
    settings |= {"env_steps": 32, "minibatch_size": 16}
    zx.train("mappo", "skirmish/3m", out="torch-skirmish", device="npu", **settings)


class Counter(TorchEnv):
    """A task of the user's. With `moved`, its observations are on the CPU by mistake."""

    observation_space = Box(0.0, 9.0, (1,), np.float32)
    action_space = Discrete(2)
    max_episode_steps = 8

    def __init__(self, moved: bool = False) -> None:
        self.moved = moved

    def initial_state(self, num_envs: int, rng: torch.Generator) -> torch.Tensor:
        return torch.zeros(1, num_envs, device=rng.device)

    def transition(self, state: torch.Tensor, action: torch.Tensor) -> Transition:
        return Transition(state + 1.0, action.float(), torch.zeros_like(action, dtype=torch.bool))

    def observe(self, state: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"obs": state.T.cpu() if self.moved else state.T}


def check_custom_task_on_the_device() -> None:
    settings = {**SHORT, **ROLLOUTS, "vector__backend": "torch", "device": "npu"}
    name = "accelerator_checks:Counter"
    zx.train("ppo", name, out="task", **settings)
    try:
        zx.train("ppo", {"name": name, "moved": True}, out="moved", **settings)
    except zx.UserError as error:
        assert "is on cpu; create tensors on the device of the state, here npu" in str(error), error
    else:
        raise AssertionError("observations on another device were accepted")


def check_nested_observations_in_a_buffer_on_the_device() -> None:
    settings = {**SHORT, **REPLAY, "replay__on_device": True, "net__cnn": "simple"}
    zx.train("dqn", "dummy_envs:DictObsEnv", out="nested", device="npu", **settings)


def check_compiled_update() -> None:
    """Inductor has no code generator for this device, so the graph that it would compile runs eagerly."""
    import torch._inductor

    options = []

    def compile_graph(module: Any, examples: Any, options_: Any = None, **keywords: Any) -> Any:
        options.append(keywords.get("options", options_))
        return module

    original, torch._inductor.compile = torch._inductor.compile, compile_graph
    try:
        zx.train("ppo", "CartPole-v1", out="compiled", device="npu", compile=True, **SHORT, **ROLLOUTS)
    finally:
        torch._inductor.compile = original
    zx.train("ppo", "CartPole-v1", out="eager", device="npu", **SHORT, **ROLLOUTS)
    compiled, eager = weights_of("compiled"), weights_of("eager")
    for name, value in eager.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-3, atol=1e-5)
    assert options


def check_two_learners() -> None:
    """The second process registers the device because of `imports`."""
    settings = {**ROLLOUTS, "num_threads": 1, "distributed__learners": 2, "imports": ["fake_npu"]}
    assert_equal_on_both_devices("ppo", "CartPole-v1", **settings)


def check_profiler_waits_for_the_device() -> None:
    before = fake_npu.FakeModule.num_synchronized
    PartTimer(torch.device("npu")).now()
    assert fake_npu.FakeModule.num_synchronized == before + 1


def main() -> None:
    torch.set_num_threads(1)
    chosen = sys.argv[1:]
    errors = {}
    for name, check in list(globals().items()):
        if name.startswith("check_") and (not chosen or name in chosen):
            try:
                check()
                errors[name] = ""
            except BaseException:
                errors[name] = traceback.format_exc()
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
