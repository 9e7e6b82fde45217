"""Exploration by state entropy: distances equal scipy's, running figures equal numpy's."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch
from scipy.spatial import cKDTree

from rl_vlm.preference.sac import RunningStd, state_entropy


@pytest.mark.parametrize(("visited", "size", "k"), [(500, 3, 5), (2000, 39, 5), (60, 4, 1), (40, 2, 30)])
def test_the_kth_nearest_neighbour_is_scipys(visited: int, size: int, k: int) -> None:
    rng = np.random.default_rng(visited)
    # Close together and far from the origin, where a product of float32 matrices loses most digits.
    points = (100 + 0.05 * rng.standard_normal((visited, size))).astype(np.float32)
    rows = rng.integers(0, visited, 25)
    found = state_entropy(torch.from_numpy(points[rows]), torch.from_numpy(points), k).numpy()
    expected = cKDTree(points.astype(np.float64)).query(points[rows].astype(np.float64), k + 1)[0][:, -1]
    assert found == pytest.approx(expected, rel=1e-4)


def test_with_few_states_the_farthest_counts() -> None:
    points = torch.tensor([[0.0], [1.0], [5.0]])
    assert state_entropy(points, points, k=5).tolist() == [5.0, 4.0, 5.0]
    assert state_entropy(points, points, k=1).tolist() == [1.0, 1.0, 4.0]


def test_the_running_deviation_is_that_of_all_values() -> None:
    rng = np.random.default_rng(0)
    parts = [1000 + rng.standard_normal(n) * scale for n, scale in ((3, 1), (50, 9), (1, 0), (200, 2))]
    running = RunningStd()
    assert running.std == 1.0
    for part in parts:
        running.update(torch.from_numpy(part))
    assert running.std == pytest.approx(np.concatenate(parts).std(), rel=1e-9)
    assert RunningStd(**asdict(running)).std == running.std
