"""Results of a policy against the snapshots of its league."""

from __future__ import annotations

import numpy as np

from zhixing.core.batch import Batch
from zhixing.nets.joint_policy import DECISIONS, Array, Seating
from zhixing.nets.league import LeaguePolicy


class LeagueResults:
    """Counts results over rollouts. `target`, a policy, wins an episode if its return is above that of the league."""

    def __init__(self, league: LeaguePolicy, seating: Seating, name: str, target: str, num_envs: int) -> None:
        self.league, self.seating, self.name, self.target = league, seating, name, target
        # by how much the return of the target is higher in the unfinished episodes, for each of the league's agents
        self.margin = np.zeros((num_envs, len(seating.agents[name])))

    def update(self, batch: Batch) -> None:
        """Count the results of the episodes that ended in a joint batch `[T,N]`."""
        gains = self._rewards(self.target, batch).mean(2, keepdims=True) - self._rewards(self.name, batch)  # [T,N,k]
        snapshot, ended = getattr(batch, DECISIONS)[self.name]["snapshot"], batch.terminated | batch.truncated
        for t in range(len(gains)):
            self.margin += gains[t]
            for env in np.flatnonzero(ended[t]).tolist():
                for opponent, total in zip(snapshot[t, env].tolist(), self.margin[env].tolist(), strict=True):
                    self.league.record(int(opponent), 0.5 + 0.5 * float(np.sign(total)))
                self.margin[env] = 0.0

    def _rewards(self, policy: str, batch: Batch) -> Array:
        rows, agents = self.seating.index(policy, batch.terminated.shape[1])
        rewards: Array = batch.reward[:, rows, agents]
        return rewards
