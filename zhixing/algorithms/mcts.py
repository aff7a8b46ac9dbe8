"""Monte-Carlo tree search (Kocsis & Szepesvári, 2006).   UCT: argmax_a Q(s, a) + c √(ln N(s) / N(s, a))

Plans instead of learning. It plays two-player games, and acts in environments with one agent and discrete actions whose
state can be copied. The value of a new node is the mean return of random playouts. With `guide`, a network evaluates
new nodes and gives prior probabilities of actions, and PUCT selects actions, as in AlphaZero.
Differs from the paper: outside games, playouts end after `playout_steps`.
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
from zhixing.search import GAMES, EnvModel, NetworkEvaluator, PlayoutEvaluator, find_game
from zhixing.search.policy import SearchPolicy


class MCTSConfig(SearchConfig):
    algorithm: str = "mcts"
    env_steps: Positive = 1
    """Budget in environment steps; small by default because the search has nothing to learn."""
    playouts: Positive = 1
    """Random playouts per new node; their mean return is the node's value."""
    playout_steps: Positive = 50
    """Maximum length of a playout in environments that are not games."""
    guide: str | None = None
    """Run whose network, instead of playouts, evaluates new nodes."""
    vector: VectorConfig = VectorConfig(backend="serial")


@register("mcts", "Monte-Carlo tree search: UCT with random playouts, or PUCT with a trained network")
class MCTS(Learner):
    settings = MCTSConfig
    metrics = ()
    multi_agent = None

    def __init__(self, cfg: MCTSConfig, spaces: Spaces, device: torch.device | str = "cpu") -> None:
        super().__init__(cfg, spaces, device)
        name = cfg.env.name
        if not isinstance(spaces.action, Discrete):
            raise UserError(f"{cfg.algorithm} needs Discrete actions, but this environment has {spaces.action}")
        game = find_game(name, cfg.env.options) if spaces.agents else None
        if spaces.agents and game is None:
            raise UserError(
                f"{cfg.algorithm} with several agents needs a game, not {name}; games are {', '.join(GAMES)} and your "
                f"own, classes that derive from zhixing.search.BoardGame"
            )
        if not spaces.agents and cfg.opponent is not None:
            raise UserError(f"opponent={cfg.opponent} needs a game, but {name} has one agent; leave opponent unset")
        if game is not None:
            self.model: Any = game
            self.model.gamma = cfg.gamma
        else:
            self.model = EnvModel(name, cfg.gamma, cfg.playout_steps, **cfg.env.options)
        evaluate = PlayoutEvaluator(cfg.playouts) if cfg.guide is None else _guide_evaluator(cfg.guide, spaces, name)
        select = "uct" if cfg.guide is None else "puct"
        self.policy = SearchPolicy(spaces, self.model, evaluate, cfg.simulations, select=select, c=cfg.c)

    def update(self, batch: Batch) -> Update:
        raise UserError("mcts plans by search and has no updates")

    def load_networks(self, state: dict[str, Any]) -> None:
        raise UserError("mcts has no weights to load; set guide=RUN to search with the network of a run")


def _guide_evaluator(run: str, spaces: Spaces, env: str) -> NetworkEvaluator:
    """Return an evaluator that uses the policy and the value of a run's network."""
    from zhixing.training.agent import load  # imports the algorithms, this file included

    agent = load(run)
    policy = agent.policy
    if agent.spaces.fields()["obs"] != spaces.fields()["obs"] or agent.spaces.action != spaces.action:
        raise UserError(
            f"guide={run} was trained in {agent.cfg.env.name}, whose observations or actions differ from those of {env}"
        )
    if isinstance(policy, SearchPolicy) and isinstance(policy.player.evaluate, NetworkEvaluator):
        return policy.player.evaluate
    if not isinstance(policy, ActorCriticPolicy) or policy.net.recurrent or spaces.agents:
        raise UserError(
            f"guide={run} was trained by {agent.cfg.algorithm}, but a guide needs an actor-critic network that is not "
            f"recurrent, such as that of ppo or alphazero"
        )
    net = policy.net

    def logp_and_value(obs: Any, mask: Any) -> tuple[Any, Any]:
        distribution, value, _ = net(obs, None, mask)
        return distribution.logp, value

    return NetworkEvaluator(logp_and_value)
