"""Trained agents for deployment: `agent = zx.load(run)`, `action = agent.act(obs)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from zhixing import algorithms, envs
from zhixing.config import RunConfig
from zhixing.core.policy import Phase, Policy, as_tensor
from zhixing.core.seeding import derive_seed
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_leaves, tree_map
from zhixing.errors import UserError
from zhixing.training.run_folder import RunFolder, weights_must_fit


class Agent:
    """A trained policy with its normalizers and hidden state.

    It takes observations and returns actions as the environment defines them, for one environment or a batch.
    """

    def __init__(self, policy: Policy, spaces: Spaces, cfg: RunConfig, longest_episode: int = 0) -> None:
        """`longest_episode` is the length of the longest training episode in steps."""
        self.policy, self.spaces, self.cfg = policy.cpu().eval(), spaces, cfg
        self.longest_episode = longest_episode
        self.rng = torch.Generator().manual_seed(derive_seed(cfg.seed, "agent"))
        self._hidden: Tree = None

    def reset(self) -> None:
        """Clear the hidden state at the start of an episode."""
        self._hidden = None

    @torch.no_grad()
    def act(self, obs: Tree, mask: Any = None, explore: bool = False) -> Any:
        """Return the action for one observation, or the actions for a batch `[N,...]`.

        `mask` `[num_actions]` or `[N,num_actions]` marks the allowed actions. With `explore`, actions are sampled with
        the exploration of the end of training.
        """
        obs, is_batch = self._to_batch(obs)
        num = len(tree_leaves(obs)[0])
        if self._hidden is None:
            self._hidden = self.policy.initial_hidden(num)
        elif len(tree_leaves(self._hidden)[0]) != num:
            raise UserError(
                f"the agent's hidden state is that of {len(tree_leaves(self._hidden)[0])} episodes, but {num} "
                f"observations were given; call reset() before the number changes"
            )
        if mask is not None:
            mask = torch.as_tensor(np.asarray(mask, bool).reshape(num, *self.spaces.agents, -1))
        phase = Phase.COLLECT if explore else Phase.EVAL
        # after all environment steps, so schedules of the exploration have their final values
        decision = self.policy.act(
            as_tensor(obs, torch.device("cpu")), self._hidden, mask, phase, self.rng, self.cfg.env_steps
        )
        self._hidden = decision.hidden
        action = self.spaces.to_env(decision.action.numpy())
        return action if is_batch else action[0]

    def _to_batch(self, obs: Tree) -> tuple[Tree, bool]:
        """Return observations `[N,...]` with the dtypes of the space, and whether the input was a batch."""
        fields = self.spaces.fields()["obs"]
        try:
            arrays = tree_map(lambda field, leaf: np.asarray(leaf, field.dtype), fields, obs)
            shapes = [(leaf.shape, field.shape) for leaf, field in _pairs(arrays, fields)]
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise UserError(f"the observation doesn't fit the space {self.spaces.obs}: {error}") from None
        if all(given == expected for given, expected in shapes):
            return tree_map(lambda leaf: leaf[None], arrays), False
        if all(given[1:] == expected for given, expected in shapes):
            return arrays, True
        given = [given for given, _ in shapes]
        raise UserError(
            f"the observation has shape {given[0] if len(given) == 1 else given}, which doesn't fit the space "
            f"{self.spaces.obs}"
        )


def _pairs(arrays: Tree, fields: Tree) -> list[tuple[Any, Any]]:
    pairs: list[tuple[Any, Any]] = []
    tree_map(lambda field, leaf: pairs.append((leaf, field)), fields, arrays)
    return pairs


def load(
    run: str | Path, checkpoint: str | int = "last", *, trust: bool = False, env: Any = None, net: Any = None
) -> Agent:
    """Load the agent of a run.

    Args:
        run: Run folder, or the name of an agent in `zhixing zoo`.
        checkpoint: `last` for the final weights, `best` for the best evaluation, or the step of a checkpoint.
        trust: Allow the import of code that the run names.
        env: Class or function to use if the run's environment can't be imported by name.
        net: Class to use if the run's network can't be imported by name.
    """
    folder = RunFolder.open(run)
    cfg = folder.read_config(trust, env, net)
    with folder.restricted():
        vector = envs.make_small_vector(envs.RegisteredEnv(cfg.env.name, cfg.env.options), 1, cfg.vector)
        spaces = vector.spaces
        vector.close()
        policy = algorithms.get(cfg.algorithm).make(cfg, spaces, "cpu").policy
    state = folder.load_agent(checkpoint)
    with weights_must_fit(folder):
        policy.load_state_dict(state["policy"])
    return Agent(policy, spaces, cfg, state["longest_episode"])
