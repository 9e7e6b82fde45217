"""Streams of sampled tokens, from an engine's thread to the reader's event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

import numpy as np

from rl_vlm.types import SampleChunk, StopReason, TopLogprobs


@dataclass(slots=True)
class _NewTokens:
    """Tokens of one sample that have not been read yet."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    stop_reason: StopReason | None = None


class TokenStream:
    """The tokens of one request. An engine's thread adds them, one event loop reads them in chunks.

    A reader that is slower than the engine gets longer chunks.
    """

    def __init__(self, num_samples: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._pending: deque[tuple[int, int, list[int], list[float], list[TopLogprobs], StopReason | None]] = deque()
        self._error: Exception | None = None
        self._unfinished = num_samples
        self.policy_version = 0  # of the tokens that are put next; set before the first

    @property
    def has_tokens(self) -> bool:
        """Whether there are tokens that have not been read."""
        return bool(self._pending)

    def put(
        self,
        number: int,
        token_ids: list[int],
        logprobs: list[float],
        top_logprobs: list[TopLogprobs],
        stop_reason: StopReason | None,
    ) -> None:
        """Add tokens of sample `number`, from any thread; `notify` wakes the reader."""
        self._pending.append((number, self.policy_version, token_ids, logprobs, top_logprobs, stop_reason))

    def fail(self, error: Exception) -> None:
        """End the stream with an error, which is raised after the tokens added before; from any thread."""
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
        growth: dict[tuple[int, int], _NewTokens] = {}
        while self._pending:
            number, version, token_ids, logprobs, top_logprobs, stop_reason = self._pending.popleft()
            entry = growth.setdefault((number, version), _NewTokens([], [], []))
            entry.token_ids += token_ids
            entry.logprobs += logprobs
            entry.top_logprobs += top_logprobs
            entry.stop_reason = stop_reason
        return [
            SampleChunk(
                number=number,
                token_ids=np.array(entry.token_ids, dtype=np.int32),
                logprobs=np.array(entry.logprobs, dtype=np.float32),
                policy_version=version,
                stop_reason=entry.stop_reason,
                top_logprobs=tuple(entry.top_logprobs),
            )
            for (number, version), entry in growth.items()
        ]


def notify(streams: Iterable[TokenStream]) -> None:
    """Wake the readers of these streams: one call per event loop, because waking a loop costs more than a token."""
    by_loop: dict[asyncio.AbstractEventLoop, list[TokenStream]] = {}
    for stream in streams:
        by_loop.setdefault(stream._loop, []).append(stream)
    for loop, members in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the reader's loop is closed
            loop.call_soon_threadsafe(_wake, members)


def _wake(streams: list[TokenStream]) -> None:
    for stream in streams:
        stream._arrived.set()
