"""Trained agents for deployment: `agent = zx.load(run)`, `action = agent.act(obs)`. They need no environment."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from zhixing import algorithms, config, envs
from zhixing.config import RunConfig
from zhixing.core.policy import Phase, Policy, as_tensor
from zhixing.core.seeding import derive_seed
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_leaves, tree_map
from zhixing.envs.registry import frame_options
from zhixing.envs.wrappers.frames import FrameProcessor, StackProcessor, make_processor
from zhixing.errors import UserError
from zhixing.nets.joint_policy import JointPolicy
from zhixing.nets.torso import reset_hidden
from zhixing.training.resolve import NO_ENV, resolve_device
from zhixing.training.run_folder import RunFolder, RunPath, weights_must_fit
from zhixing.utils import importing

KEPT: Any = object()  # the agent's own hidden state


class Agent:
    """A trained policy with its normalizers and hidden state. Acts in the environment's terms, for one or many."""

    def __init__(
        self,
        policy: Policy,
        spaces: Spaces,
        cfg: RunConfig,
        longest_episode: int = 0,
        *,
        device: torch.device | str = "cpu",
        frames: FrameProcessor | StackProcessor | None = None,
        steps: int = 0,
        folder: RunFolder | None = None,
    ) -> None:
        """`longest_episode` is the number of steps of the longest episode in training.

        `frames` makes observations from screens or from single observations, for agents that learned from stacks.
        `steps` is the number of training steps, and `folder` that of the run.
        """
        self.device = torch.device(device)
        self.policy, self.spaces, self.cfg = policy.to(self.device).eval(), spaces, cfg
        self.longest_episode, self.frames = longest_episode, frames
        self.steps, self.folder = steps, folder
        self.rng = torch.Generator(self.device).manual_seed(derive_seed(cfg.seed, "agent"))
        self._hidden: Tree = None

    def state_dict(self) -> dict[str, Any]:
        """Return the weights and counters, as `RunFolder.load_agent` does."""
        return {"steps": self.steps, "policy": self.policy.state_dict(), "longest_episode": self.longest_episode}

    def reset(self, ended: Any = None) -> None:
        """Start new episodes: clear the hidden state and the stack of observations.

        With `ended [N]`, clear the hidden state only of the episodes where it is true.
        """
        if ended is None:
            self._hidden = None
            if self.frames is not None:
                self.frames.reset()
        elif self._hidden is not None:
            self._hidden = reset_hidden(self._hidden, torch.as_tensor(ended, dtype=torch.bool, device=self.device))

    def initial_hidden(self, num: int = 1) -> Tree:
        """Return the hidden state at the start of `num` episodes: tensors `[num,...]`, or None without a memory."""
        with torch.no_grad():
            return self.policy.initial_hidden(num)

    def preprocess(self, frame: Any) -> Any:
        """Return the observation of the agent for the environment's current one, a frame. `reset` starts a new stack.

        For agents that learned from screens, a frame is a uint8 screen `[H,W]` or `[H,W,C]`, or a list of those since
        the last action. Grayscale, resizing and stacking are those of training.
        """
        if self.frames is None:
            raise UserError(f"this agent of {self.cfg.env.name} takes no screens; pass observations to act(obs)")
        return self.frames(frame)

    @torch.no_grad()
    def act(self, obs: Tree, mask: Any = None, stochastic: bool = False, hidden: Tree = KEPT) -> Any:
        """Return the action for one observation, or the actions for a batch `[N,...]`.

        An action is an element of the environment's space. With a batch, its arrays have a first dimension N.
        `mask` `[n]` or `[N,n]` marks the allowed actions.
        Actions are those of evaluations, or with `stochastic` those of training, with the exploration at its end.
        The agent keeps its hidden state from call to call. With `hidden`, which `initial_hidden` makes, it uses that
        instead and returns the action and the next hidden state.
        """
        obs, is_batch = self._to_batch(obs)
        num = len(tree_leaves(obs)[0])
        if hidden is KEPT and self._hidden is None:
            self._hidden = self.policy.initial_hidden(num)
        before = self._hidden if hidden is KEPT else hidden
        before_num = num if before is None else len(tree_leaves(before)[0])
        if before_num != num:
            raise UserError(
                f"the hidden state is that of {before_num} episodes, but {num} observations were given; "
                f"call reset() first, or pass hidden=agent.initial_hidden({num})"
            )
        if mask is not None:
            mask = torch.as_tensor(np.asarray(mask, bool).reshape(num, *self.spaces.agents, -1), device=self.device)
        phase = Phase.COLLECT if stochastic else Phase.EVAL
        # env_steps: with the exploration at the end of training
        decision = self.policy.act(as_tensor(obs, self.device), before, mask, phase, self.rng, self.cfg.env_steps)
        actions = decision.action.cpu().numpy()
        action = self.spaces.to_env(actions if is_batch else actions[0])
        if hidden is KEPT:
            self._hidden = decision.hidden
            return action
        return action, decision.hidden

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
    run: RunPath,
    checkpoint: str | int = "last",
    *,
    device: str | torch.device = "cpu",
    policy: str | None = None,
    trust: bool = False,
    env: Any = None,
    net: Any = None,
) -> Agent:
    """Load the agent of a run.

    The environment isn't made and its code isn't imported, except for runs of versions before `spaces.json`.

    Args:
        run: Run folder, or the name of an agent in `zhixing zoo`.
        checkpoint: `last` for the final weights, `best` for the best evaluation, or the step of a checkpoint.
        device: Device of torch, such as `cuda`, or `auto`.
        policy: Policy of a run with several. It acts on the observations of single agents, or of its team.
        trust: Allow the import of code that the run names.
        env: Class or function to use if the run's environment is needed and can't be imported by name.
        net: Class to use if the run's network can't be imported by name.
    """
    folder = RunFolder.open(run)
    cfg = folder.read_config(trust, env, net, without_env=folder.spaces_file.is_file())
    return load_agent(folder, cfg, checkpoint, device, policy)


