"""Supervised fine-tuning, then reinforcement learning from its adapter: the two commands as a user types them."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from runs import ROOT, CommandProcess, finished, rl_vlm

CONFIG = ROOT / "configs" / "sft_tiny.yaml"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the configuration that ships."""
    folder = tmp_path_factory.mktemp("sft") / "run"
    done = rl_vlm("sft", CONFIG, "--run-dir", folder, timeout=300)
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


def test_reinforcement_learning_starts_where_fine_tuning_ended(tuned: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = (f"model.adapter={tuned}", "algorithm.iterations=2", "evaluation.every=1", "evaluation.num_items=64")
    finished(folder, *arguments, "logging.checkpoint_every=1", "serving.num_replicas=1", timeout=400)
    evaluations = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    assert evaluations[0]["accuracy/default"] >= 0.95  # the first published version has the adapter
    assert [entry["policy_version"] for entry in evaluations] == [1, 2, 3]
    first = json.loads((folder / "checkpoints/iteration-000001/state.json").read_text())
    assert first["version"] == 2
    row = (folder / "progress.csv").read_text().splitlines()
    ratio = dict(zip(row[0].split(","), row[1].split(","), strict=True))
    assert float(ratio["policy/first_ratio_error"]) == 0 and abs(float(ratio["mismatch/kl"])) < 1e-5
