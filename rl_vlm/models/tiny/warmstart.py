"""The tiny model's warm start: supervised learning of form and perception, not of the task, in a minute."""

from __future__ import annotations

import bisect
import logging
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_vlm.models.supervised import DialogueEncoder, Example, backward_mean_nll, collate, token_logprobs
from rl_vlm.models.tiny.dialogues import Dialogue, perception_dialogue, target_dialogue
from rl_vlm.models.tiny.geometry import GeometryDialogues
from rl_vlm.models.vision import fast_vision

STEPS = 450
BATCH = 64
LEARNING_RATE = 3e-3
TARGET_SHARE, GEOMETRY_SHARE = 0.36, 0.06  # of the dialogues; the rest are perception questions
_LOG_EVERY_S = 5.0
_BUCKETS = (32, 64)  # tokens; rows of similar length share a forward pass, so that little is padding

logger = logging.getLogger(__name__)


def warm_start(model: Any, encoder: DialogueEncoder, seed: int, steps: int = STEPS, batch: int = BATCH) -> float:
    """Train all weights in place on random dialogues; returns the last loss (nats per token)."""
    rng = np.random.default_rng([seed, 1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    model.train()
    loss = float("nan")
    started = logged = time.monotonic()
    with fast_vision(model), tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        geometry = GeometryDialogues(Path(folder), seed)

        def examples() -> list[Example]:
            return [encode_dialogue(encoder, _random_dialogue(rng, geometry)) for _ in range(batch)]

        upcoming = pool.submit(examples)
        for step in range(steps):
            current = upcoming.result()
            upcoming = pool.submit(examples)  # drawn while the model computes
            loss = train_step(model, optimizer, current, encoder.pad_token_id)
            schedule.step()
            if time.monotonic() - logged > _LOG_EVERY_S:
                logged = time.monotonic()
                spent = logged - started
                logger.info("tiny model: warm start step %d of %d, loss %.3f, %.0f s", step + 1, steps, loss, spent)
    model.eval()
    return loss


def _random_dialogue(rng: np.random.Generator, geometry: GeometryDialogues) -> Dialogue:
    draw = rng.random()
    if draw < TARGET_SHARE:
        return target_dialogue(rng)
    if draw < TARGET_SHARE + GEOMETRY_SHARE:
        return geometry.draw(rng)
    return perception_dialogue(rng)


def encode_dialogue(encoder: DialogueEncoder, dialogue: Dialogue) -> Example:
    """The dialogue as a teacher-forced example."""
    return encoder.encode(dialogue.images, dialogue.exchanges)


def train_step(model: Any, optimizer: torch.optim.Optimizer, examples: list[Example], pad_token_id: int) -> float:
    """One optimiser step on the examples; returns their loss (nats per token)."""
    total = sum(int(example.targets.sum()) for example in examples)
    buckets: dict[int, list[Example]] = {}
    for example in examples:
        buckets.setdefault(bisect.bisect_left(_BUCKETS, len(example.token_ids)), []).append(example)
    loss = backward_mean_nll(
        (token_logprobs(model, *collate(bucket, pad_token_id)) for bucket in buckets.values()), total
    )
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss
