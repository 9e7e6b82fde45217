"""Learning with learners that share layers or the optimiser's state, also where one of them is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import LEARNER, TrainingProcess

from rl_vlm.models.loading import resolve_model

pytestmark = pytest.mark.acceptance
STRATEGIES = ["fsdp2", "zero1", "zero2", "zero3"]


def settings(strategy: str) -> tuple[str, ...]:
    return (
        f"learner.strategy={strategy}",
        "learner.num_learners=2",
        "learner.cpus_per_learner=0.25",
        "logging.checkpoint_every=10",
    )


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_counting_is_learned(strategy: str, tmp_path: Path) -> None:
    resolve_model("tiny")
    with TrainingProcess(tmp_path / "run", *settings(strategy)) as run:
        assert run.wait(timeout=3500) == 0, run.output()[-3000:]
    result = run.result()
    assert result["accuracy_before"] <= 0.35
    assert result["accuracy_after"] >= 0.90


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_killed_learner_is_replaced_from_the_last_checkpoint(strategy: str, tmp_path: Path) -> None:
    resolve_model("tiny")
    short = ("algorithm.iterations=25", "evaluation.num_items=32")
    with TrainingProcess(tmp_path / "run", *settings(strategy), *short) as run:
        run.wait_for_iteration(12)
        run.kill(LEARNER)
        assert run.wait(timeout=1500) == 0, run.output()[-3000:]
    result = run.result()
    assert result["iterations"] == 25
    assert result["restarts"]["learner"] >= 1
    assert 0 < result["dropped"]["iterations_repeated"] < 10
