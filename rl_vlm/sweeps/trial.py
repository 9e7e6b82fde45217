"""One trial: an algorithm that evaluates itself, so that Tune can compare held-out figures, and that ends when its run does."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ray.tune import PlacementGroupFactory
from ray.tune.result import SHOULD_CHECKPOINT

from rl_vlm.algorithms.base import RunAlgorithm
from rl_vlm.algorithms.learners import LearnerDiedError
from rl_vlm.config import TrainConfig
from rl_vlm.types import UserInputError


def trial_class(
    algorithm: type[RunAlgorithm], keys: Collection[str], more: Mapping[str, float] | None = None
) -> type[RunAlgorithm]:
    """The algorithm with `held_out/accuracy` and `held_out/reward` in each result: those of the last evaluation so far.

    Each result also has the present `settings` of these dotted keys.

    more: custom resources that a trial holds beside those of its actors.

    Evaluations come before training, every `evaluation.every` iterations and at the end, as in a run of its own. A trial that
    was restored evaluates at once.
    """

    class Trial(algorithm):  # type: ignore[misc, valid-type]
        _last: dict[str, float] | None = None

        @classmethod
        def default_resource_request(cls, config: Any) -> PlacementGroupFactory:
            try:
                request = super().default_resource_request(config)
            except UserInputError:  # Tune asks in its own loop; the trial fails with this sentence when it is set up
                return PlacementGroupFactory([{"CPU": 1.0}])
            main, *others = request.bundles
            return PlacementGroupFactory([{**main, **(more or {})}, *others], strategy=request.strategy)

        def step(self) -> Any:
            before, end, every = self.progress()
            if self._last is None:
                self._last = self.held_out()
            start = self._last
            result = super().step()
            now = self.progress()[0]
            if now <= before:
                # Its learners began anew, as it does not know Tune's checkpoints; Tune restores the whole trial from the last one.
                raise LearnerDiedError(f"A learner died in iteration {before + 1}.")
            due = now >= end or bool(every and now // every > before // every)
            if due:
                self._last = self.held_out()
            return result | {
                "held_out": self._last,
                "held_out_before": start,
                "settings": _settings(self.run, keys),
                "done": now >= end,
                SHOULD_CHECKPOINT: due,  # so that the best evaluation has its weights
            }

    Trial.__name__ = Trial.__qualname__ = algorithm.__name__  # Tune shows it
    return Trial


def _settings(run: TrainConfig, keys: Collection[str]) -> dict[str, Any]:
    """The values of dotted keys that the configuration has."""
    found = {}
    for key in keys:
        value: Any = run.model_dump(mode="json")
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            found[key] = value
    return found
