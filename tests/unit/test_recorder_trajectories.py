"""Dumps of sampled trajectories: they come back as they were, whole groups, images once."""

from dataclasses import replace

import numpy as np
from recorder_support import QUIET, group, leftovers, picture, read_trajectories, trajectory, words

from rl_vlm.monitoring.recorder import RunRecorder
from rl_vlm.types import Message, TrajectoryGroup


def test_trajectories_come_back_as_they_were(tmp_path):
    red, blue = picture("red"), picture("blue")
    one = trajectory(
        "g0/0",
        reward=0.5,
        images=(red,),
        info={"correct": np.bool_(True), "score": np.float32(0.5), "bad": "\udc80"},
        messages=(
            Message.of("user", red, "How many?"),
            Message.of("assistant", "3"),
            Message.of("tool", blue.to_pil()),
        ),
        replica_ids=("r1", "r2"),
    )
    two = trajectory("g0/1", reward=0.0, images=(red,))
    recorder = RunRecorder(tmp_path, QUIET)
    one.turns = (replace(one.turns[0], parts=(("answer", 1.0), ("format", 0.5))),)
    recorder.dump_trajectories(10, [TrajectoryGroup("g0", 7, [one, two], "count", 2)], [np.array([1.0, -1.0])], words)
    path = tmp_path / "trajectories" / "iteration-000010.parquet"
    first, second = read_trajectories(path)
    assert (first["iteration"], first["group_id"], first["trajectory_id"], first["index"]) == (10, "g0", "g0/0", 7)
    assert (first["env"], first["stage"]) == ("count", 2)
    for name in ("token_ids", "loss_mask", "logprobs"):
        np.testing.assert_array_equal(first[name], getattr(one, name))
    assert first["turns"] == [
        {
            "start": 2,
            "stop": 4,
            "policy_version": 3,
            "stop_reason": "end_of_turn",
            "reward": 0.5,
            "state_id": "shown",
            "pieces": [],
            "parts": [{"name": "answer", "value": 1.0}, {"name": "format", "value": 0.5}],
            "well_formed": True,
        }
    ]
    assert (first["reward"], first["advantage"], second["advantage"]) == (0.5, 1.0, -1.0)
    assert (first["status"], first["error"], first["replica_ids"]) == ("completed", "", ["r1", "r2"])
    assert first["info"] == {"correct": True, "score": 0.5, "bad": "?"}
    assert first["images"] == [red.sha256]
    assert first["messages"] == [
        {"role": "user", "parts": [{"image": red.sha256}, "How many?"]},
        {"role": "assistant", "parts": ["3"]},
        {"role": "tool", "parts": [{"image": blue.sha256}]},
    ]
    assert first["text"] == "5 6 7 8"
    images = tmp_path / "trajectories" / "images"
    assert {path.stem for path in images.iterdir()} == {red.sha256, blue.sha256}
    assert (images / f"{red.sha256}.png").read_bytes() == red.png
    assert leftovers(tmp_path) == []


def test_images_are_written_once(tmp_path):
    recorder = RunRecorder(tmp_path, QUIET)
    recorder.dump_trajectories(1, [group(0, images=(picture("red"),))], [np.zeros(3)], words)
    (image,) = (tmp_path / "trajectories" / "images").iterdir()
    before = image.stat().st_ino
    recorder.dump_trajectories(2, [group(0, images=(picture("red"),))], [np.zeros(3)], words)
    assert image.stat().st_ino == before
