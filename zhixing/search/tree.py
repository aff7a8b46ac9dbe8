"""Monte-Carlo tree search of B roots in lock step, in arrays.

A simulation descends all B trees, adds a node to each, evaluates the new nodes in one batch and backs their values up
along all paths at once.

The nodes of all trees are numbered in order of creation, so a child's number is above its parent's. Row 0 is a null
node that pads paths shorter than the longest. The statistics of an action are stored with the node where it is taken
(`stats [node, 3, n]`: visits, sum of returns, prior). They change only when a path leads through that node, so the next
action is chosen then, for all nodes of a path at once, and the next descent only follows `next`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import UserError
from zhixing.search.games import Model

# (model, states [B,...], legal [B,n], rng) -> priors [B,n], or None if uniform, and values [B] for the player to move
Evaluator = Callable[[Model, Array, Array, np.random.Generator], "tuple[Array | None, Array]"]
SelectionRule = Literal["uct", "puct"]
UNTRIED_SCORE = 1e9  # above the score of any tried action


class SearchResult(NamedTuple):
    """The result of a search of B roots."""

    visits: Array  # [B,n] simulations that began with each action; sums to `simulations`, or 0 at terminal roots
    value: Array  # [B] mean return for the player to move
    action_values: Array  # [B,n] mean return of each action; 0 if untried
    prior: Array  # [B,n] including noise; 0 for illegal actions


def search(
    model: Model,
    roots: Array,
    simulations: int,
    evaluate: Evaluator,
    rng: np.random.Generator,
    *,
    select: SelectionRule = "puct",
    c: float = 1.25,
    noise: float = 0.0,
    alpha: float = 1.0,
    leaves: int = 1,
) -> SearchResult:
    """Search `roots [B,...]` at once.

    Args:
        select: `uct` (Kocsis and Szepesvári, 2006), mean + c √(ln N / N_a), tries all actions first, in random order.
            `puct` (Silver et al., 2017), mean + c P_a √(1 + N) / (1 + N_a), gives an untried action the mean of its
            node. Single-player returns are scaled to [0, 1] by the minimum and maximum so far.
        noise: Fraction of Dirichlet(`alpha`) noise in the roots' priors.
        leaves: Nodes per tree that are evaluated together. Each is selected as if the previous ones had the worst
            return (virtual loss). More leaves make the search slightly worse, but faster with few trees.
    """
    if simulations < 1 or leaves < 1 or c <= 0.0:
        raise UserError(f"simulations {simulations} and leaves {leaves} must be at least 1, c {c} above 0")
    active = np.flatnonzero(~model.is_over(roots))
    num, n = len(roots), model.num_actions
    result = SearchResult(np.zeros((num, n)), np.zeros(num), np.zeros((num, n)), np.zeros((num, n)))
    if len(active):
        trees = SearchTrees(model, roots[active], simulations, evaluate, rng, select, c)
        if noise:
            trees.add_noise(noise, alpha)
        for done in range(0, simulations, leaves):
            trees.simulate(min(leaves, simulations - done))
        for array, active_rows in zip(result, trees.result(), strict=True):
            array[active] = active_rows
    return result


class SearchTrees:
    """The search trees of non-terminal roots."""

    def __init__(
        self,
        model: Model,
        roots: Array,
        simulations: int,
        evaluate: Evaluator,
        rng: np.random.Generator,
        select: SelectionRule,
        c: float,
    ) -> None:
        self.model, self.evaluate, self.rng = model, evaluate, rng
        self.select, self.c = select, c
        self.num_trees, self.n, self.two_players = len(roots), model.num_actions, model.num_players == 2
        rows = 1 + self.num_trees * (1 + simulations)
        self.states = np.zeros((rows, *roots.shape[1:]), roots.dtype)
        self.stats = np.zeros((rows, 3, self.n))
        self.children = np.zeros((rows, self.n), np.int64)
        self.best = np.zeros(rows, np.int64)  # the action to take at the next visit
        self.next = np.zeros(rows, np.int64)  # the node it leads to; 0 if that doesn't exist yet or is terminal
        self.open = np.zeros(rows, np.int64)  # the node itself; 0 if it is terminal or not evaluated yet
        self.value = np.zeros(rows)  # of the evaluation, for the player to move
        self.reward = np.zeros(rows)  # of the action that led to the node, for the player who took it
        # weight of the node's return for its parent: the discount, negative if the player changes
        self.factor = np.ones(rows)
        self.player = np.zeros(rows, np.int8)  # to move
        self.num_nodes = 1
        self._add(roots)
        self._evaluate(1, np.zeros(self.num_trees, bool))
        self.roots = np.arange(1, self.num_nodes)
        # bounds of the returns of each tree; known for two players
        self.min_return: Array = np.full(self.num_trees, -1.0) if self.two_players else self.value[self.roots]
        self.max_return: Array = np.ones(self.num_trees) if self.two_players else self.value[self.roots]

    def add_noise(self, fraction: float, alpha: float) -> None:
        prior = self.stats[self.roots, 2]  # a copy
        legal = prior > -np.inf
        noise = np.where(legal, self.rng.standard_gamma(alpha, prior.shape), 0.0)
        noise /= np.maximum(noise.sum(-1, keepdims=True), 1e-300)  # normalized gamma samples are Dirichlet-distributed
        prior = np.where(legal, (1.0 - fraction) * prior + fraction * noise, -np.inf)
        self.stats[self.roots, 2] = prior
        self.best[self.roots] = prior.argmax(-1)

    def simulate(self, leaves: int = 1) -> None:
        """Add `leaves` nodes to each tree."""
        first, paths, terminal = self.num_nodes, [], []
        for _ in range(leaves):
            path, taken = self._select_path()
            terminal.append(self._expand(path.max(0)))
            virtual = np.broadcast_to(self.min_return.copy(), path.shape) if leaves > 1 else None
            if virtual is not None:
                self._update_stats(path, taken, 1.0, virtual)
            paths.append((path, taken, virtual))
        self._evaluate(first, np.concatenate(terminal))
        for i, (path, taken, virtual) in enumerate(paths):
            returns = self._returns(path, slice(first + i * self.num_trees, first + (i + 1) * self.num_trees))
            if not self.two_players:
                np.minimum(self.min_return, returns.min(0), out=self.min_return)
                np.maximum(self.max_return, returns.max(0), out=self.max_return)
            if virtual is None:
                self._update_stats(path, taken, 1.0, returns)
            else:
                self._update_stats(path, taken, 0.0, returns - virtual)

    def _select_path(self) -> tuple[Array, Array]:
        """Descend from the roots to the nodes whose next action leads to a new or a terminal node.

        Returns the nodes `[D,B]`, and the flat indices in `stats` of the visits of the actions taken in them.
        """
        path = [node := self.roots]
        while np.count_nonzero(node := self.next.take(node)):
            path.append(node)
        nodes = np.array(path)
        return nodes, nodes * (3 * self.n) + self.best.take(nodes)

    def _expand(self, leaf: Array) -> Array:
        """Add a child to each leaf and return which children are terminal. Those are added again at each visit."""
        action = self.best.take(leaf)
        states, reward, terminal = self.model.play(self.states.take(leaf, 0), action)
        new = self._add(states)
        self.reward[new] = reward
        self.factor[new] = self.model.gamma
        if self.two_players:
            self.factor[new] *= 1.0 - 2.0 * (self.player[new] != self.player.take(leaf))
        self.children.reshape(-1)[leaf * self.n + action] = np.arange(new.start, new.stop)
        return terminal

    def _add(self, states: Array) -> slice:
        new = slice(self.num_nodes, self.num_nodes + self.num_trees)
        self.num_nodes += self.num_trees
        self.states[new] = states
        if self.two_players:
            self.player[new] = self.model.current_player(states)
        return new

    def _evaluate(self, first: int, terminal: Array) -> None:
        """Evaluate the nodes from `first` on that aren't terminal."""
        nodes = np.arange(first, self.num_nodes)
        if np.count_nonzero(terminal):
            nodes = nodes[~terminal]
            if not len(nodes):
                return
        states = self.states.take(nodes, 0)
        legal = self.model.legal_actions(states)
        prior, self.value[nodes] = self.evaluate(self.model, states, legal, self.rng)
        if prior is None:
            uniform = 1.0 / legal.sum(-1, keepdims=True)
            prior = legal * (self.rng.random(legal.shape) if self.select == "uct" else uniform)
        prior = np.where(legal, prior, -np.inf)
        self.stats[nodes, 2] = prior
        self.best[nodes] = prior.argmax(-1)
        self.open[nodes] = nodes

    def _returns(self, path: Array, new: slice) -> Array:
        """Return the return `[D,B]` of each action on the path to the new nodes, for the player who took it."""
        reward, factor = self.reward.take(path), self.factor.take(path)
        returns = np.empty(path.shape)
        value = self.reward[new] + self.factor[new] * self.value[new]
        for depth in range(len(path) - 1, -1, -1):
            returns[depth] = value
            value = reward[depth] + factor[depth] * value  # the null node has reward 0 and factor 1
        return returns

    def _update_stats(self, path: Array, taken: Array, visits: float, returns: Array) -> None:
        """Add to the statistics of the actions taken on the path, then choose each node's next action."""
        stats = self.stats.reshape(-1)
        stats[taken] += visits
        stats[taken + self.n] += returns
        best = self._scores(path).argmax(-1)
        self.best[path] = best
        self.next[path] = self.open.take(self.children.take(path * self.n + best))

    def _scores(self, path: Array) -> Array:
        """Return the scores `[D,B,n]` of all actions in the nodes of a path; -inf for illegal actions."""
        stats = self.stats.take(path, 0)
        visits, returns, prior = stats[..., 0, :], stats[..., 1, :], stats[..., 2, :]
        total = visits.sum(-1, keepdims=True)
        tried = np.maximum(visits, 1.0)
        mean = returns / tried
        if self.select == "puct":
            node_mean = (self.value.take(path)[..., None] + returns.sum(-1, keepdims=True)) / (1.0 + total)
            mean += (visits == 0.0) * node_mean
        if not self.two_players:
            mean = (mean - self.min_return[:, None]) / np.maximum(self.max_return - self.min_return, 1e-12)[:, None]
        if self.select == "puct":
            return mean + self.c * np.sqrt(1.0 + total) * prior / (1.0 + visits)
        bonus = self.c * np.sqrt(np.log(np.maximum(total, 1.0)) / tried)
        return np.where(visits > 0.0, mean + bonus, UNTRIED_SCORE + prior)

    def result(self) -> SearchResult:
        visits, returns, prior = self.stats[self.roots].swapaxes(0, 1)
        value = returns.sum(-1) / np.maximum(visits.sum(-1), 1.0)
        return SearchResult(visits, value, returns / np.maximum(visits, 1.0), np.where(prior > -np.inf, prior, 0.0))
