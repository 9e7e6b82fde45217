"""Waiting: for all coroutines or none, for calls that are tried again, and for those that may hang."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

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


# Calls that may hang, and the end of a process in which one does: Python would wait for it.

hung_calls: list[tuple[str, threading.Event]] = []  # what does not end within its deadline; set if it ends after all


def within(seconds: float, what: str, call: Callable[[], T]) -> T:
    """The result of a call that knows no deadline. TimeoutError leaves its thread, `what` it does, behind."""
    answer: Future[T] = Future()
    ended = threading.Event()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)  # raised where it is waited for
        finally:
            ended.set()

    threading.Thread(target=work, name=what, daemon=True).start()
    if not ended.wait(seconds):
        hung_calls.append((what, ended))
        raise TimeoutError(f"{what} did not end within {seconds:g} s")
    return answer.result()


def leave(code: int) -> NoReturn:
    """End the process with this code; at once where a thread hangs, else as Python ends."""
    hung = [what for what, ended in hung_calls if not ended.is_set()]
    if not hung:
        sys.exit(code)
    print(f"rl-vlm: {hung[0]} still hangs; it is left behind.", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
