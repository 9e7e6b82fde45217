"""Which requests may be in the engine: no more than their keys and values have memory for. The others wait, in two queues.

Engine transformers keeps keys and values in a rectangle, rows (samples) times the longest of them, and may reserve twice as many rows as
it has. Large requests leave an eighth of it to small ones, which do not wait behind them; while a large one waits, small ones take
that eighth and no more. vLLM bounds its memory itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass
from functools import partial

from rl_vlm.http.budget import Lease

_GROWTH = 2  # rows reserved for each that is in use
_SMALL = 16  # a small request takes at most this part of all
_RESERVED = 8  # the part that large requests leave


@dataclass(frozen=True, slots=True)
class _Asked:
    rows: int
    length: int
    small: bool


class KVRoom:
    """The engine's memory, from outside.

    Args:
        tokens: keys and values of so many tokens fit, one request alone.
        rows: samples that run at a time.
    """

    def __init__(self, tokens: int, rows: int) -> None:
        self.tokens, self._max_rows = tokens, rows
        self._rows = self._small_rows = self._inside = self._longest = 0
        self._waiting: dict[bool, deque[tuple[_Asked, asyncio.Future[None]]]] = {True: deque(), False: deque()}

    async def take(self, rows: int, length: int) -> Lease:
        """Wait for a place for `rows` samples of up to `length` tokens, prompt included. The caller bounds the time."""
        small = rows * length * _SMALL * _GROWTH <= self.tokens and rows * _SMALL <= self._max_rows
        asked, turn = _Asked(rows, length, small), asyncio.get_running_loop().create_future()
        self._waiting[small].append((asked, turn))
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._leave(asked)  # it was let in in the same moment
            else:
                with contextlib.suppress(ValueError):  # passed over in the same moment
                    self._waiting[small].remove((asked, turn))
                self._let_in()  # who waited behind it may fit
            raise
        return Lease(partial(self._leave, asked))

    def _fits(self, asked: _Asked) -> bool:
        rows, longest = self._rows + asked.rows, max(self._longest, asked.length)
        area, large_waits = rows * longest * _GROWTH, bool(self._waiting[False])
        if not asked.small:
            part = 1 - 1 / _RESERVED
            return not self._inside or (area <= part * self.tokens and rows <= part * self._max_rows)
        if large_waits:
            small = self._small_rows + asked.rows
            share = small * longest * _GROWTH * _RESERVED <= self.tokens and small * _RESERVED <= self._max_rows
            return not self._small_rows or share
        return not self._inside or (area <= self.tokens and rows <= self._max_rows)

    def _let_in(self) -> None:
        for queue in (self._waiting[True], self._waiting[False]):
            while queue and (queue[0][1].done() or self._fits(queue[0][0])):
                asked, turn = queue.popleft()
                if not turn.done():
                    self._inside += 1
                    self._rows += asked.rows
                    self._small_rows += asked.rows * asked.small
                    self._longest = max(self._longest, asked.length)
                    turn.set_result(None)

    def _leave(self, asked: _Asked) -> None:
        self._inside -= 1
        self._rows -= asked.rows
        self._small_rows -= asked.rows * asked.small
        if not self._inside:
            self._longest = 0  # the engine keeps the length of its rectangle until it is empty
        self._let_in()
