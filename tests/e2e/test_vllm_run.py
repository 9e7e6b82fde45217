"""A real training run whose replica is vLLM's engine."""

from __future__ import annotations

import csv
from pathlib import Path

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
    # In the first iteration both have the same weights: float32 rounding is all that differs. Later the samples' age shows.
    assert abs(float(rows[0]["mismatch/kl"])) < 1e-6
    assert all(1e-6 < float(row["mismatch/kl"]) < 0.2 for row in rows[1:])
    # Sampling overlaps learning: from the second iteration on, samples are one version old, never more.
    assert [int(float(row["rollout/lag_max"])) for row in rows] == [0] + 7 * [1]
