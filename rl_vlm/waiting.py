"""Waiting for all coroutines or none, and for calls that are tried again."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
JITTER = random.Random()  # of pauses; environments may draw from the global generator, which a retry must not move


async def all_or_none(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; when one fails or the caller is cancelled, the others are cancelled and waited for."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def retried(call: Callable[[], T], errors: tuple[type[Exception], ...], seconds: float) -> T:
    """The result of `call`. After one of `errors` it is tried again, for about `seconds`; then the error is raised."""
    started, pause = time.monotonic(), _FIRST_PAUSE_S
    while True:
        try:
            return call()
        except errors:
            if time.monotonic() - started + pause > seconds:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
