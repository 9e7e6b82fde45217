"""RLlib's learner group: the number of learners does not change the update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
from core_support import plan_update
from learner_processes import groups
from ray.rllib.core.learner.training_data import TrainingData

from rl_vlm.algorithms.grpo import GRPO
from rl_vlm.config import PolicyConfig, apply_overrides, parse_config
from rl_vlm.config.learner import AlgorithmSection
from rl_vlm.learning.plan import UpdateResult
from rl_vlm.models.reference import ModelReference
from rl_vlm.runs.ray_session import ray_cluster

LR = 1e-3


def run_config(folder: Path, learners: int) -> PolicyConfig:
    overrides = {
        "model.path": str(folder),
        "learner.num_learners": learners,
        "learner.cpus_per_learner": 0.5,
        "learner.lr": LR,
        "resources.num_cpus": 4,
    }
    return parse_config(apply_overrides({}, overrides))


@pytest.fixture(scope="module")
def cluster(tiny_folder: Path) -> Iterator[None]:
    with ray_cluster(run_config(tiny_folder, 2)):
        yield


Arrays = dict[str, np.ndarray]


def update(folder: Path, learners: int, updates: int = 2) -> tuple[Arrays, Arrays, dict[str, float]]:
    """The adapter, its mean gradients and the last statistics after some updates with that many learners."""
    config = GRPO.from_run_config(run_config(folder, learners))
    config.served_model = ModelReference.of(str(folder))
    group = config.build_learner_group(rl_module_spec=config.get_multi_rl_module_spec(spaces={}))
    settings = AlgorithmSection(minibatches=2)
    try:
        for number in range(updates):
            plan = plan_update(
                groups(folder, 0), settings, np.random.default_rng(number), num_learners=max(learners, 1)
            )
            batches = [replace(batch, version=number + 1) for batch in plan.batches]
            data = (
                TrainingData(episodes=batches)
                if learners == 0
                else TrainingData(episodes_refs=[ray.put([batch]) for batch in batches])
            )
            results: list[UpdateResult] = group.update(training_data=data)
        adapter = next(result.adapter for result in results if result.adapter is not None)
        stats = type(results[0].stats).merge([result.stats for result in results])
        if learners == 0:
            moments = group._learner.snapshot(1)[1]
        else:
            (found,) = group.foreach_learner(
                func=lambda learner, *_, **__: learner.snapshot(1)[1], remote_actor_ids=[0]
            )
            moments = found.get()
        gradients = {name: tensor.numpy() for name, tensor in moments.items() if name.startswith("exp_avg.")}
        return {name: tensor.numpy() for name, tensor in adapter.state().items()}, gradients, stats.metrics()
    finally:
        group.shutdown()


def test_two_learner_actors_make_the_update_of_the_local_learner(cluster: None, tiny_folder: Path) -> None:
    reference, gradients, figures = update(tiny_folder, 0)
    assert any(np.abs(array).max() > 1e-3 for name, array in reference.items() if "lora_B" in name)
    adapter, theirs, stats = update(tiny_folder, 2)
    assert adapter.keys() == reference.keys() and theirs.keys() == gradients.keys()
    for name, array in gradients.items():
        np.testing.assert_allclose(theirs[name], array, atol=1e-3 * np.abs(array).max(), err_msg=name)
    for name, array in reference.items():
        distance = np.abs(adapter[name] - array)
        # Adam makes a whole step of a gradient that is nothing but rounding: one weight in a thousand may differ.
        assert np.quantile(distance, 0.999) < 2e-5 and distance.max() < LR, name
    for name in ("policy/loss", "policy/grad_norm", "policy/entropy", "mismatch/kl"):
        assert stats[name] == pytest.approx(figures[name], rel=1e-3), name
