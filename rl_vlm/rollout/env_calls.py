"""Calls of environments: their results or errors, and many of them in one thread as long as all are short."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rl_vlm.envs.errors import EnvError
from rl_vlm.types import RLVLMError

Timed = tuple[Any, float]  # the result or RLVLMError of a call, and its seconds


def timed(call: Callable[[], Any]) -> Timed:
    """The result of a call; what it raises becomes an RLVLMError in its place."""
    started = time.perf_counter()
    try:
        result = call()
    except RLVLMError as error:
        result = error
    except (Exception, SystemExit) as error:
        # User code may raise anything, and may even exit; it ends an episode, not the runner.
        result = EnvError(f"The environment raised {type(error).__name__}: {error}")
    return result, time.perf_counter() - started


class CallBatch:
    """Calls that one thread makes in their order, until the rest is taken from it.

    done: of the calls so far, in their order. began: when the present call began, on the monotonic clock.
    """

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self.calls = calls
        self.done: list[Timed] = []
        self.began = 0.0
        self._begun = 0
        self._taken = False
        self._lock = threading.Lock()

    def run(self) -> Timed | None:
        """What the thread does; returns the last call's result, None if it made none."""
        for call in self.calls:
            with self._lock:
                if self._taken:
                    break
                self._begun += 1
                self.began = time.monotonic()
            self.done.append(timed(call))
        return self.done[-1] if self.done else None

    def take_rest(self) -> int:
        """Let the thread end after its present call; returns how many it has begun."""
        with self._lock:
            self._taken = True
            return self._begun
