"""Supervised fine-tuning, then reinforcement learning from its adapter: the two commands as a user types them."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path

import pytest
from runs import ROOT, CommandProcess, finished, rl_vlm

from rl_vlm.ownership import files_in, run_files

CONFIG = ROOT / "configs" / "sft_tiny.yaml"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the configuration that ships."""
    folder = tmp_path_factory.mktemp("sft") / "run"
    done = rl_vlm("sft", CONFIG, "--run-dir", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_counting_is_learned_from_five_hundred_conversations(tuned: Path) -> None:
    result = json.loads((tuned / "result.json").read_text())
    assert (result["status"], result["conversations"]) == ("done", 500)
    assert result["eval_loss_after"] < 0.25 * result["eval_loss_before"]
    assert result["accuracy_before"] <= 0.35
    assert result["accuracy_after"] >= 0.95


@pytest.mark.acceptance
def test_a_signal_saves_a_checkpoint_from_which_the_run_goes_on(tuned: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with CommandProcess("sft", CONFIG, "--run-dir", folder) as command:
        command.wait_until((folder / "progress.csv").exists, "the first rows", timeout=120)
        command.process.send_signal(signal.SIGINT)
        assert command.wait(timeout=60) == 130, command.output()
    assert json.loads((folder / "result.json").read_text())["status"] == "interrupted"
    done = rl_vlm("sft", folder, "--resume", "--run-dir", folder, timeout=300)
    assert done.returncode == 0 and "Resumed from step" in done.stdout, done.stdout + done.stderr
    adapter = "adapter/adapter_model.safetensors"
    assert (folder / adapter).read_bytes() == (tuned / adapter).read_bytes()


def test_ppo_with_everything_that_it_has_starts_where_fine_tuning_ended(tuned: Path, tmp_path: Path) -> None:
    """A few iterations: the critic's adapter, its warm-up, a penalty in the reward, averaged weights, a learner actor."""
    folder = tmp_path / "run"
    finished(
        folder, f"model.adapter={tuned}", "algorithm.iterations=3", "evaluation.every=1", "evaluation.num_items=64",
        "critic.warmup_iterations=1", "learner.num_learners=1", "algorithm.kl_in=reward", "algorithm.kl_target=0.02",
        "learner.ema_decay=0.9", "evaluation.weights=ema", "logging.checkpoint_every=1", "serving.num_replicas=1",
        "rollout.num_env_runners=1", config=ROOT / "configs/ppo_critic_adapter_tiny.yaml",
    )  # fmt: skip
    evaluations = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    assert evaluations[0]["accuracy/default"] >= 0.95  # the first published version has the adapter
    rows = list(csv.DictReader((folder / "progress.csv").open()))
    assert len(rows) == 3
    assert float(rows[0]["policy/first_ratio_error"]) == 0 and abs(float(rows[0]["mismatch/kl"])) < 1e-5
    assert float(rows[0]["policy/ratio_max"]) == 0 < float(rows[1]["policy/ratio_max"])  # the warm-up
    assert float(rows[0]["policy/kl_coef"]) > 0
    assert all(0 < float(row["value/loss"]) < 10 for row in rows)
    weights = [(folder / f"{name}/adapter_model.safetensors").read_bytes() for name in ("adapter", "adapter-ema")]
    assert weights[0] != weights[1]
    assert run_files(folder) == files_in(folder)
