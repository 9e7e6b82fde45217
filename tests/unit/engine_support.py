"""What the tests of engines share."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.models.images import TextSide
from rl_vlm.models.lora import adaptable_linears


@contextmanager
def endless(engine: TransformersEngine, text: TextSide) -> Iterator[None]:
    """No turn ends by itself in here, so that a request runs for as long as the test says."""
    bias, end = engine.backbone.token_bias, text.codec.end_of_turn_id
    bias[end] = float("-inf")
    try:
        yield
    finally:
        bias[end] = 0.0


def out_of_memory(engine: TransformersEngine, call: int, patch: pytest.MonkeyPatch) -> None:
    """Its backbone has no memory left for this call of `logits`, counted from 1."""
    logits, calls = engine.backbone.logits, itertools.count(1)

    def fails(*args: Any, **more: Any) -> Any:
        if next(calls) == call:
            raise torch.OutOfMemoryError("out of memory")
        return logits(*args, **more)

    patch.setattr(engine.backbone, "logits", fails)


async def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait for something that another thread does."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def language_linears(model: Any) -> dict[str, Any]:
    """The linear layers of the language model that an adapter may change, by name."""
    return {name: linear for name, linear in adaptable_linears(model).items() if "visual" not in name}
