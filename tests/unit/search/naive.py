"""Tree search as one would write it with an object per node: what the search in arrays must equal, node for node."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


class NaiveNode:
    def __init__(self, state: np.ndarray, mover: int, ended: bool, reward: float) -> None:
        self.state, self.mover, self.ended, self.reward = state, mover, ended, reward
        self.children: dict[int, NaiveNode] = {}
        self.value = 0.0


class NaiveSearch:
    """One root; evaluation must not be random. With one player, nodes choose when their statistics change, since the
    range of returns changes in between; with two players they choose when they are visited."""

    def __init__(self, model: Any, root: np.ndarray, evaluate: Any, select: str, c: float) -> None:
        self.model, self.evaluate, self.select, self.c = model, evaluate, select, c
        self.two = model.num_players == 2
        self.root = NaiveNode(root, int(model.to_move(root)[0]), False, 0.0)
        self._expand(self.root)
        self.low = self.high = self.root.value

    def _expand(self, node: NaiveNode) -> None:
        legal = self.model.legal(node.state)
        prior, value = self.evaluate(self.model, node.state, legal, None)
        node.value = float(value[0])
        node.prior = [float(p) for p in prior[0]]
        node.legal = [int(a) for a in np.flatnonzero(legal[0])]
        node.visits = dict.fromkeys(node.legal, 0)
        node.returns = dict.fromkeys(node.legal, 0.0)
        node.chosen = max(node.legal, key=lambda a: (node.prior[a], -a))

    def _choose(self, node: NaiveNode) -> int:
        total = sum(node.visits.values())
        if total == 0:
            return max(node.legal, key=lambda a: (node.prior[a], -a))
        here = (node.value + sum(node.returns.values())) / (1 + total)

        def score(action: int) -> float:
            visits = node.visits[action]
            if self.select == "uct" and visits == 0:
                return 1e9 + node.prior[action]
            mean = node.returns[action] / visits if visits else here
            if not self.two:
                mean = (mean - self.low) / max(self.high - self.low, 1e-12)
            if self.select == "uct":
                return mean + self.c * math.sqrt(math.log(total) / visits)
            return mean + self.c * math.sqrt(1 + total) * node.prior[action] / (1 + visits)

        return max(node.legal, key=lambda a: (score(a), -a))

    def simulate(self) -> None:
        node, way = self.root, []
        while True:
            action = self._choose(node) if self.two else node.chosen
            way.append((node, action))
            if action not in node.children:
                state, reward, ended = self.model.play(node.state, np.array([action]))
                mover = int(self.model.to_move(state)[0])
                child = node.children[action] = NaiveNode(state, mover, bool(ended[0]), float(reward[0]))
                if not child.ended:
                    self._expand(child)
                break
            node = node.children[action]
            if node.ended:
                break
        child = way[-1][0].children[way[-1][1]]
        behind = child.value
        for parent, action in reversed(way):
            child = parent.children[action]
            behind = child.reward + self.model.gamma * (behind if child.mover == parent.mover else -behind)
            parent.visits[action] += 1
            parent.returns[action] += behind
            self.low, self.high = min(self.low, behind), max(self.high, behind)
        for parent, _ in way:
            parent.chosen = self._choose(parent)
