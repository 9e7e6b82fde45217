"""Episodes as parquet, one row each, and their images as PNG files named by SHA-256 (columns: docs/results.md)."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rl_vlm.files import to_jsonable, write_atomic
from rl_vlm.learning.plan import TokenRecord
from rl_vlm.models.images import TextSide
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import EncodedImage, Message, Trajectory, TrajectoryGroup, Turn, images_of

VERSION = 2  # of the columns; 1 had no column of tokens beside `logprobs`
_BEGINNING = 200  # characters of a question and an answer in a list
_WRITERS = 8
_ROWS = 64  # that a reader of one episode decodes
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
# Where a rewritten prompt begins, and the images that it and the turns after it show; none of an episode of one.
_SEGMENT = pa.struct([("start", pa.int32()), ("images", pa.list_(pa.int32()))])
_COUNTS = ("num_turns", "num_sampled", "oldest_version", "newest_version")
_SPAN = pa.struct([(name, pa.int32()) for name in ("start", "stop", "rows", "columns")])
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
        *((name, pa.list_(pa.float32())) for name in ("learner_logprobs", "advantages", "values", "entropies")),
        ("tokens", pa.list_(pa.string())),  # the text of each; empty in an image
        ("image_spans", pa.list_(_SPAN)),  # the tokens of each image, where it is first shown, and their grid
        ("segments", pa.list_(_SEGMENT)),
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
        ("correct", pa.bool_()),
        # What a list of episodes shows.
        *((name, pa.string()) for name in ("question", "answer")),
        *((name, pa.int64()) for name in (*_COUNTS, "tool_calls")),
        *((name, pa.string()) for name in ("variant", "view", "category")),  # of a held-out item
    ],
    metadata={"rl_vlm.version": str(VERSION)},
)


def choose_groups(groups: Sequence[TrajectoryGroup], rows: int, seed: int) -> list[int]:
    """Positions of random whole groups with at least `rows` trajectories. The first of a round had short episodes."""
    order = np.random.default_rng(seed).permutation(len(groups))
    before = np.cumsum([0, *(len(groups[position]) for position in order)])[:-1]
    return sorted(order[before < rows].tolist())


def write_trajectories(
    folder: Path, iteration: int, groups: Sequence[TrajectoryGroup], tokens: TokenRecord, text: TextSide
) -> Path:
    """Write `folder/iteration-000010.parquet` and the images that `folder/images` lacks."""
    path, images = folder / f"iteration-{iteration:06d}.parquet", dict[str, EncodedImage]()
    rows = [_row(group, one, text, tokens, images) for group in groups for one in group.trajectories]
    return _write(path, folder / "images", [row | {"iteration": iteration} for row in rows], images.values())


def write_evaluation(
    path: Path,
    folder: Path,
    iteration: int,
    items: Iterable[tuple[RolloutTask, TrajectoryGroup]],
    category: str,
    text: TextSide,
) -> Path:
    """Write the episodes of held-out items, and the images that `folder` lacks."""
    rows, images = [], dict[str, EncodedImage]()
    for task, group in items:
        row = _row(group, group.trajectories[0], text, TokenRecord(), images)
        kind = str(group.trajectories[0].info.get(category, ""))
        rows.append(row | {"iteration": iteration, "variant": task.variant, "view": task.view, "category": kind})
    return _write(path, folder, rows, images.values())


def _write(path: Path, folder: Path, rows: Sequence[Mapping[str, Any]], images: Iterable[EncodedImage]) -> Path:
    missing = [(folder / f"{image.sha256}.png", image.png) for image in images]
    missing = [(place, png) for place, png in missing if not place.exists()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(_WRITERS) as writers:  # each waits for the disk
            list(writers.map(lambda one: write_atomic(*one), missing))
    buffer = pa.BufferOutputStream()
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    pq.write_table(table, buffer, compression="zstd", row_group_size=_ROWS)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, buffer.getvalue().to_pybytes())
    return path


def _row(
    group: TrajectoryGroup,
    trajectory: Trajectory,
    text: TextSide,
    tokens: TokenRecord,
    images: dict[str, EncodedImage],
) -> dict[str, Any]:
    """The row of one trajectory, whose images are added to `images`."""
    # What the policy saw stands in the place of what the environment showed; it has not seen the last observation.
    pictures = images_of(trajectory.messages)
    shown = [*trajectory.images[: len(pictures)], *pictures[len(trajectory.images) :]]
    images |= {image.sha256: image for image in (*trajectory.images, *shown)}
    name, left = trajectory.trajectory_id, iter(shown)
    messages = [
        {
            "role": message.role,
            "parts": [part if isinstance(part, str) else {"image": next(left).sha256} for part in message.parts],
        }
        for message in trajectory.messages
    ]
    calls = trajectory.info.get("tool_calls", trajectory.info.get("calls"))
    row = {
        "group_id": group.group_id,
        "env": group.env,
        "stage": group.stage,
        "trajectory_id": name,
        "index": group.index,
        "turns": [_turn(turn) for turn in trajectory.turns],
        "reward": trajectory.reward,
        "advantage": float(tokens.advantages[name].mean()) if len(tokens.advantages.get(name, ())) else None,
        "status": str(trajectory.status),
        "error": trajectory.error,
        "info": json.dumps(to_jsonable(trajectory.info), ensure_ascii=False),
        "images": [image.sha256 for image in trajectory.images],
        "segments": [{"start": one.start, "images": list(one.images)} for one in trajectory.segments],
        "messages": json.dumps(to_jsonable(messages), ensure_ascii=False),
        "text": text.codec.decode(trajectory.token_ids),
        "replica_ids": list(trajectory.replica_ids),
        "correct": trajectory.correct,
        "question": _beginning(trajectory.messages, "user", 0),
        "answer": _beginning(trajectory.messages, "assistant", -1),
        "tool_calls": calls if isinstance(calls, int) else None,
        **{key: getattr(trajectory, key) for key in _COUNTS},
        **{"variant": "", "view": "true", "category": ""},
    }
    arrays: dict[str, Any] = {key: getattr(trajectory, key) for key in ("token_ids", "loss_mask", "logprobs")}
    arrays["tokens"] = token_texts(text, trajectory.token_ids)
    arrays["image_spans"] = _first_spans(text, trajectory)
    known = {
        "learner_logprobs": tokens.logprobs,
        "advantages": tokens.advantages,
        "values": tokens.values,
        "entropies": tokens.entropies,
    }
    for key, found in known.items():
        if name in found:
            arrays[key] = np.zeros(len(trajectory), np.float32)
            arrays[key][trajectory.loss_mask] = found[name]
    return {**to_jsonable(row), **arrays}


def _beginning(messages: Sequence[Message], role: str, place: int) -> str:
    """The first characters of a role's first (0) or last (-1) message."""
    texts = [message.text for message in messages if message.role == role]
    return " ".join(texts[place].split())[:_BEGINNING] if texts else ""


