"""A league: opponents that are snapshots of a policy in training (Vinyals et al., 2019: fictitious self-play)."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from zhixing.core.policy import Decision, Phase, Policy
from zhixing.core.tree import Tree, tree_leaves, tree_map


class LeaguePolicy(Policy):
    """Acts with snapshots of `policy`. Each episode draws one of them.

    The draw is uniform, or `prioritized` by (1 - score)^2, where score is the mean result of the policy in training
    against the snapshot: 1 for a win, 0.5 for a draw. A new snapshot has the score 0.5.
    """

    games: Tensor  # [size] results against each snapshot
    points: Tensor  # [size] sums of them
    num_taken: Tensor  # number of snapshots taken so far

    def __init__(self, policy: Policy, size: int, prioritized: bool = False) -> None:
        super().__init__(policy.spaces)
        self.prioritized = prioritized
        self.snapshots = nn.ModuleList(copy.deepcopy(policy) for _ in range(size)).requires_grad_(False)
        self.register_buffer("games", torch.zeros(size))
        self.register_buffer("points", torch.zeros(size))
        self.register_buffer("num_taken", torch.ones((), dtype=torch.int64))

    def add(self, policy: Policy) -> None:
        """Take a snapshot. If the league is full, it replaces the oldest one, even in episodes in progress."""
        slot = int(self.num_taken) % len(self.snapshots)
        self.snapshots[slot].load_state_dict(policy.state_dict())
        self.games[slot] = self.points[slot] = 0.0
        self.num_taken += 1

    def record(self, snapshot: int, result: float) -> None:
        """Count a result of the policy against a snapshot: 1, 0.5 or 0."""
        self.games[snapshot] += 1.0
        self.points[snapshot] += result

    def probabilities(self) -> Tensor:
        """Return the probability of each snapshot `[n]`."""
        n = min(int(self.num_taken), len(self.snapshots))
        score = (self.points[:n] + 1.0) / (self.games[:n] + 2.0)  # of one win and one loss more, so it is never 0 or 1
        weight = (1.0 - score).square() if self.prioritized else torch.ones_like(score)
        return weight / weight.sum()

    def initial_hidden(self, num: int) -> Tree:
        """Return the index of each episode's snapshot plus one, where 0 is a new episode, and its hidden state."""
        first: Policy = self.snapshots[0]  # type: ignore[assignment]
        state = first.initial_hidden(num)
        hidden: dict[str, Tree] = {"snapshot": torch.zeros(num, device=self.games.device)}
        return hidden if state is None else {**hidden, "state": state}

    def act(
        self, obs: Tree, hidden: Tree, mask: Tensor | None, phase: Phase, rng: torch.Generator, env_steps: int
    ) -> Decision:
        before = hidden["snapshot"]
        drawn = torch.multinomial(self.probabilities(), len(before), replacement=True, generator=rng) + 1
        current = torch.where(before == 0, drawn.to(before.dtype), before)
        action: Tensor | None = None
        state = tree_map(torch.clone, hidden["state"]) if "state" in hidden else None
        for number in current.unique().tolist():
            rows = (current == number).nonzero()[:, 0]

            def take(leaf: Tensor, rows: Tensor = rows) -> Tensor:
                return leaf[rows]

            own_mask = None if mask is None else take(mask)
            own_state = None if state is None else tree_map(take, state)
            snapshot: Policy = self.snapshots[int(number) - 1]  # type: ignore[assignment]
            decision = snapshot.act(tree_map(take, obs), own_state, own_mask, phase, rng, env_steps)
            if action is None:
                action = decision.action.new_zeros(len(tree_leaves(obs)[0]), *decision.action.shape[1:])
            action[rows] = decision.action
            if state is not None:
                tree_map(lambda leaf, new, rows=rows: leaf.index_copy_(0, rows, new), state, decision.hidden)
        assert action is not None
        after = {"snapshot": current} if state is None else {"snapshot": current, "state": state}
        return Decision(action, hidden=after, extras={"snapshot": current - 1})
