"""The tiny models' warm start: supervised learning of form and perception, not of the task, in a minute.

A lesson module (`zoo/*/lesson.py`) has `drawer(seed)`, which returns a function that draws random conversations with
the replies to be learned, and `CORPUS`, texts whose words become single tokens, the more surely the more often they
come.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from rl_vlm.models.supervised import DialogueEncoder, Example, backward_mean_nll, collate, token_logprobs
from rl_vlm.types import Role

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 10.0


class Exchange(NamedTuple):
    """One message to the policy, its texts and images (uint8 [height, width, 3]), and the reply that is taught."""

    role: Role
    parts: tuple[str | np.ndarray, ...]
    reply: str

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))


Draw = Callable[[], Sequence[Exchange]]  # draws one conversation


def teach(
    model: Any,
    encoder: DialogueEncoder,
    draw: Draw,
    *,
    steps: int,
    batch: int,
    rise: int = 20,
    rate: float = 3e-3,
    buckets: Sequence[int] = (32, 64),
    name: str = "tiny",
) -> float:
    """Train all weights in place, one AdamW step per batch; returns the last loss (nats per token).

    The learning rate rises to `rate` over the first `rise` steps and falls linearly to 0 at `steps`. Rows of similar
    length share a forward pass, so that little is padding: `buckets` are the lengths that part them, in tokens.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / rise) * (1 - step / steps)
    )

    def examples() -> list[Example]:
        return [encoder.encode_chat(draw()) for _ in range(batch)]

    model.train()
    loss = float("nan")
    started = logged = time.monotonic()
    with ThreadPoolExecutor(1) as pool:  # a batch is drawn while the model computes the one before
        upcoming = pool.submit(examples)
        for number in range(1, steps + 1):
            taught = upcoming.result()
            if number < steps:
                upcoming = pool.submit(examples)
            loss = _train_step(model, optimizer, taught, encoder.pad_token_id, buckets)
            schedule.step()
            if time.monotonic() - logged > _LOG_EVERY_S:
                logged = time.monotonic()
                logger.info("%s: step %d of %d, loss %.3f, %.0f s", name, number, steps, loss, logged - started)
    model.eval()
    return loss


def _train_step(
    model: Any, optimizer: torch.optim.Optimizer, examples: list[Example], pad_token_id: int, lengths: Sequence[int]
) -> float:
    total = sum(int(example.targets.sum()) for example in examples)
    buckets: dict[int, list[Example]] = {}
    for example in examples:
        buckets.setdefault(bisect.bisect_left(lengths, len(example.token_ids)), []).append(example)
    loss = backward_mean_nll(
        (token_logprobs(model, *collate(bucket, pad_token_id)) for bucket in buckets.values()), total
    )
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss
