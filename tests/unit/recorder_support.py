"""Small trajectories, and readers of what a RunRecorder writes."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from rl_vlm.config import PolicyConfig
from rl_vlm.types import EncodedImage, StopReason, Trajectory, TrajectoryGroup, TrajectoryStatus, Turn

QUIET = PolicyConfig.model_validate({"logging": {"tensorboard": False, "trajectories_per_dump": 4}})


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def evaluations(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]


def read_trajectories(path: Path) -> list[dict]:
    rows = pq.ParquetFile(path).read().to_pylist()
    return [{**row, "info": json.loads(row["info"]), "messages": json.loads(row["messages"])} for row in rows]


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.name.startswith(".") or path.name.endswith(".tmp")]


def picture(color: str) -> EncodedImage:
    return EncodedImage.from_pil(Image.new("RGB", (8, 8), color))


def trajectory(name: str, reward: float = 1.0, images: tuple[EncodedImage, ...] = (), **kwargs) -> Trajectory:
    return Trajectory(
        trajectory_id=name,
        token_ids=np.array([5, 6, 7, 8], dtype=np.int32),
        loss_mask=np.array([False, False, True, True]),
        logprobs=np.array([0, 0, -0.5, -0.25], dtype=np.float32),
        turns=(Turn(2, 4, 3, StopReason.END_OF_TURN, reward, "shown"),),
        status=TrajectoryStatus.COMPLETED,
        images=images,
        **kwargs,
    ).check()


def group(number: int, size: int = 3, **kwargs) -> TrajectoryGroup:
    return TrajectoryGroup(f"g{number}", number, [trajectory(f"g{number}/{place}", **kwargs) for place in range(size)])


class Words:
    """A text side whose tokens are the numbers of their ids; 6 is that of images, of which each takes one."""

    codec = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)), token_bytes=lambda token: b" %d" % token)
    images = SimpleNamespace(
        image_token_id=6, num_features=lambda width, height: 1, token_grid=lambda width, height: (1, 1)
    )


WORDS: Any = Words()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, round(e.value, 5)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
