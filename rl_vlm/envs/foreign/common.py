"""What several foreign interfaces need: held-out tasks, an event loop, messages in OpenAI's form."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Annotated, Any, TypeVar

from pydantic import Field

from rl_vlm.envs.errors import ROLES, EnvError, EnvTimeoutError
from rl_vlm.envs.images import as_image
from rl_vlm.safe_text import one_line
from rl_vlm.types import Message, Part, UserInputError

T = TypeVar("T")
Share = Annotated[float, Field(ge=0, lt=1)]
_JOIN_S = 2.0  # how long closing waits for what still runs


def not_made(error: Exception) -> UserInputError:
    """The error to raise where the user's code cannot make its environment, whatever it raised itself."""
    what = f"{type(error).__name__}: {one_line(error)}"
    return UserInputError(f"The environment cannot be loaded ({what}): correct env.kwargs, or install what is missing.")


def returned(result: Any, form: str) -> list[Any]:
    """What a call returned, if it has as many values as `form` names and ends with a dict or nothing as `info`.

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


def held_out(total: int, share: float) -> tuple[int, int]:
    """How many of the tasks of an environment that has one set of them are for training and, the last, for testing."""
    test = min(total - 1, max(1, round(total * share))) if total > 1 and share > 0 else 0
    return total - test, test


class BackgroundLoop:
    """An event loop in a thread of its own, which runs coroutines for synchronous code. `close` cancels what runs and
    ends the thread; `close.alive` says whether it was called."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="env-loop", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _stop, self._loop, thread)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        """The coroutine's result. After `timeout_s` it is cancelled, and EnvTimeoutError names `what`."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            if not future.cancel():
                raise  # the coroutine's own
            raise EnvTimeoutError(f"{what} took longer than {timeout_s:g} s.") from error
        except CancelledError as error:
            raise EnvTimeoutError(f"{what} was cancelled.") from error


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
    return Message(message["role"], tuple(map(_part, content)))


def _part(part: Any) -> Part:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]  # type: ignore[no-any-return]
    if kind in ("image", "image_url"):
        image = part.get(kind)
        return as_image(image.get("url", image) if isinstance(image, dict) else image)
    raise EnvError('A part of a message must be {"type": "text", "text": ...} or {"type": "image", "image": ...}.')
