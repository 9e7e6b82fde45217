"""Exploration before the first labels by state entropy: PEBBLE, arXiv 2106.05091, section 4.1."""

from __future__ import annotations

import torch
from torch import Tensor

_EXTRA_CANDIDATES = 8  # candidates beyond the k nearest, whose exact distances are computed


def state_entropy(states: Tensor, visited: Tensor, k: int) -> Tensor:
    """float32 [B]: the distance from each of `states` [B, O] to the k-th nearest other one of `visited` [N, O].

    `visited` holds `states` too, so the nearest neighbour is the state itself and is not counted. With N <= k, the
    farthest one counts. One matrix product ranks the neighbours, by |visited|² - 2 state · visited. It is inexact for
    close ones, so the distances to the nearest few are computed exactly.
    """
    wanted = min(k + 1, len(visited))
    candidates = min(wanted + _EXTRA_CANDIDATES, len(visited))
    centre = visited.mean(0)
    near, far = states - centre, visited - centre
    squared = torch.addmm(far.square().sum(1)[None, :], near, far.t(), alpha=-2.0)
    places = squared.topk(candidates, dim=1, largest=False, sorted=False).indices
    distances = (states[:, None, :] - visited[places]).square().sum(2).sqrt()
    return distances.kthvalue(wanted, dim=1).values


def sums_of(values: Tensor) -> Tensor:
    """float64 [3] on the CPU: the number of values [B], their sum, and the sum of their squares."""
    exact = values.double()
    return torch.stack([torch.ones_like(exact), exact, exact.square()]).sum(1).cpu()


def std_of(sums: Tensor) -> float:
    """The standard deviation of all values whose `sums_of` were added; 1 where all are equal."""
    count, total, squares = sums.tolist()
    variance = squares / count - (total / count) ** 2
    return float(variance**0.5) if variance > 0 else 1.0
