"""Sampled trajectories as parquet, one row each, and their images as PNG files named by SHA-256."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rl_vlm.files import to_jsonable, write_atomic
from rl_vlm.types import EncodedImage, Trajectory, TrajectoryGroup, Turn, images_of

_PART = pa.struct([("name", pa.string()), ("value", pa.float64())])
_TURN = pa.struct(
    [
        ("start", pa.int32()),
        ("stop", pa.int32()),
        ("policy_version", pa.int64()),
        ("stop_reason", pa.string()),
        ("reward", pa.float64()),
        ("state_id", pa.string()),  # equal where the environment showed the same
        ("pieces", pa.list_(pa.list_(pa.int64()))),  # [tokens, version] of each, where versions differ
        ("parts", pa.list_(_PART)),  # of the reward, before weights
        ("well_formed", pa.bool_()),
    ]
)
SCHEMA = pa.schema(
    [
        ("iteration", pa.int64()),
        ("group_id", pa.string()),
        ("env", pa.string()),  # its name in a mixture
        ("stage", pa.int64()),  # of the curriculum
        ("trajectory_id", pa.string()),
        ("index", pa.int64()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("turns", pa.list_(_TURN)),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),
        ("status", pa.string()),
        ("error", pa.string()),
        ("info", pa.string()),  # JSON
        ("images", pa.list_(pa.string())),  # SHA-256 of images/<sha256>.png
        ("messages", pa.string()),  # JSON: [{"role": ..., "parts": ["text", {"image": sha256}]}]
        ("text", pa.string()),  # all tokens, decoded
        ("replica_ids", pa.list_(pa.string())),
    ]
)


def choose_groups(groups: Sequence[TrajectoryGroup], rows: int, seed: int) -> list[int]:
    """Positions of random whole groups with at least `rows` trajectories. The first of a round had short episodes."""
    order = np.random.default_rng(seed).permutation(len(groups))
    before = np.cumsum([0, *(len(groups[position]) for position in order)])[:-1]
    return sorted(order[before < rows].tolist())


def write_trajectories(
    folder: Path,
    iteration: int,
    groups: Sequence[TrajectoryGroup],
    advantages: Sequence[np.ndarray],
    decode: Callable[[np.ndarray], str],
) -> Path:
    """Write `folder/iteration-000010.parquet` and the images that `folder/images` lacks; `advantages` is [G] each."""
    rows, images = [], folder / "images"
    for group, per_group in zip(groups, advantages, strict=True):
        for trajectory, advantage in zip(group.trajectories, per_group, strict=True):
            shown = images_of(trajectory.messages)
            for image in (*trajectory.images, *shown):
                if not (images / f"{image.sha256}.png").exists():
                    images.mkdir(parents=True, exist_ok=True)
                    write_atomic(images / f"{image.sha256}.png", image.png)
            row = _row(group, trajectory, iter(shown))
            row |= {"iteration": iteration, "advantage": float(advantage), "text": decode(trajectory.token_ids)}
            arrays = {name: getattr(trajectory, name) for name in ("token_ids", "loss_mask", "logprobs")}
            rows.append({**to_jsonable(row), **arrays})
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), buffer, compression="zstd")
    path = folder / f"iteration-{iteration:06d}.parquet"
    write_atomic(path, buffer.getvalue().to_pybytes())
    return path


def _row(group: TrajectoryGroup, trajectory: Trajectory, shown: Iterator[EncodedImage]) -> dict[str, Any]:
    messages = [
        {
            "role": message.role,
            "parts": [part if isinstance(part, str) else {"image": next(shown).sha256} for part in message.parts],
        }
        for message in trajectory.messages
    ]
    return {
        "group_id": group.group_id,
        "env": group.env,
        "stage": group.stage,
        "trajectory_id": trajectory.trajectory_id,
        "index": group.index,
        "turns": [_turn(turn) for turn in trajectory.turns],
        "reward": trajectory.reward,
        "status": str(trajectory.status),
        "error": trajectory.error,
        "info": json.dumps(to_jsonable(trajectory.info), ensure_ascii=False),
        "images": [image.sha256 for image in trajectory.images],
        "messages": json.dumps(to_jsonable(messages), ensure_ascii=False),
        "replica_ids": list(trajectory.replica_ids),
    }


def _turn(turn: Turn) -> dict[str, Any]:
    parts = [{"name": name, "value": value} for name, value in turn.parts]
    return {**asdict(turn), "stop_reason": str(turn.stop_reason), "parts": parts}
