"""Tune runs GRPO as it is: dotted keys, trials at the same time, results, checkpoints without a pickle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray import tune

from rl_vlm.algorithms.grpo import GRPO
from rl_vlm.config import load_config
from rl_vlm.runs.ray_session import ray_cluster

ROOT = Path(__file__).resolve().parents[2]


def trials(tiny_folder: Path, folder: Path, num_cpus: int, iterations: int, **space: Any) -> tune.ResultGrid:
    """The results of a small run's search space."""
    run = load_config(
        ROOT / "configs/quickstart.yaml",
        [
            f"model.path={tiny_folder}",
            "serving.num_replicas=1",
            "rollout.num_env_runners=1",
            "rollout.prompts_per_iteration=4",
            f"resources.num_cpus={num_cpus}",
        ],
    )
    with ray_cluster(run):
        return tune.Tuner(
            GRPO,
            param_space={"run_config": run.model_dump(), **space},
            run_config=tune.RunConfig(
                storage_path=str(folder),
                stop={"training_iteration": iterations},
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
                verbose=0,
            ),
        ).fit()


@pytest.mark.acceptance  # CI's tier has four trials of a sweep, in test_sweep.py
@pytest.mark.timeout(600)
def test_four_trials_that_start_at_once_share_one_serve(tiny_folder: Path, tmp_path: Path) -> None:
    rates = [1e-3, 2e-3, 3e-3, 4e-3]
    results = trials(tiny_folder, tmp_path, num_cpus=16, iterations=2, **{"learner.lr": tune.grid_search(rates)})
    assert [result.error for result in results] == [None] * 4
    assert sorted(result.metrics["policy"]["lr"] for result in results) == pytest.approx(rates, rel=0.01)
    assert [result.metrics["weights"]["version"] for result in results] == [2] * 4
    for result in results:
        assert result.checkpoint is not None
        files = {path.name for path in Path(result.checkpoint.path).rglob("*") if path.is_file()}
        assert {"adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "state.json"} <= files
        assert not [name for name in files if "algorithm" in name]
