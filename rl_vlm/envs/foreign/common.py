"""What several foreign interfaces need: environments made, held-out tasks, coroutines, messages in OpenAI's form."""

from __future__ import annotations

import asyncio
import importlib
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import Field

from rl_vlm.envs.base import EpisodeEnv
from rl_vlm.envs.errors import ROLES, EnvError, EnvTimeoutError
from rl_vlm.envs.foreign.stand_ins import with_stand_ins
from rl_vlm.envs.images import as_image
from rl_vlm.safe_text import one_line
from rl_vlm.types import Message, Part, UserInputError

T = TypeVar("T")
Share = Annotated[float, Field(ge=0, lt=1)]
_JOIN_S = 2.0  # how long closing waits for what still runs


def with_class(error: BaseException) -> str:
    """An exception in a line, with its class."""
    return f"{type(error).__name__}: {one_line(error)}"


def import_extra(module: str, extra: str) -> Any:
    """A module of a package that is installed for one interface only. Raises UserInputError without it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UserInputError(f"{package} is not installed ({error}): run `pip install 'rl-vlm[{extra}]'`.") from error


def make_foreign(factory: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    """What the user's class or function makes. Raises UserInputError for whatever it raises."""
    try:
        return with_stand_ins(partial(factory, *arguments, **more))
    except Exception as error:
        raise UserInputError(
            f"The environment cannot be loaded ({with_class(error)}): correct env.kwargs, or install what is missing."
        ) from error


def read_result(result: Any, form: str) -> list[Any]:
    """What a call returned, if it has as many values as `form` names and ends with a dict or nothing as `info`.

    `form`: "step(text) -> (obs, done, info)". Raises EnvError.
    """
    names = form.partition("-> (")[2].rstrip(")").split(", ")
    has_info = names[-1] == "info"
    fits = isinstance(result, tuple) and len(result) == len(names)
    if not fits or (has_info and not isinstance(result[-1], dict | None)):
        raise EnvError(f"It must be {form}{' with a dict as info' * has_info}, and returned {str(result)[:80]}.")
    return [*result[:-1], dict(result[-1] or {})] if has_info else list(result)


def held_out(total: int, share: float) -> tuple[int, int]:
    """How many of the tasks of an environment that has one set of them are for training and, the last, for testing."""
    test = min(total - 1, max(1, round(total * share))) if total > 1 and share > 0 else 0
    return total - test, test


class AsyncEnv(EpisodeEnv):
    """An EpisodeEnv whose calls are coroutines. They run in an event loop, in a thread that `close` ends.

    timeout_s: deadline of one call. base: arguments of EpisodeEnv.
    """

    def __init__(self, timeout_s: float, **base: Any) -> None:
        super().__init__(**base)
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_serve, args=(self._loop,), name="env-loop", daemon=True)
        thread.start()
        self._stop = weakref.finalize(self, _stop, self._loop, thread)

    def run(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        """The coroutine's result. After the deadline it is cancelled, and EnvTimeoutError names `what`."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(self._timeout_s)
        except TimeoutError as error:
            if not future.cancel():
                raise  # the coroutine's own
            raise EnvTimeoutError(f"{what} took longer than {self._timeout_s:g} s.") from error

    async def end(self) -> None:
        """What closing calls last."""

    def close(self) -> None:
        if self._stop.alive:
            with suppress(EnvTimeoutError):  # the loop is stopped in any case
                self.run(self.end(), f"{self.name}: close()")
            self._stop()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:  # whose end cancels what still runs
        runner.get_loop().run_forever()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join(_JOIN_S)


def to_message(message: Any) -> Message:
    """A Message from {"role", "content"}; content is text or a list of text and image parts."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise EnvError(f"A message must be a dict with a role among {', '.join(ROLES)}, and content.")
    content = message.get("content")
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list | tuple):
        raise EnvError(f"The content of a message must be text or a list of parts, not a {type(content).__name__}.")
    return Message(message["role"], tuple(map(_part, parts)))


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
