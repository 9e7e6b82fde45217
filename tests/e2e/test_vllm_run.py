"""A real training run whose replica is vLLM's engine."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from runs import TrainingProcess

from rl_vlm.models.loading import resolve_model

ARGUMENTS = (
    "model.path=tiny-wide",  # vLLM's CPU kernels want heads of 32 dimensions
    "serving.engine=vllm",
    "serving.num_replicas=1",
    "algorithm.iterations=8",
    "evaluation.num_items=64",
    "rollout.num_env_runners=1",
    "rollout.max_policy_lag=1",
)


@pytest.mark.acceptance
def test_grpo_trains_a_policy_that_vllm_serves(tmp_path: Path) -> None:
    resolve_model("tiny-wide")
    with TrainingProcess(tmp_path / "run", *ARGUMENTS) as run:
        assert run.wait(timeout=480) == 0, run.output()[-3000:]
        assert run.survivors() == []  # vLLM's engine core is a process of its own
    result = run.result()
    assert result["policy_version"] == 8
    assert result["dropped"] == {}
    rows = list(csv.DictReader((run.run_dir / "progress.csv").open()))
    assert [int(float(row["weights/version"])) for row in rows] == list(range(1, 9))
    # Sampling overlaps learning: from the second iteration on, samples are one version old, never more. (A runner that was slow
    # to begin meets the newer version already.)
    lags = [int(float(row["rollout/lag_max"])) for row in rows]
    assert lags[0] == 0 and set(lags) == {0, 1} and sum(lags) >= 4
    # Where engine and learner have the same weights, float32 rounding is all that differs. Else the samples' age shows.
    for lag, mismatch in zip(lags, (float(row["mismatch/kl"]) for row in rows), strict=True):
        assert 1e-6 < mismatch < 0.2 if lag else abs(mismatch) < 1e-6


@pytest.mark.acceptance
def test_replicas_rest_while_the_learner_works(tmp_path: Path) -> None:
    """The same turns as on one GPU that both share; vLLM's CPU build pauses, and keeps its memory."""
    resolve_model("tiny-wide")
    turns = (
        "rollout.max_policy_lag=0",
        "serving.vllm.rest_while_learning=true",
        "serving.num_replicas=2",
        "algorithm.iterations=4",
    )
    with TrainingProcess(tmp_path / "run", *ARGUMENTS, *turns, "serving.probe_after_s=0.5") as run:
        assert run.wait(timeout=480) == 0, run.output()[-3000:]
        assert run.survivors() == []
        assert "did not within" not in run.output() and "were not told" not in run.output()
    result = run.result()
    assert (result["policy_version"], result["dropped"]) == (4, {})
    rows = list(csv.DictReader((run.run_dir / "progress.csv").open()))
    assert all(0 < float(row["time/rest"]) < 10 for row in rows)
    assert all(abs(float(row["mismatch/kl"])) < 1e-6 and float(row["rollout/lag_max"]) == 0 for row in rows)
