"""Sentences about figures that usually mean a mistake in the environment, the prompt or the reward."""

from __future__ import annotations

from collections.abc import Mapping

_NEEDS_IMAGES = 0.1  # gain in accuracy over blank images, below which people are told
_UNPAID = 5  # iterations at the start


def blind(results: Mapping[str, float]) -> str:
    """What an evaluation says where answers are as good with blank images; empty where they need them, or where none is right."""
    if results.get("sight/accuracy_gap_high", 1.0) >= _NEEDS_IMAGES:
        return ""
    unseen, gap = results["sight/accuracy_blank"], results["sight/accuracy_gap"]
    if unseen == 0 and gap == 0:  # nothing is known of images by answers that are all wrong
        return ""
    return f"Answers do not need the images: {unseen:.2f} are right with blank ones, {gap:+.2f} with the true ones [sight/accuracy_gap]."


class UnpaidStart:
    """Tells once where no group of a run's first iterations has answers that are paid differently: then nothing is learned from."""

    def __init__(self) -> None:
        self._unpaid = 0

    def look(self, iteration: int, metrics: Mapping[str, float]) -> str:
        """The sentence after iteration 1, 2, ... of a run, or an empty one."""
        if iteration != self._unpaid + 1 or metrics.get("reward/zero_advantage_groups", 0.0) < 1.0:
            return ""
        self._unpaid = iteration
        if iteration != _UNPAID:
            return ""
        return (
            f"Nothing has been learned from: in each group of the first {_UNPAID} iterations all answers were paid alike (mean reward "
            f"{metrics['reward/mean']:.3f}) [reward/zero_advantage_groups]. `rl-vlm rollout` shows answers and what they are paid."
        )
