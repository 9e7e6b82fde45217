"""Tune runs GRPO as it is: dotted keys, results, checkpoints without a pickle."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray import tune

from rl_vlm.algorithms.grpo import GRPO
from rl_vlm.config import load_config
from rl_vlm.runs.cluster import ray_cluster

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)
def test_tune_runs_a_trial_with_a_dotted_key(tiny_folder: Path, tmp_path: Path) -> None:
    run = load_config(
        ROOT / "configs/quickstart.yaml",
        [
            f"model.path={tiny_folder}",
            "serving.num_replicas=1",
            "rollout.num_env_runners=1",
            "rollout.prompts_per_iteration=4",
            "resources.num_cpus=4",
        ],
    )
    with ray_cluster(run):
        results = tune.Tuner(
            GRPO,
            param_space={"run_config": run.model_dump(), "learner.lr": tune.grid_search([1e-3])},
            run_config=tune.RunConfig(
                storage_path=str(tmp_path),
                stop={"training_iteration": 2},
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
                verbose=0,
            ),
        ).fit()
    (result,) = results
    assert result.error is None
    assert result.metrics["policy"]["lr"] == pytest.approx(1e-3, rel=0.01)
    assert result.metrics["weights"]["version"] == 2
    assert result.checkpoint is not None
    files = {path.name for path in Path(result.checkpoint.path).rglob("*") if path.is_file()}
    assert {"adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "state.json"} <= files
    assert not [name for name in files if "algorithm" in name]
