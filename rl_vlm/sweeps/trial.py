"""One trial: an algorithm that evaluates itself, so that Tune can compare held-out figures, and that ends when its run does."""

from __future__ import annotations

from typing import Any

from ray.tune.result import SHOULD_CHECKPOINT

from rl_vlm.algorithms.base import RunAlgorithm


def trial_class(algorithm: type[RunAlgorithm]) -> type[RunAlgorithm]:
    """The algorithm with `held_out/accuracy` and `held_out/reward` in each result: those of the last evaluation so far.

    Evaluations come before training, every `evaluation.every` iterations and at the end, as in a run of its own. A trial that
    was restored evaluates at once.
    """

    class Trial(algorithm):  # type: ignore[misc, valid-type]
        _last: dict[str, float] | None = None

        def step(self) -> Any:
            before, end, every = self.progress()
            if self._last is None:
                self._last = self.held_out()
            start = self._last
            result = super().step()
            now = self.progress()[0]
            due = now >= end or bool(every and now // every > before // every)
            if due:
                self._last = self.held_out()
            return result | {
                "held_out": self._last,
                "held_out_before": start,
                "done": now >= end,
                SHOULD_CHECKPOINT: due,  # so that the best evaluation has its weights
            }

    Trial.__name__ = Trial.__qualname__ = algorithm.__name__  # Tune shows it
    return Trial