def token_texts(text: TextSide, token_ids: np.ndarray) -> list[str]:
    """What each token adds to the text: a character of several tokens belongs to its last one."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    in_image = token_ids == text.images.image_token_id
    return [
        "" if hidden else decoder.decode(text.codec.token_bytes(token))
        for token, hidden in zip(token_ids.tolist(), in_image.tolist(), strict=True)
    ]


def image_spans(text: TextSide, token_ids: np.ndarray, images: Sequence[EncodedImage]) -> list[dict[str, int]]:
    """Where the features of each image stand, and their rows and columns on it (0 where they are no grid)."""
    places, begun, spans = np.flatnonzero(token_ids == text.images.image_token_id), 0, []
    for image in images:
        own = places[begun : begun + text.images.num_features(image.width, image.height)]
        begun += len(own)
        if len(own):
            rows, columns = text.images.token_grid(image.width, image.height)
            spans.append({"start": int(own[0]), "stop": int(own[-1]) + 1, "rows": rows, "columns": columns})
    return spans


def _first_spans(text: TextSide, trajectory: Trajectory) -> list[dict[str, int]]:
    """`image_spans` of each image where it is shown first."""
    spans = image_spans(text, trajectory.token_ids, trajectory.placed_images)
    if not trajectory.segments:
        return spans
    numbers = [number for segment in trajectory.segments for number in segment.images]
    first = dict(zip(reversed(numbers), reversed(spans), strict=True))
    return [first[number] for number in sorted(first)]


def _turn(turn: Turn) -> dict[str, Any]:
    parts = [{"name": name, "value": value} for name, value in turn.parts]
    return {**asdict(turn), "stop_reason": str(turn.stop_reason), "parts": parts}
