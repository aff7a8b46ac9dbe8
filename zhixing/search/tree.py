"""Monte-Carlo tree search of B roots in lock step, in arrays: a simulation walks down all B trees, adds a node to each,
evaluates the new nodes in one batch and carries their values up all paths at once.

Nodes are numbered through all trees in the order of their making, so that a child's number is above its parent's. Row 0
is nowhere: there go on the paths that are shorter than others. What is known of an action lies with the node that it is
taken in (`stats [node, 3, n]`: visits, sum of returns, prior). It changes only when a path leads through that node, so
the action to take next is chosen then, for all nodes of a path at once; walking down is only following `next`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import UserError
from zhixing.search.games import Model

# (model, states [B,...], legal [B,n], rng) to priors [B,n] of the actions, or None for equal ones, and to values [B]
# for the player to move
Evaluate = Callable[[Model, Array, Array, np.random.Generator], "tuple[Array | None, Array]"]
Select = Literal["uct", "puct"]
FIRST = 1e9  # above the score of any action that was tried


class Result(NamedTuple):
    """What a search found out about B roots."""

    visits: Array  # [B,n] simulations that began with each action; they sum to `simulations`, or to 0 where it is over
    value: Array  # [B] mean return for the player to move
    action_values: Array  # [B,n] mean return after each action; 0 where it wasn't tried
    prior: Array  # [B,n] of each action as searched with, noise included; 0 where it is illegal


def search(
    model: Model,
    roots: Array,
    simulations: int,
    evaluate: Evaluate,
    rng: np.random.Generator,
    *,
    select: Select = "puct",
    c: float = 1.25,
    noise: float = 0.0,
    alpha: float = 1.0,
    leaves: int = 1,
) -> Result:
    """Search `roots [B,...]` at once.

    `select` is UCT (Kocsis and Szepesvári, 2006), mean + c √(ln N / N_a), untried actions first and in random order; or
    PUCT (Silver et al., 2017), mean + c P_a √(1 + N) / (1 + N_a), an untried action having the mean of its node.
    Returns of one player are scaled to [0, 1] by the least and the greatest met so far.
    `noise` is the share of Dirichlet(`alpha`) noise in the priors of roots. With `leaves`, so many nodes of each tree
    are evaluated together, each found as if those before it had come to the worst end: not as good as one by one, but
    faster where few trees make small batches.
    """
    if simulations < 1 or leaves < 1 or c <= 0.0:
        raise UserError(f"simulations {simulations} and leaves {leaves} must be at least 1, c {c} above 0")
    live = np.flatnonzero(~model.over(roots))
    num, n = len(roots), model.num_actions
    found = Result(np.zeros((num, n)), np.zeros(num), np.zeros((num, n)), np.zeros((num, n)))
    if len(live):
        trees = Trees(model, roots[live], simulations, evaluate, rng, select, c)
        if noise:
            trees.add_noise(noise, alpha)
        for begun in range(0, simulations, leaves):
            trees.simulate(min(leaves, simulations - begun))
        for everywhere, here in zip(found, trees.result(), strict=True):
            everywhere[live] = here
    return found


class Trees:
    """The trees of roots at which it isn't over."""

    def __init__(
        self,
        model: Model,
        roots: Array,
        simulations: int,
        evaluate: Evaluate,
        rng: np.random.Generator,
        select: Select,
        c: float,
    ) -> None:
        self.model, self.evaluate, self.rng = model, evaluate, rng
        self.select, self.c = select, c
        self.num, self.n, self.two = len(roots), model.num_actions, model.num_players == 2
        rows = 1 + self.num * (1 + simulations)
        self.states = np.zeros((rows, *roots.shape[1:]), roots.dtype)
        self.stats = np.zeros((rows, 3, self.n))
        self.children = np.zeros((rows, self.n), np.int64)
        self.best = np.zeros(rows, np.int64)  # the action to take at the next visit
        self.next = np.zeros(rows, np.int64)  # the node that it leads to; nowhere if that isn't made yet, or an end
        self.open = np.zeros(rows, np.int64)  # the node itself; nowhere if it is an end, or not evaluated yet
        self.value = np.zeros(rows)  # as evaluated, for the player to move
        self.reward = np.zeros(rows)  # of the step that led here, for the player who took it
        self.factor = np.ones(rows)  # of the return from here on, as the parent counts it: discount, change of sides
        self.mover = np.zeros(rows, np.int8)
        self.made = 1
        self._add(roots)
        self._evaluate(1, np.zeros(self.num, bool))
        self.roots = np.arange(1, self.made)
        # the least and the greatest return of each tree: those of two players are known
        self.least: Array = np.full(self.num, -1.0) if self.two else self.value[self.roots]
        self.greatest: Array = np.ones(self.num) if self.two else self.value[self.roots]

    def add_noise(self, share: float, alpha: float) -> None:
        prior = self.stats[self.roots, 2]  # a copy
        legal = prior > -np.inf
        drawn = np.where(legal, self.rng.standard_gamma(alpha, prior.shape), 0.0)
        drawn /= np.maximum(drawn.sum(-1, keepdims=True), 1e-300)  # gamma numbers over their sum are Dirichlet's
        prior = np.where(legal, (1.0 - share) * prior + share * drawn, -np.inf)
        self.stats[self.roots, 2] = prior
        self.best[self.roots] = prior.argmax(-1)

    def simulate(self, leaves: int = 1) -> None:
        first, ways, ends = self.made, [], []
        for _ in range(leaves):
            path, taken = self._descend()
            ends.append(self._grow(path.max(0)))
            assumed = np.broadcast_to(self.least.copy(), path.shape) if leaves > 1 else None
            if assumed is not None:
                self._record(path, taken, 1.0, assumed)
            ways.append((path, taken, assumed))
        self._evaluate(first, np.concatenate(ends))
        for i, (path, taken, assumed) in enumerate(ways):
            returns = self._returns(path, slice(first + i * self.num, first + (i + 1) * self.num))
            if not self.two:
                np.minimum(self.least, returns.min(0), out=self.least)
                np.maximum(self.greatest, returns.max(0), out=self.greatest)
            if assumed is None:
                self._record(path, taken, 1.0, returns)
            else:
                self._record(path, taken, 0.0, returns - assumed)

    def _descend(self) -> tuple[Array, Array]:
        """The nodes `[D,B]` from the roots to those whose next action leads to no node yet, or to an end; and where the
        visits of the actions taken in them lie in `stats`."""
        path = [node := self.roots]
        while np.count_nonzero(node := self.next.take(node)):
            path.append(node)
        nodes = np.array(path)
        return nodes, nodes * (3 * self.n) + self.best.take(nodes)

    def _grow(self, leaf: Array) -> Array:
        """A new node under each leaf; returns which are ends. An end that was met before is made once more."""
        action = self.best.take(leaf)
        states, reward, ended = self.model.play(self.states.take(leaf, 0), action)
        new = self._add(states)
        self.reward[new] = reward
        self.factor[new] = self.model.gamma
        if self.two:
            self.factor[new] *= 1.0 - 2.0 * (self.mover[new] != self.mover.take(leaf))
        self.children.reshape(-1)[leaf * self.n + action] = np.arange(new.start, new.stop)
        return ended

    def _add(self, states: Array) -> slice:
        new = slice(self.made, self.made + self.num)
        self.made += self.num
        self.states[new] = states
        if self.two:
            self.mover[new] = self.model.to_move(states)
        return new

    def _evaluate(self, first: int, ended: Array) -> None:
        """All nodes from `first` on, but for those that are ends."""
        nodes = np.arange(first, self.made)
        if np.count_nonzero(ended):
            nodes = nodes[~ended]
            if not len(nodes):
                return
        states = self.states.take(nodes, 0)
        legal = self.model.legal(states)
        told, self.value[nodes] = self.evaluate(self.model, states, legal, self.rng)
        if told is None:
            equal = 1.0 / legal.sum(-1, keepdims=True)
            told = legal * (self.rng.random(legal.shape) if self.select == "uct" else equal)
        prior = np.where(legal, told, -np.inf)
        self.stats[nodes, 2] = prior
        self.best[nodes] = prior.argmax(-1)
        self.open[nodes] = nodes

    def _returns(self, path: Array, new: slice) -> Array:
        """The return `[D,B]` of each action on the way to the new nodes, for the player who took it."""
        reward, factor = self.reward.take(path), self.factor.take(path)
        returns = np.empty(path.shape)
        behind = self.reward[new] + self.factor[new] * self.value[new]
        for depth in range(len(path) - 1, -1, -1):
            returns[depth] = behind
            behind = reward[depth] + factor[depth] * behind  # nowhere changes nothing
        return returns

    def _record(self, path: Array, taken: Array, visits: float, returns: Array) -> None:
        """Add to what is known of the actions taken on the way, then choose those of the next visits."""
        known = self.stats.reshape(-1)
        known[taken] += visits
        known[taken + self.n] += returns
        best = self._scores(path).argmax(-1)
        self.best[path] = best
        self.next[path] = self.open.take(self.children.take(path * self.n + best))

    def _scores(self, path: Array) -> Array:
        """Of the actions `[D,B,n]` in the nodes of a path; -inf where they are illegal."""
        stats = self.stats.take(path, 0)
        visits, returns, prior = stats[..., 0, :], stats[..., 1, :], stats[..., 2, :]
        total = visits.sum(-1, keepdims=True)
        tried = np.maximum(visits, 1.0)
        mean = returns / tried
        if self.select == "puct":
            node = (self.value.take(path)[..., None] + returns.sum(-1, keepdims=True)) / (1.0 + total)
            mean += (visits == 0.0) * node
        if not self.two:
            mean = (mean - self.least[:, None]) / np.maximum(self.greatest - self.least, 1e-12)[:, None]
        if self.select == "puct":
            return mean + self.c * np.sqrt(1.0 + total) * prior / (1.0 + visits)
        bonus = self.c * np.sqrt(np.log(np.maximum(total, 1.0)) / tried)
        return np.where(visits > 0.0, mean + bonus, FIRST + prior)

    def result(self) -> Result:
        visits, returns, prior = self.stats[self.roots].swapaxes(0, 1)
        value = returns.sum(-1) / np.maximum(visits.sum(-1), 1.0)
        return Result(visits, value, returns / np.maximum(visits, 1.0), np.where(prior > -np.inf, prior, 0.0))
