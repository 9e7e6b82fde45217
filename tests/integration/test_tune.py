"""Tune runs GRPO as it is: dotted keys, trials at the same time, results, checkpoints without a pickle."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray import tune

from rl_vlm.algorithms.grpo import GRPO
from rl_vlm.cli.app import run as rl_vlm
from rl_vlm.config import load_config
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.runs.ray_session import ray_cluster

ROOT = Path(__file__).resolve().parents[2]


def trials(tiny_folder: Path, folder: Path, num_cpus: int, iterations: int, **space: Any) -> tune.ResultGrid:
    """The results of a small run's search space."""
    small = ["serving.num_replicas=1", "rollout.num_env_runners=1", "rollout.prompts_per_iteration=4"]
    changes = [f"model.path={tiny_folder}", f"resources.num_cpus={num_cpus}", *small]
    run = load_config(ROOT / "configs/quickstart.yaml", changes)
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


@pytest.mark.acceptance
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


# --- A sweep: trials at the same time on one cluster, held-out figures in each result, a table, a figure, the best adapter


def sweep_command(model: Path, folder: Path, space: dict[str, Any]) -> list[str]:
    """A sweep of two iterations a trial."""
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(space))
    return [
        "sweep", str(ROOT / "configs/quickstart.yaml"), f"model.path={model}", "serving.num_replicas=1",
        "rollout.num_env_runners=1", "rollout.prompts_per_iteration=4", "algorithm.iterations=2", "evaluation.every=1",
        "evaluation.num_items=8", "resources.num_cpus=8", "--space", str(file), "--run-dir", str(folder),
    ]  # fmt: skip


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.acceptance
@pytest.mark.timeout(900)
def test_optuna_chooses_the_settings_and_a_resume_repeats_none(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    command = sweep_command(tiny_folder, folder, {
        "space": {"learner.lr": {"loguniform": [1e-4, 1e-2]}, "algorithm.clip_low": {"choice": [0.1, 0.2]}},
        "metric": "held_out/reward", "max_concurrent": 2, "num_samples": 3, "search": "optuna",
    })  # fmt: skip
    assert rl_vlm(command) == 0
    rows = rows_of(folder)
    assert len(rows) == 3 and all(row["finished"] == "True" for row in rows)
    rates = {float(row["learner.lr"]) for row in rows}
    assert len(rates) == 3 and all(1e-4 <= rate <= 1e-2 for rate in rates)
    assert {float(row["algorithm.clip_low"]) for row in rows} <= {0.1, 0.2}
    assert rl_vlm([*command, "--resume"]) == 0 and rows_of(folder) == rows


@pytest.mark.timeout(600)
def test_two_trials_at_once_are_compared(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    command = sweep_command(tiny_folder, folder, {
        "space": {"learner.lr": {"grid": [0.001]}, "seed": {"grid": [3, 4]}},
        "metric": "held_out/reward", "max_concurrent": 2,
    })  # fmt: skip
    assert rl_vlm(command) == 0

    rows = rows_of(folder)
    assert sorted((float(row["learner.lr"]), row["seed"]) for row in rows) == [(0.001, "3"), (0.001, "4")]
    assert all(row["finished"] == "True" and row["iterations"] == "2" for row in rows)
    assert [float(row["best"]) for row in rows] == sorted((float(row["best"]) for row in rows), reverse=True)
    assert "| lr 0.001 | 2 |" in (folder / "results.md").read_text()
    assert (folder / "results.png").read_bytes().startswith(b"\x89PNG")
    chosen = yaml.safe_load((folder / "best/config.yaml").read_text())
    assert (chosen["learner"]["lr"], str(chosen["seed"])) == (float(rows[0]["learner.lr"]), rows[0]["seed"])
    assert AdapterPayload.read(folder / "best/adapter", 0).tensors

    for params in (folder / "tune").glob("trial-*/params.json"):
        results = [json.loads(line) for line in (params.parent / "result.json").read_text().splitlines()]
        assert [result["training_iteration"] for result in results] == [1, 2]
        assert all({"accuracy", "reward"} == set(result["held_out"]) for result in results)
        assert results[-1]["weights"]["version"] == 2
        names = {path.name for path in params.parent.glob("checkpoint_*/**/*") if path.is_file()}
        assert {"adapter_model.safetensors", "optimizer.safetensors", "state.json"} <= names
        assert not [name for name in names if "algorithm" in name]
