"""A loop of one's own over a run, callbacks that a configuration names, and a server as a context manager."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import rl_vlm
from rl_vlm.types import RLVLMError, UserInputError

SMALL = {
    "algorithm.iterations": 4, "rollout.prompts_per_iteration": 4, "rollout.group_size": 4, "evaluation.num_items": 4,
    "serving.num_replicas": 1, "rollout.num_env_runners": 1, "sight.gate": "off", "logging.checkpoint_every": 2,
}  # fmt: skip
HEARD = """
import rl_vlm

class Heard(rl_vlm.Callback):
    def __init__(self):
        self.heard = []

    def on_iteration(self, folder, iteration, metrics):
        self.heard.append(("iteration", iteration, "reward/mean" in metrics))
        if iteration == 3:
            raise rl_vlm.StopTraining("three are enough")

    def on_evaluation(self, folder, iteration, results):
        self.heard.append(("evaluation", iteration, "accuracy/default" in results))

    def on_checkpoint(self, folder, iteration):
        self.heard.append(("checkpoint", iteration, any((folder / "checkpoints").iterdir())))

    def on_end(self, folder, result):
        (folder / "heard.txt").write_text(repr([*self.heard, ("end", result["status"])]))
"""


@pytest.mark.timeout(600)
def test_a_loop_sees_what_is_learned_and_callbacks_by_name_may_end_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HEARD)
    ends: list[Mapping[str, Any]] = []

    class Ended(rl_vlm.Callback):
        def on_end(self, folder: Path, result: Mapping[str, Any]) -> None:
            ends.append(result)

    overrides = {**SMALL, "logging.callbacks": [f"{tmp_path}/mine.py:Heard"]}
    folder = tmp_path / "run"
    with rl_vlm.Trainer("quickstart", overrides=overrides, callbacks=[Ended()], run_dir=folder) as trainer:
        (before,) = trainer.sample()
        steps = [*trainer]
        sampled = trainer.sample(3, greedy=False)
        assert list(trainer.run.progress["iteration"]) == [1, 2, 3]
    assert [step.iteration for step in steps] == [1, 2, 3]
    assert all(len(step.groups) == 4 == len(step.advantages[0]) for step in steps)
    assert steps[0].metrics["reward/mean"] == pytest.approx(
        sum(float(group.rewards.mean()) for group in steps[0].groups) / 4
    )
    assert len(sampled) == 3
    question, answer = before.trajectories[0].messages[-2:]
    assert question.role == "user" and answer.role == "assistant"
    run = rl_vlm.load_run(folder)
    assert run.metrics["status"] == "done" and run.metrics["stopped_by"] == "three are enough"
    assert ends[0]["iterations"] == run.metrics["iterations"] == 3
    assert (folder / "adapter/adapter_model.safetensors").is_file()
    assert list(run.evaluations["iteration"]) == [0, 3]
    assert (folder / "heard.txt").read_text() == repr(
        [
            ("evaluation", 0, True), ("iteration", 1, True), ("checkpoint", 2, True), ("iteration", 2, True),
            ("iteration", 3, True), ("evaluation", 3, True), ("checkpoint", 3, True), ("end", "done"),
        ]
    )  # fmt: skip


@pytest.mark.acceptance
@pytest.mark.timeout(600)
def test_an_error_in_the_loop_ends_the_run_as_failed(tmp_path: Path) -> None:
    overrides = {**SMALL, "evaluation.num_items": 1}
    with (
        pytest.raises(ZeroDivisionError),
        rl_vlm.Trainer("quickstart", overrides=overrides, run_dir=tmp_path / "run") as trainer,
    ):
        for step in trainer:
            _ = step.iteration / 0
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["status"] == "failed" and "ZeroDivisionError" in result["error"]


def test_what_is_no_callback_is_said_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine:\n    pass\n")
    with pytest.raises(UserInputError, match="is no rl_vlm.Callback"):
        rl_vlm.train(
            "quickstart", overrides={"logging.callbacks": [f"{tmp_path}/mine.py:Mine"]}, run_dir=tmp_path / "r"
        )
    with pytest.raises(UserInputError, match="rl_vlm.train for a preference run"):
        rl_vlm.Trainer("rl_vlm_f/cartpole_tiny")


def test_a_server_that_cannot_start_says_why() -> None:
    with pytest.raises(RLVLMError, match=r"did not start: error: .*no-such-folder"), rl_vlm.serve("no-such-folder"):
        pass


def test_what_train_cannot_take_is_said_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="not a list: write it to a file"):
        rl_vlm.train("quickstart", dataset=[{"question": "?"}])  # type: ignore[arg-type]
    with pytest.raises(UserInputError, match="nowhere"):
        rl_vlm.train({}, dataset=tmp_path / "nowhere.parquet", reward="exact")
    with pytest.raises(UserInputError, match="is not a reward function"):
        rl_vlm.train({"env": {"id": "Shapes-v0"}}, reward="exactly", run_dir=tmp_path / "run")
