"""A plain tree search with an object per node. The search in arrays must equal it, node for node."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


class ReferenceNode:
    def __init__(self, state: np.ndarray, player: int, terminal: bool, reward: float) -> None:
        self.state, self.player, self.terminal, self.reward = state, player, terminal, reward
        self.children: dict[int, ReferenceNode] = {}
        self.value = 0.0


class ReferenceSearch:
    """Search one root with a deterministic evaluation.

    With one player, a node chooses its action when its statistics change, since the range of returns changes in
    between. With two players, it chooses when it is visited.
    """

    def __init__(self, model: Any, root: np.ndarray, evaluate: Any, select: str, c: float) -> None:
        self.model, self.evaluate, self.select, self.c = model, evaluate, select, c
        self.two_players = model.num_players == 2
        self.root = ReferenceNode(root, int(model.current_player(root)[0]), False, 0.0)
        self._expand(self.root)
        self.low = self.high = self.root.value

    def _expand(self, node: ReferenceNode) -> None:
        legal = self.model.legal_actions(node.state)
        prior, value = self.evaluate(self.model, node.state, legal, None)
        node.value = float(value[0])
        node.prior = [float(p) for p in prior[0]]
        node.legal = [int(a) for a in np.flatnonzero(legal[0])]
        node.visits = dict.fromkeys(node.legal, 0)
        node.returns = dict.fromkeys(node.legal, 0.0)
        node.chosen = max(node.legal, key=lambda a: (node.prior[a], -a))

    def _choose(self, node: ReferenceNode) -> int:
        total = sum(node.visits.values())
        if total == 0:
            return max(node.legal, key=lambda a: (node.prior[a], -a))
        node_mean = (node.value + sum(node.returns.values())) / (1 + total)

        def score(action: int) -> float:
            visits = node.visits[action]
            if self.select == "uct" and visits == 0:
                return 1e9 + node.prior[action]
            mean = node.returns[action] / visits if visits else node_mean
            if not self.two_players:
                mean = (mean - self.low) / max(self.high - self.low, 1e-12)
            if self.select == "uct":
                return mean + self.c * math.sqrt(math.log(total) / visits)
            return mean + self.c * math.sqrt(1 + total) * node.prior[action] / (1 + visits)

        return max(node.legal, key=lambda a: (score(a), -a))

    def simulate(self) -> None:
        node, path = self.root, []
        while True:
            action = self._choose(node) if self.two_players else node.chosen
            path.append((node, action))
            if action not in node.children:
                state, reward, ended = self.model.play(node.state, np.array([action]))
                player = int(self.model.current_player(state)[0])
                child = node.children[action] = ReferenceNode(state, player, bool(ended[0]), float(reward[0]))
                if not child.terminal:
                    self._expand(child)
                break
            node = node.children[action]
            if node.terminal:
                break
        leaf_parent, leaf_action = path[-1]
        value = leaf_parent.children[leaf_action].value
        for parent, action in reversed(path):
            child = parent.children[action]
            value = child.reward + self.model.gamma * (value if child.player == parent.player else -value)
            parent.visits[action] += 1
            parent.returns[action] += value
            self.low, self.high = min(self.low, value), max(self.high, value)
        for parent, _ in path:
            parent.chosen = self._choose(parent)
