"""Train a row with SBX (Stable-Baselines3 in JAX): `python sbx.py ROW`, with the row as JSON. Prints one line of JSON.

SBX always compiles its updates. Its DQN doesn't clip gradients.
"""

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
ONE_CORE = True  # XLA runs independent operations in extra threads whatever the flags: 1.7 threads in SAC


def limit_threads() -> None:
    """Limit JAX to one thread as far as flags can. Call this before JAX is imported."""
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["JAX_PLATFORMS"] = "cpu"


def main() -> None:
    from measurement import print_measurement, use_one_core

    row: dict[str, Any] = json.loads(sys.argv[1])
    limit_threads()
    if row["one_core"]:
        use_one_core()
    here = str(Path(__file__).resolve().parent)
    sys.path.remove(here)  # otherwise `import sbx` finds this file
    import flax.linen as nn
    import jax
    import sbx as library
    import torch

    sys.path.append(here)
    import sb3

    torch.set_num_threads(1)
    if row["algorithm"] == "dqn":
        del row["max_grad_norm"]
    model = sb3.ALGORITHMS[row["algorithm"]](library, row, {"tanh": nn.tanh, "relu": nn.relu})
    owners = {"actor_state": model.policy, "vf_state": model.policy, "qf_state": model.policy, "ent_coef_state": model}
    owners = {name: owner for name, owner in owners.items() if hasattr(owner, name)}

    def optimizer_steps() -> int:
        # the optimizers of PPO's two networks step together and count as one
        return sum(int(getattr(owner, name).step) for name, owner in owners.items() if name != "vf_state")

    networks = [getattr(owner, name).params for name, owner in owners.items()]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(networks))
    snapshots = sb3.train(model, row, optimizer_steps)
    print_measurement(snapshots, parameters, {TITLE: version("sbx-rl")}, ("jax", "gymnasium"))


if __name__ == "__main__":
    main()
