"""Exploration before the first labels by state entropy: PEBBLE, arXiv 2106.05091, section 4.1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_EXTRA_CANDIDATES = 8  # candidates beyond the k nearest, whose exact distances are computed


def state_entropy(states: Tensor, visited: Tensor, k: int) -> Tensor:
    """float32 [B]: the distance from each of `states` [B, O] to the k-th nearest other one of `visited` [N, O].

    `visited` holds `states` too, so the nearest neighbour is the state itself and is not counted. With N <= k, the farthest
    one counts. One matrix product ranks the neighbours: |visited|² - 2 state · visited, which leaves out |state|² because it
    does not change the order. It is inexact for close neighbours, so the distances to the nearest few are computed exactly.
    """
    wanted = min(k + 1, len(visited))
    candidates = min(wanted + _EXTRA_CANDIDATES, len(visited))
    centre = visited.mean(0)
    near, far = states - centre, visited - centre
    squared = torch.addmm(far.square().sum(1)[None, :], near, far.t(), alpha=-2.0)
    places = squared.topk(candidates, dim=1, largest=False, sorted=False).indices
    distances = (states[:, None, :] - visited[places]).square().sum(2).sqrt()
    return distances.kthvalue(wanted, dim=1).values


@dataclass(slots=True)
class RunningStd:
    """The standard deviation of all values so far, from float64 sums."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def update(self, values: Tensor) -> None:
        """Add values [n]."""
        exact = values.double()
        self.count += len(values)
        self.total += float(exact.sum())
        self.squares += float(exact.square().sum())

    @property
    def std(self) -> float:
        """1 without values, and where all are equal."""
        variance = self.squares / self.count - (self.total / self.count) ** 2 if self.count else 0.0
        return variance**0.5 if variance > 0 else 1.0
