"""Exploration before the first labels by state entropy: PEBBLE, arXiv 2106.05091, section 4.1."""

from __future__ import annotations

import torch
from torch import Tensor

_EXTRA_CANDIDATES = 8  # candidates beyond the k nearest, whose exact distances are computed


def state_entropy(states: Tensor, visited: Tensor, k: int) -> Tensor:
    """float32 [B]: the distance from each of `states` [B, O] to the k-th nearest other one of `visited` [N, O].

    `visited` holds `states` too, so the nearest neighbour is the state itself and is not counted. Distances to all come
    from one matrix product, which is inexact for close neighbours; those of the nearest few are computed again exactly.
    With N <= k, the farthest one counts.
    """
    wanted = min(k + 1, len(visited))
    candidates = min(wanted + _EXTRA_CANDIDATES, len(visited))
    centre = visited.mean(0)
    near, far = states - centre, visited - centre
    squared = torch.addmm(far.square().sum(1)[None, :], near, far.t(), alpha=-2.0)  # plus |state|², the same in a row
    places = squared.topk(candidates, dim=1, largest=False, sorted=False).indices
    distances = (states[:, None, :] - visited[places]).square().sum(2).sqrt()
    return distances.kthvalue(wanted, dim=1).values


class RunningStd:
    """The standard deviation of all values so far, in one pass (Chan, Golub and LeVeque, 1983)."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0.0, 0.0, 0.0

    def update(self, values: Tensor) -> None:
        """Add values [n]."""
        exact = values.double()
        count, mean = float(len(values)), float(exact.mean())
        total, delta = self.count + count, mean - self.mean
        self.squares += float((exact - mean).square().sum()) + delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.count = total

    @property
    def std(self) -> float:
        """1 without values, and where all are equal."""
        return (self.squares / self.count) ** 0.5 if self.squares > 0 else 1.0

    def state(self) -> dict[str, float]:
        """For checkpoints."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load(self, state: dict[str, float]) -> None:
        """Go on from a saved state."""
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]
