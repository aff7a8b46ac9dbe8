"""A row of the benchmark done by SBX (Stable-Baselines3 in JAX): `python sbx.py ROW`, the row as JSON. Prints one line
of JSON. Its updates are compiled always, and it has no limit of gradients in DQN."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

TITLE = "SBX"
REQUIREMENTS = ["torch==2.13.0", "sbx-rl==0.28.0", "stable-baselines3==2.9.2", "gymnasium==1.4.0"]
ALGORITHMS = ("ppo", "dqn", "sac", "td3")
ONE_CORE = True  # XLA gives independent products to threads of its own, whatever it is told: 1.7 of them in SAC


def one_thread() -> None:
    """Before JAX is imported."""
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["JAX_PLATFORMS"] = "cpu"


def main() -> None:
    import telling

    row: dict[str, Any] = json.loads(sys.argv[1])
    one_thread()
    if row["one_core"]:
        telling.one_core()
    # this file has the library's name, and its folder comes first
    sys.path.remove(str(Path(__file__).resolve().parent))
    import flax.linen as nn
    import jax
    import sbx as library
    import torch

    sys.path.append(str(Path(__file__).resolve().parent))
    import sb3

    torch.set_num_threads(1)
    if row["algorithm"] == "dqn":
        del row["max_grad_norm"]
    model = sb3.ALGORITHMS[row["algorithm"]](library, row, {"tanh": nn.tanh, "relu": nn.relu})
    names = {"actor_state": model.policy, "vf_state": model.policy, "qf_state": model.policy, "ent_coef_state": model}
    held = {name: owner for name, owner in names.items() if hasattr(owner, name)}
    # each of PPO's two networks has an optimizer; the two step together and count as one
    counted = {name: owner for name, owner in held.items() if name != "vf_state"}

    def optimizer_steps() -> int:
        return sum(int(getattr(owner, name).step) for name, owner in counted.items())

    networks = [getattr(owner, name).params for name, owner in held.items()]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(networks))
    marks = sb3.timed(model, row, optimizer_steps)
    telling.tell(marks, parameters, {TITLE: version("sbx-rl")}, ("jax", "gymnasium"))


if __name__ == "__main__":
    main()
