"""What the standard library leaves to its users about coroutines: all results or none, and following something for ever."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0  # between attempts that fail


async def all_or_none(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; when one fails or the caller is cancelled, the others are cancelled and waited for."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def repeat(attempt: Callable[[], Awaitable[None]], logger: logging.Logger, failure: str) -> None:
    """Repeat until cancelled. No failure ends it: each is logged as `failure`, and pauses grow from one to the next."""
    pause = _FIRST_PAUSE_S
    while True:
        try:
            await attempt()
            pause = _FIRST_PAUSE_S
        except Exception as error:
            logger.warning("%s: %r", failure, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
