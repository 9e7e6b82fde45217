"""Sampled tokens on their way from an engine's thread to the event loop of whoever reads a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

import numpy as np

from rl_vlm.types import SampleChunk, StopReason

TopLogprobs = tuple[tuple[int, float], ...]


@dataclass(slots=True)
class _Growth:
    """What one sample has grown by since the reader looked last."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    stop_reason: StopReason | None = None


class TokenStream:
    """The tokens of one request. An engine's thread puts them in, one event loop reads chunks of what is there.

    A reader that is slower than the engine gets longer chunks, never an older state.
    """

    def __init__(self, num_samples: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._pending: deque[tuple[int, list[int], list[float], list[TopLogprobs], StopReason | None]] = deque()
        self._error: Exception | None = None
        self._unfinished = num_samples
        self.policy_version = 0  # set before the first token

    @property
    def has_news(self) -> bool:
        """Whether the reader has something to take."""
        return bool(self._pending)

    def put(
        self,
        number: int,
        token_ids: list[int],
        logprobs: list[float],
        top_logprobs: list[TopLogprobs],
        stop_reason: StopReason | None,
    ) -> None:
        """New tokens of sample `number`, from any thread; the reader learns of them by `notify`."""
        self._pending.append((number, token_ids, logprobs, top_logprobs, stop_reason))

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after the tokens that are in it; from any thread."""
        self._error = error
        notify([self])

    async def chunks(self) -> AsyncIterator[SampleChunk]:
        """Chunks until all samples have ended. Raises what `fail` was given."""
        while self._unfinished:
            await self._arrived.wait()
            self._arrived.clear()
            for chunk in self._take():
                self._unfinished -= chunk.stop_reason is not None
                yield chunk
            if self._error is not None and not self._pending:
                raise self._error

    def _take(self) -> list[SampleChunk]:
        growth: dict[int, _Growth] = {}
        while self._pending:
            number, token_ids, logprobs, top_logprobs, stop_reason = self._pending.popleft()
            entry = growth.setdefault(number, _Growth([], [], []))
            entry.token_ids += token_ids
            entry.logprobs += logprobs
            entry.top_logprobs += top_logprobs
            entry.stop_reason = stop_reason
        return [
            SampleChunk(
                number=number,
                token_ids=np.array(entry.token_ids, dtype=np.int32),
                logprobs=np.array(entry.logprobs, dtype=np.float32),
                policy_version=self.policy_version,
                stop_reason=entry.stop_reason,
                top_logprobs=tuple(entry.top_logprobs),
            )
            for number, entry in growth.items()
        ]


def notify(streams: Iterable[TokenStream]) -> None:
    """Wake the readers of these streams: one call per event loop, because waking a loop costs more than a token."""
    by_loop: dict[asyncio.AbstractEventLoop, list[TokenStream]] = {}
    for stream in streams:
        by_loop.setdefault(stream._loop, []).append(stream)
    for loop, members in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody reads
            loop.call_soon_threadsafe(_wake, members)


def _wake(streams: list[TokenStream]) -> None:
    for stream in streams:
        stream._arrived.set()
