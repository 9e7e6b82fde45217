"""Sentences about metrics that usually mean a mistake in the environment, the prompt or the reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from rl_vlm.types import RLVLMError

_NEEDS_IMAGES = 0.1  # a smaller gain in accuracy over blank images gives a warning
FIRST_ITERATIONS = 5  # after which equal rewards give a warning
_SKIPPED = 10  # steps in a row that end a run
_NOT_FINITE = "because their gradients were not finite"


def blind(results: Mapping[str, float]) -> str:
    """A warning if answers are as good with blank images."""
    if results.get("sight/accuracy_gap_high", 1.0) >= _NEEDS_IMAGES:
        return ""
    unseen, gap = results["sight/accuracy_blank"], results["sight/accuracy_gap"]
    if unseen == 0 and gap == 0:  # nothing is known of images by answers that are all wrong
        return ""
    return (
        f"Answers do not need the images: {unseen:.2f} are right with blank ones, {gap:+.2f} with the true ones "
        "[sight/accuracy_gap]. Either the questions need none, or the policy has collapsed to one answer: look "
        "at policy/entropy and at the answers."
    )


def equal_rewards(without_advantage: Sequence[float], reward: float) -> str:
    """A warning after the first iterations if in no group of them the rewards differ. `without_advantage`: the share of
    such groups in each iteration so far; `reward`: the mean of the last one."""
    if len(without_advantage) != FIRST_ITERATIONS or min(without_advantage) < 1.0:
        return ""
    return (
        f"Nothing was learned: in each group of the first {FIRST_ITERATIONS} iterations all rewards were the same "
        f"(mean reward {reward:.3f}) [reward/zero_advantage_groups]. `rl-vlm rollout` shows answers and their rewards."
    )


class NotFiniteError(RLVLMError):
    """Optimiser steps were skipped, one after the other, because their gradients were not finite.

    Do: lower `learner.lr`, or mend your loss.
    """


class SkippedSteps:
    """Counts optimiser steps that were skipped because their gradient was not finite, in this process."""

    skipped = taken = in_a_row = 0

    def look(self, iteration: int, metrics: Mapping[str, float]) -> str:
        """A sentence when the first one was skipped, otherwise an empty one. Raises NotFiniteError for ten in a row."""
        skipped, taken = (int(metrics.get(f"policy/{name}_steps", 0)) for name in ("skipped", "optimizer"))
        is_first = skipped > 0 and not self.skipped
        self.skipped, self.taken = self.skipped + skipped, self.taken + taken
        self.in_a_row = skipped + (0 if taken else self.in_a_row)
        if self.in_a_row >= _SKIPPED:
            self.fail()
        return f"Iteration {iteration}: {skipped} optimiser steps were skipped, {_NOT_FINITE}." if is_first else ""

    def check(self) -> None:
        """Raise NotFiniteError where steps were skipped and none was taken."""
        if self.skipped and not self.taken:
            self.fail()

    def fail(self) -> NoReturn:
        raise NotFiniteError(
            f"The last {self.in_a_row} optimiser steps were skipped, {_NOT_FINITE}, so nothing is learned: look at "
            "policy/loss, policy/kl and mismatch/kl, and lower learner.lr (or mend the loss)."
        )
