"""Disjoint train and test splits for environments that know one set of tasks only."""

from __future__ import annotations

from dataclasses import dataclass

from rl_vlm.types import Split, UserInputError


@dataclass(frozen=True)
class HeldOut:
    """The last `share` of the tasks are for testing; where there is no end, the odd numbers are."""

    share: float

    def size(self, split: Split, total: int | None) -> int | None:
        """How many of `total` tasks the split holds."""
        if total is None:
            return None
        test = min(total - 1, max(1, round(total * self.share))) if total > 1 and self.share > 0 else 0
        return test if split == "test" else total - test

    def number(self, split: Split, index: int, total: int | None) -> int:
        """The environment's own number of task `index` of a split."""
        if total is None:
            return 2 * index + (split == "test")
        size, train = self.size(split, total) or 0, self.size("train", total) or 0
        if not 0 <= index < size:
            raise UserInputError(f"Index {index} is outside the {size} tasks of the {split} split.")
        return index + (train if split == "test" else 0)


def check_share(share: float) -> float:
    """Return it; UserInputError unless it is from 0 to 1."""
    if not isinstance(share, int | float) or not 0 <= share < 1:
        raise UserInputError(f"env.kwargs.test_share is {share!r}: it is a share of the tasks, from 0 to below 1.")
    return float(share)
