"""A learner that dies beside the updates, in an evaluation or at the very end, is replaced too."""

from __future__ import annotations

import csv
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from test_determinism import run_config

from rl_vlm.algorithms.learners import on_one_learner
from rl_vlm.models.weights import WeightPayload
from rl_vlm.runs.policy import PolicyRun


class Dying(PolicyRun):
    """Kills its learner before the second evaluation and between the adapter and the averaged one at the end."""

    killed = 0

    def _kill(self) -> None:
        self.killed += 1
        os.kill(on_one_learner(self.algorithm.learner_group, lambda _: os.getpid()), signal.SIGKILL)

    def _evaluate(self) -> None:
        if self.algorithm.updates == 2 and not self.killed:
            self._kill()
        super()._evaluate()

    def _save_trained(self, payload: WeightPayload, suffix: str = "") -> None:
        super()._save_trained(payload, suffix)
        if self.killed == 1:  # before the averaged adapter is fetched
            self._kill()


@pytest.mark.timeout(300)
def test_a_learner_that_dies_beside_an_update_is_replaced(tiny_folder: Path, tmp_path: Path) -> None:
    run = run_config(
        tiny_folder,
        "algorithm.iterations=3", "learner.num_learners=1", "resources.num_cpus=4", "learner.ema_decay=0.9",
        "evaluation={every: 2, num_items: 8, weights: ema}", "logging={checkpoint_every: 1, tensorboard: false}",
    )  # fmt: skip
    training = Dying(run, tmp_path, resume=False)
    result: dict[str, Any] = training.execute()
    assert training.killed == 2 and result["restarts"]["learner"] == 2
    assert (result["status"], result["iterations"]) == ("done", 3)
    assert [row["iteration"] for row in csv.DictReader((tmp_path / "progress.csv").open())] == ["1", "2", "3"]
    evaluated = [json.loads(line)["iteration"] for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert evaluated == [0, 2, 3]
    assert (tmp_path / "adapter-ema/adapter_model.safetensors").is_file()
