"""Streams of sampled tokens, from an engine's thread to the reader's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

import numpy as np

from rl_vlm.types import SampleChunk, StopReason, TopLogprobs


@dataclass(slots=True)
class NewTokens:
    """Tokens of one sample that have not been read yet, and why it has ended."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)  # of each place, where asked for
    stop_reason: StopReason | None = None


class TokenStream:
    """The tokens of one request. An engine's thread adds them, one event loop reads them in chunks."""

    def __init__(self, num_samples: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._lock = threading.Lock()
        self._unread: dict[tuple[int, int], NewTokens] = {}  # by sample and version
        self._error: Exception | None = None
        self._unfinished = num_samples
        self.policy_version = 0  # of the tokens that are put next; set before the first

    def put(self, number: int, new: NewTokens) -> None:
        """Add tokens of sample `number`, from any thread; `notify` wakes the reader."""
        with self._lock:
            unread = self._unread.setdefault((number, self.policy_version), NewTokens())
            unread.token_ids += new.token_ids
            unread.logprobs += new.logprobs
            unread.top_logprobs += new.top_logprobs
            unread.stop_reason = new.stop_reason

    def fail(self, error: Exception) -> None:
        """End the stream with an error, raised after the tokens added before; from any thread."""
        self._error = error
        notify([self])

    async def chunks(self) -> AsyncIterator[SampleChunk]:
        """Chunks until all samples have ended. Raises what `fail` was given."""
        while self._unfinished:
            await self._arrived.wait()
            self._arrived.clear()
            with self._lock:
                unread, self._unread = self._unread, {}
            for (number, version), new in unread.items():
                self._unfinished -= new.stop_reason is not None
                yield SampleChunk(
                    number=number,
                    token_ids=np.array(new.token_ids, dtype=np.int32),
                    logprobs=np.array(new.logprobs, dtype=np.float32),
                    policy_version=version,
                    stop_reason=new.stop_reason,
                    top_logprobs=tuple(new.top_logprobs),
                )
            if self._error is not None and not self._unread:
                raise self._error


def notify(streams: Iterable[TokenStream]) -> None:
    """Wake the readers of those streams that have something to read, with one call per event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[TokenStream]] = {}
    for stream in streams:
        if stream._unread or stream._error is not None:
            by_loop.setdefault(stream._loop, []).append(stream)
    for loop, members in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the reader's loop is closed
            loop.call_soon_threadsafe(_wake, members)


def _wake(streams: list[TokenStream]) -> None:
    for stream in streams:
        stream._arrived.set()
