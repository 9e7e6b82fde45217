"""What the tests of engines share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.models.loading import TextSide


@contextmanager
def endless(engine: TransformersEngine, text: TextSide) -> Iterator[None]:
    """No turn ends by itself in here, so that a request runs for as long as the test says."""
    bias, end = engine.backbone.token_bias, text.codec.end_of_turn_id
    bias[end] = float("-inf")
    try:
        yield
    finally:
        bias[end] = 0.0


async def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait for something that another thread does."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)
