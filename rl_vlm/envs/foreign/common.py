"""What several foreign interfaces need: held-out tasks, an event loop, messages in OpenAI's form."""

from __future__ import annotations

import asyncio
import threading
import weakref
from abc import abstractmethod
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Annotated, Any, TypeVar

from pydantic import Field

from rl_vlm.envs.base import EpisodeEnv, Item
from rl_vlm.envs.errors import ROLES, EnvError, EnvTimeoutError
from rl_vlm.envs.images import as_image
from rl_vlm.types import Message, Part, Split

T = TypeVar("T")
Share = Annotated[float, Field(ge=0, lt=1)]
_JOIN_S = 2.0  # how long closing waits for what still runs


def returned(result: Any, form: str) -> list[Any]:
    """What a call returned, where it has as many values as `form` names and ends with a dict or nothing as `info`.

    `form`: "step(text) -> (obs, done, info)". Raises EnvError.
    """
    names = form.partition("-> (")[2].rstrip(")").split(", ")
    if not isinstance(result, tuple) or len(result) != len(names):
        raise EnvError(f"It must be {form}, and returned {str(result)[:80]}.")
    values = list(result)
    if names[-1] == "info":
        if not isinstance(values[-1], dict | None):
            raise EnvError(f"It must be {form} with a dict as info.")
        values[-1] = dict(values[-1] or {})
    return values


class HeldOutEnv(EpisodeEnv):
    """The base of adapters for environments that may know one set of tasks only, which is then divided into two splits.

    test_share: the last of the tasks are for testing, or every second one where there is no end; None: each split has
    its own.
    """

    def __init__(self, test_share: float | None, *, max_turns: int | None = None) -> None:
        super().__init__(max_turns=max_turns)
        self._test_share = test_share

    @abstractmethod
    def num_tasks(self, split: Split) -> int | None:
        """How many tasks the environment behind a split knows; None without end."""

    def num_items(self, split: Split) -> int | None:
        """How many of the tasks belong to the split; None without end."""
        total, share = self.num_tasks(split), self._test_share
        if total is None or share is None:
            return total
        test = min(total - 1, max(1, round(total * share))) if total > 1 and share > 0 else 0
        return test if split == "test" else total - test

    def task(self, item: Item) -> int:
        """The environment's own number of an item."""
        if self._test_share is None:
            return item.index
        train = self.num_items("train")
        if train is None:
            return 2 * item.index + (item.split == "test")
        return item.index + (train if item.split == "test" else 0)


class BackgroundLoop:
    """An event loop in a thread of its own. It runs coroutines for synchronous code, also where the caller's thread
    runs a loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="env-loop", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _stop, self.loop, self._thread)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        """The coroutine's result. EnvTimeoutError, which names `what`, after `timeout_s`; the coroutine is cancelled
        then."""
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


def to_message(message: Any) -> Message:
    """A Message from {"role", "content"}; content is text or a list of text and image parts."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise EnvError(f"A message must be a dict with a role among {', '.join(ROLES)}, and content.")
    content = message.get("content")
    if isinstance(content, str):
        return Message.of(message["role"], content)
    if not isinstance(content, list | tuple):
        raise EnvError(f"The content of a message must be text or a list of parts, not a {type(content).__name__}.")
    return Message(message["role"], tuple(_part(part) for part in content))


def _part(part: Any) -> Part:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]  # type: ignore[no-any-return]
    if kind == "image":
        return as_image(part.get("image"))
    if kind == "image_url":
        url = part.get("image_url")
        return as_image(url.get("url") if isinstance(url, dict) else url)
    raise EnvError('A part of a message must be {"type": "text", "text": ...} or {"type": "image", "image": ...}.')