def load_agent(
    folder: RunFolder,
    cfg: RunConfig,
    checkpoint: str | int = "last",
    device: str | torch.device = "cpu",
    policy_name: str | None = None,
) -> Agent:
    """Return the agent in a folder whose configuration is read."""
    device = resolve_device(cfg.model_copy(update={"device": str(device)})).device
    with folder.restricted():
        spaces, frames = read_spaces(folder, cfg)
        acting = cfg.model_copy(update={"compile": False})
        policy = algorithms.get(cfg.algorithm).make(acting, spaces, device).policy
    processor: FrameProcessor | StackProcessor | None = None
    if frames is not None:
        processor = make_processor(frames, spaces.obs)
    elif spaces.stack > 1:
        processor = StackProcessor(spaces)
    state = folder.load_agent(checkpoint)
    with weights_must_fit(folder):
        policy.load_state_dict(state["policy"])
    if policy_name is not None:
        if not isinstance(policy, JointPolicy):
            raise UserError(f"policy={policy_name!r}: {folder.given} has only one policy; leave it out")
        policy = policy.member(policy_name)
        spaces = policy.spaces
    about: dict[str, Any] = {"steps": state["steps"], "folder": folder}
    return Agent(policy, spaces, cfg, state["longest_episode"], device=device, frames=processor, **about)


def open_source(
    run: RunPath | Agent, trust: bool = False, env: Any = None, net: Any = None
) -> tuple[RunConfig, RunFolder | None]:
    """Return the configuration and the folder of a run, or of an agent. An agent made in Python has no folder.

    Raise `UserError` if the configuration names code that the user hasn't approved. `env` replaces an environment that
    can't be imported, or the environment of an agent without a folder.
    """
    folder = run.folder if isinstance(run, Agent) else RunFolder.open(run)
    if folder is not None:
        cfg = folder.read_config(trust, env, net)
    else:
        assert isinstance(run, Agent)
        overrides = {} if env is None else {"env": env}
        cfg = config.rebuild(config.as_layer(run.cfg), config.from_keywords(overrides))
        importing.check_names(cfg.model_dump(mode="json"), trust)
    return (cfg.model_copy(update={"device": str(run.device)}) if isinstance(run, Agent) else cfg), folder


def load_state(run: RunPath | Agent, folder: RunFolder | None, checkpoint: str | int) -> dict[str, Any]:
    """Return the weights and counters of an agent, or of a checkpoint of a run."""
    if isinstance(run, Agent):
        return run.state_dict()
    assert folder is not None
    return folder.load_agent(checkpoint)


def restricted(folder: RunFolder | None) -> AbstractContextManager[None]:
    """Return a context in which only the code of a run is imported."""
    return nullcontext() if folder is None else folder.restricted()


def read_spaces(folder: RunFolder, cfg: RunConfig) -> tuple[Spaces, Any]:
    """Return the saved spaces and options of frames. Runs of versions that saved none need their environment."""
    saved = folder.read_spaces()
    if saved is not None:
        return saved
    if cfg.env.name == NO_ENV:
        raise UserError(
            f"{folder.given} was trained with --env none by a version that saved no spaces: copy spaces.json from a "
            f"new run on the same data into it"
        )
    vector = envs.make_small_vector(envs.RegisteredEnv(cfg.env.name, cfg.env.options), 1, cfg.vector)
    vector.close()
    return vector.spaces, frame_options(cfg.env.name, cfg.env.options)
