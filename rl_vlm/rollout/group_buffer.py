"""Complete groups on their way to the learner: those that wait, each with its own age, and those that are replaced. No Ray, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rl_vlm.statistics import are_equal
from rl_vlm.types import TrajectoryGroup


class GroupBuffer:
    """Holds groups and never gives one that is too old.

    A group's age is the learner's version minus the oldest version that sampled a token of it; of groups whose turns cross
    versions (partial rollouts, in-flight updates), minus the newest: when their episodes began does not count.

    Args:
        max_lag: the largest age that is given out.
        partial: turns cross versions.
    """

    def __init__(self, max_lag: int, partial: bool = False) -> None:
        self._max_lag = max_lag
        self._partial = partial
        self._groups: list[TrajectoryGroup] = []

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, groups: Iterable[TrajectoryGroup]) -> None:
        """Add complete groups, in any order."""
        self._groups.extend(groups)
        # The oldest first. Ids sort in the order in which tasks were made, so the order of arrival does not matter.
        self._groups.sort(key=lambda group: (self._version(group), group.group_id))

    def take(self, count: int, version: int) -> tuple[list[TrajectoryGroup], list[TrajectoryGroup]]:
        """Up to `count` groups for a learner at `version`, and all that have become too old for it; neither stays here."""
        fresh = [group for group in self._groups if version - self._version(group) <= self._max_lag]
        stale = [group for group in self._groups if version - self._version(group) > self._max_lag]
        self._groups = fresh[count:]
        return fresh[:count], stale

    def has_batch(self, count: int, version: int) -> bool:
        """Whether `count` groups wait that are not too old for a learner at `version`."""
        return sum(version - self._version(group) <= self._max_lag for group in self._groups) >= count

    def batch_leaves_time(self, count: int, version: int, running: Sequence[int]) -> bool:
        """Whether all others can still be learned from in time after the learner has taken the `count` oldest groups.

        `running` holds the version of each group that is not complete. A group of version w is due when the learner is at
        w + max_lag at the latest, and every step takes `count`: so of what remains, at most k × `count` groups may be due at
        `version` + k (earliest deadline first; none for k = 0). Otherwise the learner has to wait for the oldest.
        """
        rest = [self._version(group) for group in self._groups[count:]] + list(running)
        return all(
            sum(oldest + self._max_lag <= version + k for oldest in rest) <= k * count for k in range(self._max_lag)
        )

    def _version(self, group: TrajectoryGroup) -> int:
        return group.newest_version if self._partial else group.oldest_version

    def clear(self) -> None:
        """Forget all groups."""
        self._groups = []


class Refill:
    """Replaces groups without a gradient by further ones, at most `limit` per iteration (dynamic sampling, DAPO, arXiv 2503.14476, section 3.2).

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
