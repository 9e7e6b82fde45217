"""Calls that may hang, and the end of a process in which one does: Python would wait for it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NoReturn, TypeVar

T = TypeVar("T")

# Calls that missed their deadline. The event is set if one ends after all.
hung_calls: list[tuple[str, threading.Event]] = []


def call_with_deadline(seconds: float, what: str, call: Callable[[], T]) -> T:
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


def exit_process(code: int) -> NoReturn:
    """End the process with this code; at once where a thread hangs, else as Python ends."""
    hung = [what for what, ended in hung_calls if not ended.is_set()]
    if not hung:
        sys.exit(code)
    print(f"rl-vlm: {hung[0]} still hangs; it is left behind.", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
