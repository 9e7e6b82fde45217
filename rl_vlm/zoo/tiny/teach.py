"""The tiny models' warm start: supervised learning of form and perception, not of the task, in a minute.

A lesson module (`zoo/*/lesson.py`) has `drawer(seed)`, which returns a function that draws random conversations with
the replies to be learned, and `CORPUS`, the texts whose words become single tokens: the more often a word stands there,
the more surely.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from rl_vlm.models.supervised import DialogueEncoder, Example, backward_mean_nll, collate, token_logprobs
from rl_vlm.types import Role


class Exchange(NamedTuple):
    """One message to the policy, texts and images (uint8 [height, width, 3]) in order, and the reply that is taught."""

    role: Role
    parts: tuple[str | np.ndarray, ...]
    reply: str

    @property
    def text(self) -> str:
        """The texts of the message."""
        return "".join(part for part in self.parts if isinstance(part, str))


Draw = Callable[[], Sequence[Exchange]]  # draws one conversation

LEARNING_RATE = 3e-3
_BUCKETS = (32, 64)  # tokens; rows of similar length share a forward pass, so that little is padding
_LOG_EVERY_S = 10.0

logger = logging.getLogger(__name__)


def teach(
    model: Any, encoder: DialogueEncoder, draw: Draw, *, steps: int, batch: int, rise: int = 20, name: str = "tiny"
) -> float:
    """Train all weights in place, one AdamW step per batch of drawn conversations; returns the last loss (nats per
    token).

    The learning rate rises over the first `rise` steps and falls linearly to 0 at `steps`.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / rise) * (1 - step / steps)
    )

    def examples() -> list[Example]:
        return [encoder.encode_chat(draw()) for _ in range(batch)]

    model.train()
    loss = float("nan")
    started = logged = time.monotonic()
    for number, taught in enumerate(_drawn_ahead(examples, steps), 1):
        loss = _train_step(model, optimizer, taught, encoder.pad_token_id)
        schedule.step()
        if time.monotonic() - logged > _LOG_EVERY_S:
            logged = time.monotonic()
            logger.info("%s: step %d of %d, loss %.3f, %.0f s", name, number, steps, loss, logged - started)
    model.eval()
    return loss


def _drawn_ahead(draw: Callable[[], list[Example]], count: int) -> Iterator[list[Example]]:
    """`count` batches; each is drawn while the model computes the one before."""
    with ThreadPoolExecutor(1) as pool:
        upcoming = pool.submit(draw) if count else None
        for number in range(count):
            assert upcoming is not None
            current = upcoming.result()
            upcoming = pool.submit(draw) if number + 1 < count else None
            yield current


def _train_step(model: Any, optimizer: torch.optim.Optimizer, examples: list[Example], pad_token_id: int) -> float:
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
