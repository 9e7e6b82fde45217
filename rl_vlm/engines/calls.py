"""Calls of the transformers engine, which pass from the callers' event loops to the engine's thread and back."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.engines.rows import PreparedRequest
from rl_vlm.engines.streams import TokenStream
from rl_vlm.types import Completion, GenerationRequest


@dataclass(slots=True, eq=False)
class EngineCall:
    """One call of `generate` or `stream`: its requests, its answers as they come, and the future of all answers.

    Compared by identity: two calls may ask the same.
    """

    requests: list[GenerationRequest]
    future: asyncio.Future[list[Completion]]
    loop: asyncio.AbstractEventLoop
    answers: dict[int, Completion] = field(default_factory=dict)
    admitted: int = 0
    prepared: list[PreparedRequest] = field(default_factory=list)
    over: bool = False  # cancelled or refused: none of its remaining requests is started
    stream: TokenStream | None = None  # set by `stream`, which does not use the future

    @property
    def policy(self) -> str:
        return self.requests[0].policy

    @property
    def base_model(self) -> bool:
        return self.requests[0].min_version == BASE_MODEL


def end_call(call: EngineCall, error: Exception) -> None:
    """Raise an error in the caller of a call."""
    if call.stream is not None:
        call.stream.fail(error)
    else:
        resolve(call.loop, call.future, error=error)


def resolve(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future,  # type: ignore[type-arg]
    result: object = None,
    error: Exception | None = None,
) -> None:
    """Settle a future of another thread's event loop, unless it is settled or its loop is gone."""

    def settle() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    with contextlib.suppress(RuntimeError):  # the caller's loop is closed
        loop.call_soon_threadsafe(settle)
