"""Monte-Carlo tree search (Kocsis and Szepesvári, 2006): looks ahead instead of learning.

On games of two players, and on any task of one agent with discrete actions that can be copied. New nodes are worth the
mean of random playouts; with a guide, a run's network says which actions are worth a try and what a state is worth.
"""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.spaces import Discrete

from zhixing.algorithms import register
from zhixing.config import Positive, SearchConfig, VectorConfig
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner, Update
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError
from zhixing.nets.policies import ActorCriticPolicy
from zhixing.search import GAMES, EnvModel, NetworkEvaluator, PlayoutEvaluator
from zhixing.search.policy import SearchPolicy


class MCTSConfig(SearchConfig):
    env_steps: Positive = 1
    """Budget in environment steps; small by default because the search has nothing to learn."""
    playouts: Positive = 1
    """Random playouts per new node; their mean return is the node's value."""
    playout_steps: Positive = 50
    """Maximum length of a playout in environments that are not games."""
    guide: str | None = None
    """Run whose network evaluates new nodes instead of playouts."""
    vector: VectorConfig = VectorConfig(backend="serial")


@register("mcts", "Monte-Carlo tree search: UCT with random playouts, or PUCT with a run's network")
class MCTS(Learner):
    settings = MCTSConfig
    metrics = ()
    multi_agent = None

    def __init__(self, cfg: MCTSConfig, spaces: Spaces, device: torch.device | str = "cpu") -> None:
        super().__init__(cfg, spaces, device)
        name = cfg.env.name
        if not isinstance(spaces.action, Discrete):
            raise UserError(f"{cfg.algorithm} needs Discrete actions, this task has {spaces.action}")
        if spaces.agents and name not in GAMES:
            raise UserError(f"{cfg.algorithm} of several agents needs a game ({', '.join(GAMES)}), and {name} is none")
        if not spaces.agents and cfg.opponent is not None:
            raise UserError(f"opponent={cfg.opponent} means nothing in {name}, which is no game of two")
        if spaces.agents:
            self.model: Any = GAMES[name]()
            self.model.gamma = cfg.gamma
        else:
            self.model = EnvModel(name, cfg.gamma, cfg.playout_steps, **cfg.env.options)
        evaluate = PlayoutEvaluator(cfg.playouts) if cfg.guide is None else _judge(cfg.guide, spaces, name)
        select = "uct" if cfg.guide is None else "puct"
        self.policy = SearchPolicy(spaces, self.model, evaluate, cfg.simulations, select=select, c=cfg.c)

    def update(self, batch: Batch) -> Update:
        raise UserError("mcts makes no updates: it searches")

    def load_networks(self, state: dict[str, Any]) -> None:
        raise UserError("mcts has no weights to load: set guide=RUN to search with the network of a run")


def _judge(run: str, spaces: Spaces, task: str) -> NetworkEvaluator:
    """The network of a run that says which actions are likely and what a state is worth."""
    from zhixing.training.agent import load  # agents are made of algorithms, of which this is one

    agent = load(run)
    policy = agent.policy
    if agent.spaces.fields() != spaces.fields() or agent.spaces.action != spaces.action:
        raise UserError(f"the guide {run} is for {agent.cfg.env.name}, which isn't like {task}")
    if isinstance(policy, SearchPolicy) and isinstance(policy.player.evaluate, NetworkEvaluator):
        return policy.player.evaluate
    if not isinstance(policy, ActorCriticPolicy) or policy.net.recurrent or spaces.agents:
        raise UserError(
            f"the guide {run} ({agent.cfg.algorithm}) can't judge: that takes a network of actor and critic without "
            f"memory, such as ppo's or alphazero's"
        )
    net = policy.net

    def judge(obs: Any, mask: Any) -> tuple[Any, Any]:
        chances, value, _ = net(obs, None, mask)
        return chances.logp, value

    return NetworkEvaluator(judge)
