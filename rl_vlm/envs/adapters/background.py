"""An event loop in a thread of its own, for environments whose methods are coroutines."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from rl_vlm.envs.errors import EnvTimeoutError

T = TypeVar("T")
_JOIN_S = 2.0  # how long closing waits for what still runs


class BackgroundLoop:
    """Runs coroutines from synchronous code, whether or not the caller's thread runs a loop itself."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="env-loop", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _stop, self.loop, self._thread)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        """The coroutine's result. EnvTimeoutError, which names `what`, after `timeout_s`; the coroutine is cancelled then."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            if not future.cancel():
                raise  # the coroutine's own
            raise EnvTimeoutError(f"{what} took longer than {timeout_s:g} s.") from error
        except CancelledError as error:
            raise EnvTimeoutError(f"{what} was cancelled.") from error

    def close(self) -> None:
        """Cancel what runs and end the thread."""
        self._end()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    async def cancel_all() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_JOIN_S) if tasks else None
        loop.stop()

    if threading.current_thread() is not thread and loop.is_running():
        asyncio.run_coroutine_threadsafe(cancel_all(), loop)
        thread.join(2 * _JOIN_S)
    if not loop.is_running():
        loop.close()
