"""One trial: an algorithm that evaluates itself, so that Tune can compare held-out metrics, and ends with its run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray.tune import PlacementGroupFactory
from ray.tune.result import SHOULD_CHECKPOINT

from rl_vlm.algorithms.base import RunAlgorithm
from rl_vlm.config import TrainConfig
from rl_vlm.config.sweep import SweepConfig, changed
from rl_vlm.types import UserInputError

# What the trials of a sweep need of a Ray cluster, and how many of them it holds at the same time.

SLOT = "rl_vlm_trial"  # of a private cluster: a place for a trial with its replicas
# Keys that a space may vary and that decide what a trial needs.
_SIZES = (
    "serving.num_replicas", "serving.cpus_per_replica", "serving.gpus_per_replica", "rollout.num_env_runners",
    "rollout.cpus_per_env_runner", "learner.num_learners", "learner.cpus_per_learner", "learner.gpus_per_learner",
    "preference.collection.num_env_runners",
)  # fmt: skip
_MOST = 64  # trials at the same time, unless the sweep says more


@dataclass(frozen=True, slots=True)
class TrialResources:
    """Logical CPUs and GPUs `each` trial needs, its own replicas included, and `common` ones of shared replicas."""

    each: Mapping[str, float]
    common: Mapping[str, float]
    has_replicas: bool

    @classmethod
    def of(cls, config: TrainConfig, sweep: SweepConfig, trainable: type[RunAlgorithm]) -> TrialResources:
        """What the largest trials need that the sweep makes of the run."""
        sizes = {key: max(sweep.space[key].examples) for key in _SIZES if key in sweep.space}
        config = changed(config, sizes) if sizes else config
        request = trainable.default_resource_request({"run_config": config.model_dump(exclude_unset=True)})
        reserved = request.required_resources
        serving = config.serving
        count = serving.num_replicas if config.serves else 0
        replicas = {"CPU": count * serving.cpus_per_replica, "GPU": count * config.gpu_shares[0]}
        own = {} if serving.shared else replicas
        each = {kind: reserved.get(kind, 0.0) + own.get(kind, 0.0) for kind in replicas}
        common = replicas if serving.shared else dict.fromkeys(replicas, 0.0)
        return cls(each, common, has_replicas=any(own.values()))

    def holds(self, have: Mapping[str, float]) -> int:
        """How many trials fit into a cluster of such resources at the same time."""
        shares = [(have.get(kind, 0.0) - self.common[kind]) / each for kind, each in self.each.items() if each > 0]
        return max(int(min(shares, default=_MOST) + 1e-6), 0)


def trials_at_once(sweep: SweepConfig, needs: TrialResources, have: Mapping[str, float], *, slots: bool = False) -> int:
    """How many trials may run side by side; 0: as many as Tune finds room for. `slots`: the cluster has `SLOT`s. Raises
    UserInputError."""
    compares = sweep.stopping.name == "pbt"  # all trials with each other: trials that do not fit take turns
    if os.environ.get("RL_VLM_AUTOSCALING"):
        if not compares and sweep.max_concurrent is None:
            raise UserInputError("An autoscaled cluster does not say how many trials it will hold: set max_concurrent.")
        return 0 if compares else sweep.max_concurrent or 1
    fitting = needs.holds(have)
    if fitting == 0:
        wanted = " and ".join(f"{needs.common[k] + n:g} {k}s" for k, n in needs.each.items() if n)
        there = " and ".join(f"{have.get(kind, 0.0):g} {kind}s" for kind, n in needs.each.items() if n)
        raise UserInputError(
            f"One trial needs {wanted}, its replicas included, and the cluster has {there}: ask for less "
            "(serving.cpus_per_replica, rollout.num_env_runners, ...), raise resources.num_cpus, or add nodes."
        )
    if not compares:
        return min(sweep.max_concurrent or _MOST, fitting)
    if fitting < sweep.num_trials and needs.has_replicas and not slots:
        raise UserInputError(
            f"stopping pbt trains its {sweep.num_trials} trials side by side and the cluster holds {fitting} with "
            "replicas of their own: set shared: true in the sweep's file, lower num_samples, or add nodes."
        )
    return 0


def trial_class(algorithm: type[RunAlgorithm], more: Mapping[str, float] | None = None) -> type[RunAlgorithm]:
    """The algorithm as a trial: evaluates before training, every `evaluation.every` iterations, at the end, and after
    it was restored. `more` are custom resources that it holds."""

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
