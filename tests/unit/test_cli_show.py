"""`rl-vlm runs` and `rl-vlm show` say what the files of a run say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from recorder_support import WORDS

from rl_vlm.cli import show
from rl_vlm.cli.app import run as rl_vlm
from rl_vlm.config import PolicyConfig, save_config
from rl_vlm.learning.plan import TokenRecord
from rl_vlm.monitoring.recorder import RunRecorder
from rl_vlm.types import EncodedImage, Message, StopReason, Trajectory, TrajectoryGroup, TrajectoryStatus, Turn


def episode(name: str, reward: float, answer: str) -> Trajectory:
    image = EncodedImage.from_pil(Image.new("RGB", (8, 8), "red"))
    ids, mask = np.arange(4, dtype=np.int32), np.array([False, False, True, True])
    turn = Turn(2, 4, 0, StopReason.END_OF_TURN, reward)
    messages = [Message.of("user", image, "What?"), Message.of("assistant", answer)]
    logprobs = np.zeros(4, np.float32)
    return Trajectory(name, ids, mask, logprobs, (turn,), TrajectoryStatus.COMPLETED, (image,), messages=messages)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "runs" / "counts"
    place.mkdir(parents=True)
    config = PolicyConfig()
    save_config(config, place / "config.yaml")
    recorder = RunRecorder(place, config)
    for iteration, reward in enumerate((0.25, 0.5, 0.75), start=1):
        recorder.log_iteration(iteration, {"reward/mean": reward})
    recorder.log_evaluation(3, {"accuracy/default": 0.8, "accuracy_low/default": 0.7, "accuracy_high/default": 0.9})
    for iteration in (1, 2):  # the second dump is the newest one
        group = TrajectoryGroup(
            f"g{iteration}", 0, [episode(f"{iteration}-{k}", k / 4, f"answer {iteration}-{k}\x1b[2J") for k in range(5)]
        )
        recorder.dump_trajectories(iteration, [group], TokenRecord(), WORDS)
    recorder.finish({"status": "done"})
    return place


def test_a_run_shows_its_outcome_and_episodes_from_the_worst_to_the_best(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rl_vlm(["show", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "grpo on Shapes-v0, done" in shown and "▁▅█  0.25 → 0.75" in shown and "0.8 [0.7, 0.9] at 3" in shown
    places = [shown.index(f"answer 2-{k}") for k in (0, 2, 4)]
    assert places == sorted(places) and "answer 1-" not in shown and "answer 2-1" not in shown
    assert "\x1b" not in shown
    pictures = [line.split()[1].rstrip(")") for line in shown.splitlines() if line.startswith("(picture")]
    assert len(pictures) == 3 and all((folder / picture).is_file() for picture in pictures)


def test_the_same_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rl_vlm(["show", str(folder), "--json", "--episodes", "1"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["schema"] == 1 and content["reward"] == [0.25, 0.75] and content["accuracy"] == [0.8, 0.8]
    (one,) = content["episodes"]
    assert one["messages"][-1]["parts"] == ["answer 2-0\x1b[2J"] and one["reward"] == 0
    assert rl_vlm(["runs", str(folder.parent), "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["runs"]
    known = listed.keys() - {"id", "settings"}
    assert {key: listed[key] for key in known} == {key: content[key] for key in known} and listed["status"] == "done"


def test_a_curve_shows_means_of_neighbours() -> None:
    assert show.curve([1.0, 2.0, 3.0]) == "▁▅█" and show.curve([5.0, 5.0]) == "▁▁"
    assert show.curve([0.0] * 60 + [1.0] * 60) == "▁" * 30 + "█" * 30
