"""What the tests of distillation share: a group of hand-made episodes, and what a teacher says of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from core_support import picture, plain_model, reference_logits, segmented_episode, text_side

from rl_vlm.config import TeacherModelSection
from rl_vlm.engines.base import Engine
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.models.loading import load_text_side
from rl_vlm.rollout.teacher import Teacher
from rl_vlm.testing import EngineClient
from rl_vlm.types import EncodedImage, PixelLimits, TeacherScores, Trajectory, TrajectoryGroup

TOP = 5


def group_of(folder: Path, side: int = 32) -> TrajectoryGroup:
    rng = np.random.default_rng(0)
    shown = [picture(np.random.default_rng(k), side, side) for k in range(5)]
    members = [segmented_episode(text_side(folder), rng, shown, f"t{k}", count) for k, count in enumerate((3, 2, 1))]
    return TrajectoryGroup("g", 0, members)


def scored(
    folder: Path,
    group: TrajectoryGroup,
    other: tuple[EncodedImage, ...] = (),
    engine: Engine | None = None,
    **settings: Any,
) -> list[TeacherScores]:
    """What the model of a folder says of a group, by its transformers engine or another one."""
    pixels = PixelLimits(None, settings.get("max_pixels"))
    served = engine or TransformersEngine(folder, max_context=2048, pixels=pixels)
    if settings.get("divergence", "reverse") != "reverse":
        settings["top_k"] = TOP
    section = TeacherModelSection(path=str(folder), **settings)
    teacher = Teacher(section, EngineClient(served), -1, load_text_side(folder, pixels))
    whole = asyncio.run(teacher.score(group, text_side(folder), other))
    found = [one.teacher for one in whole.trajectories if one.teacher is not None]
    if engine is None:
        asyncio.run(served.close())
    return found


def segments_of(one: Trajectory) -> Iterator[tuple[np.ndarray, np.ndarray, list[EncodedImage]]]:
    for segment in one.segments:
        yield (
            one.token_ids[segment.start : segment.stop],
            one.loss_mask[segment.start : segment.stop],
            [one.images[k] for k in segment.images],
        )


def check_scores(folder: Path, engine: Engine | None = None) -> None:
    """The scores of a teacher are its own distribution on every segment, by plain transformers."""
    group, model = group_of(folder), plain_model(folder)
    for one, scores in zip(group.trajectories, scored(folder, group, engine=engine, divergence="forward"), strict=True):
        with torch.no_grad():
            rows = [reference_logits(folder, model, ids, shown)[:-1][mask[1:]] for ids, mask, shown in segments_of(one)]
        wanted, own = torch.log_softmax(torch.cat(rows), -1), one.token_ids[one.loss_mask].astype(np.int64)
        np.testing.assert_allclose(scores.logprobs, wanted[range(len(own)), own], atol=1e-4)
        np.testing.assert_allclose(scores.top, wanted.topk(TOP).values, atol=1e-4)
        np.testing.assert_allclose(wanted.gather(1, torch.from_numpy(scores.ids).long()), scores.top, atol=1e-4)
