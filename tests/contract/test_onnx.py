"""An exported network acts as its policy: the same greedy actions in ONNX Runtime, for every algorithm."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import has_setting, multi_agent
from dummy_envs import HYBRID
from feature_table import documented_features
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary

import zhixing as zx
from zhixing.core.policy import Phase, as_tensor
from zhixing.core.spaces import Spaces
from zhixing.core.tree import tree_leaves, tree_map
from zhixing.training.deploy import ActionModule, write_onnx, write_torch

ROWS = 1000
OBS = Box(-1.0, 1.0, (5,), np.float32)
CHOICES, RANGE = Discrete(4, start=2), Box(np.float32([-2, 0]), np.float32([2, 1]))


@pytest.fixture(scope="module", autouse=True)
def runtime() -> Any:
    """ONNX Runtime. Torch parses the source of its 500 operators at each export, which takes longer than the rest."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    registration = pytest.importorskip("torch.onnx._internal.exporter._registration")
    with pytest.MonkeyPatch.context() as patch:
        from_torchlib = staticmethod(functools.cache(registration.ONNXRegistry.from_torchlib))
        patch.setattr(registration.ONNXRegistry, "from_torchlib", from_torchlib)
        yield runtime


def make_policy(algorithm: str, spaces: Spaces, scale: float = 0.3, **settings: Any) -> zx.Policy:
    if has_setting(zx.algorithms.get(algorithm).settings, "net__hidden_sizes"):
        settings = {"net__hidden_sizes": [8], **settings}
    cfg = zx.config.load(algorithm=algorithm, preset=False, **{"env": "toy/match", **settings})
    policy = zx.algorithms.get(algorithm).make(cfg, spaces).policy.eval()
    with torch.no_grad():
        for parameter in policy.parameters():  # initial policies hardly depend on the observation
            parameter.add_(scale * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return policy


def env_spaces(name: str) -> Spaces:
    env = zx.envs.make_vector(name, 1, backend="serial")
    env.close()
    return env.spaces


def random_inputs(policy: zx.Policy, spaces: Spaces) -> tuple[Any, Any, Any]:
    """Return observations, masks and hidden states."""
    rng = np.random.default_rng(0)
    fields = spaces.fields()

    def draw(field: Any) -> np.ndarray:
        shape = (ROWS, *field.shape)
        if np.issubdtype(field.dtype, np.floating):
            return rng.uniform(-1, 1, shape).astype(field.dtype)
        return rng.integers(0, 256 if field.dtype == np.uint8 else 3, shape).astype(field.dtype)

    obs = tree_map(draw, fields["obs"])
    mask = None
    if "mask" in fields:
        mask = rng.random((ROWS, *fields["mask"].shape)) < 0.5
        starts = np.cumsum([0, *spaces.layout.sizes[:-1]])
        mask[..., starts] |= ~np.logical_or.reduceat(mask, starts, -1)  # each choice needs an allowed value
    hidden = policy.initial_hidden(ROWS)
    if hidden is not None:
        hidden = tree_map(lambda leaf: torch.from_numpy(draw(leaf.numpy()[0])), hidden)
    return obs, mask, hidden


def check_parity(runtime: Any, policy: zx.Policy, spaces: Spaces, file: Path) -> list[str]:
    """Compare actions and hidden states over random observations; return the names of the inputs."""
    obs, mask, hidden = random_inputs(policy, spaces)
    module = ActionModule(policy, spaces)
    write_onnx(module, file, {"algorithm": "any"})
    with torch.no_grad():
        masks = None if mask is None else torch.from_numpy(mask)
        expected = policy.act(as_tensor(obs, torch.device("cpu")), hidden, masks, Phase.EVAL, torch.Generator(), 0)
    session = runtime.InferenceSession(str(file))
    names = [port.name for port in session.get_inputs()]
    given = [*tree_leaves(obs), *([] if mask is None else [mask])]
    given += [] if module.hidden is None else [leaf.numpy() for leaf in tree_leaves(hidden)]
    results = session.run(None, dict(zip(names, given, strict=True)))
    parts = tree_leaves(spaces.to_env(expected.action.numpy()))
    next_hidden = results[len(parts) :]
    for action, wanted in zip(results, parts, strict=False):
        assert (action.dtype, action.shape) == (wanted.dtype, wanted.shape)
        assert len(np.unique(wanted.reshape(ROWS, -1), axis=0)) > 1  # else equal actions would prove nothing
        if wanted.dtype.kind == "f":
            np.testing.assert_allclose(action, wanted, atol=1e-5)
        else:
            assert np.array_equal(action, wanted)
    if module.hidden is not None:
        for leaf, reference in zip(next_hidden, tree_leaves(expected.hidden), strict=True):
            np.testing.assert_allclose(leaf, reference.numpy(), atol=1e-5)
    return names


def test_network_has_the_same_actions_in_onnx_runtime(algorithm: str, runtime: Any, tmp_path: Path) -> None:
    cell = documented_features()[algorithm]["onnx"]
    if cell == "no":
        game = "pettingzoo/tictactoe"
        spaces = env_spaces(game)
        with pytest.raises(zx.UserError, match="plan by tree search can't be exported as one network"):
            ActionModule(make_policy(algorithm, spaces, env=game), spaces)
        return
    if cell == "as its policies":
        policies = {"first": {"algorithm": "ppo"}, "second": {"script": "random"}}
        settings = {"policies": policies, "agents": {"agent_0": "first", "*": "second"}}
        policy = make_policy(algorithm, env_spaces("toy/team-match"), **settings).member("first")
        check_parity(runtime, policy, policy.spaces, tmp_path / "agent.onnx")
        return
    assert cell == "yes"
    agents = 3 if multi_agent(algorithm) else 1
    try:
        spaces = Spaces(OBS, CHOICES, agents)
        policy = make_policy(algorithm, spaces)
    except zx.UserError:
        spaces = Spaces(OBS, RANGE, agents)
        policy = make_policy(algorithm, spaces)
    check_parity(runtime, policy, spaces, tmp_path / "agent.onnx")


@pytest.mark.parametrize(
    "case", ["ppo gru, dict and mask", "dqn lstm", "ppo box", "sac box, image", "sac simba", "ppo simba"]
)
def test_memory_masks_dicts_and_images_have_parity(case: str, runtime: Any, tmp_path: Path) -> None:
    algorithm = case.split()[0]
    spaces, settings, names = Spaces(OBS, CHOICES), {}, ["obs"]
    if "gru" in case:
        parts = {"cue": Discrete(3), "more": Dict({"image": Box(0, 255, (1, 12, 12), np.uint8), "x": OBS})}
        spaces = Spaces(Dict(parts), CHOICES, mask=4)
        settings = {"net__recurrent": "gru", "net__recurrent_size": 6, "net__cnn": "simple"}
        names = ["obs.cue", "obs.more.image", "obs.more.x", "mask", "hidden.0", "hidden.1"]
    elif "lstm" in case:
        settings, names = {"net__recurrent": "lstm", "net__recurrent_size": 6}, ["obs", "hidden.0", "hidden.1"]
    elif "image" in case:
        spaces, settings = Spaces(Box(0, 255, (12, 12, 3), np.uint8), RANGE), {"net__cnn": "simple"}
    else:
        spaces = Spaces(OBS, RANGE)
        settings = {"net__kind": "simba"} if "simba" in case else {}
    policy = make_policy(algorithm, spaces, 0.02 if "image" in str(names) + case else 0.3, **settings)
    assert check_parity(runtime, policy, spaces, tmp_path / "agent.onnx") == names


@pytest.mark.parametrize("name", ["ppo", "bc"])
def test_composite_actions_have_one_output_per_part(name: str, runtime: Any, tmp_path: Path) -> None:
    spaces = Spaces(OBS, HYBRID, mask=8)  # 3 values of part, 2 + 3 of tools
    policy = make_policy(name, spaces, 0.5)
    assert check_parity(runtime, policy, spaces, tmp_path / "agent.onnx") == ["obs", "mask"]
    outputs = runtime.InferenceSession(str(tmp_path / "agent.onnx")).get_outputs()
    parts = ["part", "switches", "tools.0", "tools.1", "turn"]
    assert [port.name for port in outputs] == [f"action.{part}" for part in parts]
    bits = Spaces(OBS, MultiBinary(3))
    check_parity(runtime, make_policy(name, bits), bits, tmp_path / "bits.onnx")


def test_torch_program_has_parity_for_any_number_of_rows(tmp_path: Path) -> None:
    spaces = Spaces(OBS, RANGE)
    policy = make_policy("td3", spaces)
    write_torch(ActionModule(policy, spaces), tmp_path / "agent.pt2")
    program = torch.export.load(tmp_path / "agent.pt2").module()
    obs, _, _ = random_inputs(policy, spaces)
    with torch.no_grad():
        wanted = spaces.to_env(
            policy.act(as_tensor(obs, torch.device("cpu")), None, None, Phase.EVAL, None, 0).action.numpy()
        )
    for rows in (1, ROWS):
        np.testing.assert_allclose(program(torch.from_numpy(obs[:rows]))[0].numpy(), wanted[:rows], atol=1e-6)
