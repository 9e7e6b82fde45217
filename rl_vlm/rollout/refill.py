"""Refill: groups without a gradient are replaced by further ones (dynamic sampling, DAPO, arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

from rl_vlm.statistics import are_equal
from rl_vlm.types import TrajectoryGroup


class Refill:
    """Says which groups are replaced, at most `limit` of them per iteration.

    A group whose rewards are all equal has zero advantage under estimators that compare its rewards with each other; with others
    a configuration has no refill.
    """

    def __init__(self, limit: int) -> None:
        self._limit = self._left = limit

    def next_iteration(self) -> None:
        """Allow `limit` groups again."""
        self._left = self._limit

    def split(self, groups: Sequence[TrajectoryGroup]) -> tuple[list[TrajectoryGroup], list[TrajectoryGroup]]:
        """The groups to learn from, and those to replace. Beyond the limit groups without a gradient are kept."""
        kept, replaced = [], []
        for group in groups:
            if self._left and are_equal(group.rewards):
                self._left -= 1
                replaced.append(group)
            else:
                kept.append(group)
        return kept, replaced
