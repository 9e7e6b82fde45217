"""Tests that are coroutines."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test in an event loop of its own, which does not wait for ever."""

    @functools.wraps(test)
    def run(*given: Any, **fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*given, **fixtures), 240))

    return run
