"""The tiny model's warm start: supervised learning of form and perception, not of the task, in a minute."""

from __future__ import annotations

import bisect
import logging
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_vlm.models.supervised import DialogueEncoder, Example, backward_mean_nll, collate, token_logprobs
from rl_vlm.models.vision import fast_vision
from rl_vlm.zoo.geo3k.dialogues import GeometryDialogues
from rl_vlm.zoo.shapes import data as shapes_data
from rl_vlm.zoo.shapes.lesson import Dialogue, perception_dialogue, target_dialogue

STEPS = 450
BATCH = 64
LEARNING_RATE = 3e-3
TARGET_SHARE, GEOMETRY_SHARE = 0.36, 0.06  # of the dialogues; the rest are perception questions
_BUCKETS = (32, 64)  # tokens; rows of similar length share a forward pass, so that little is padding

logger = logging.getLogger(__name__)


def warm_start(model: Any, encoder: DialogueEncoder, seed: int, steps: int = STEPS, batch: int = BATCH) -> float:
    """Train all weights in place on random dialogues; returns the last loss (nats per token)."""
    rng = np.random.default_rng([seed, 1])
    with fast_vision(model), tempfile.TemporaryDirectory() as folder:
        geometry = GeometryDialogues(Path(folder), seed)

        def examples() -> list[Example]:
            return [encode_dialogue(encoder, _random_dialogue(rng, geometry)) for _ in range(batch)]

        return teach(model, encoder, drawn_ahead(examples, steps), steps, LEARNING_RATE, name="tiny model: warm start")


def log_accuracy(model: Any, encoder: DialogueEncoder, loss: float, seconds: float) -> None:
    """Log the accuracy on the task, which should be near chance, on drawings of the train split."""
    from rl_vlm.zoo.shapes.sight import accuracy, choice_logprobs, sampled_accuracy

    rng = shapes_data.stable_rng("chance")
    drawn = [shapes_data.draw(rng, 1 + number % shapes_data.MAX_SHAPES, "train") for number in range(256)]
    questions = [shapes_data.count_question(shapes) for shapes, _ in drawn]
    logprobs = choice_logprobs(model, encoder, [pixels for _, pixels in drawn], questions)
    greedy, sampled = accuracy(logprobs, questions), sampled_accuracy(logprobs, questions)
    logger.info(
        "tiny model: done in %.0f s, loss %.3f; counting accuracy %.2f greedy, %.2f sampled (chance 0.25)",
        seconds, loss, greedy, sampled,
    )  # fmt: skip


def drawn_ahead(draw: Callable[[], list[Example]], count: int) -> Iterator[list[Example]]:
    """`count` batches; each is drawn while the model computes the one before."""
    with ThreadPoolExecutor(1) as pool:
        upcoming = pool.submit(draw) if count else None
        for number in range(count):
            assert upcoming is not None
            current = upcoming.result()
            upcoming = pool.submit(draw) if number + 1 < count else None
            yield current


def teach_drawn(
    model: Any, encoder: DialogueEncoder, draw: Callable[[], Example], steps: int, batch: int, name: str
) -> float:
    """`teach` from examples that are drawn at random while the model computes; returns the last loss (nats per token)."""

    def examples() -> list[Example]:
        return [draw() for _ in range(batch)]

    with fast_vision(model):
        return teach(
            model, encoder, drawn_ahead(examples, steps), steps, LEARNING_RATE, name=name, rise=20, log_every_s=10.0
        )


def teach(
    model: Any,
    encoder: DialogueEncoder,
    batches: Iterable[list[Example]],
    steps: int,
    lr: float,
    *,
    name: str,
    rise: int = 1,
    log_every_s: float = 5.0,
) -> float:
    """Train all weights in place, one AdamW step per batch; returns the last loss (nats per token).

    The learning rate rises over the first `rise` steps and falls linearly to 0 at `steps`.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / rise) * (1 - step / steps)
    )
    model.train()
    loss = float("nan")
    started = logged = time.monotonic()
    for number, batch in enumerate(batches, 1):
        loss = train_step(model, optimizer, batch, encoder.pad_token_id)
        schedule.step()
        if time.monotonic() - logged > log_every_s:
            logged = time.monotonic()
            logger.info("%s step %d of %d, loss %.3f, %.0f s", name, number, steps, loss, logged - started)
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
