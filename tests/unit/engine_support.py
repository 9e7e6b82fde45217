"""What the tests of engines share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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


async def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait for something that another thread does."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def language_linears(model: Any) -> dict[str, Any]:
    """The linear layers of the language model that an adapter may change, by name."""
    return {name: linear for name, linear in adaptable_linears(model).items() if "visual" not in name}
