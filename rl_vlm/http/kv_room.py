"""Which requests may be in the engine: no more than their keys and values have memory for. The others wait, in two queues.

Engine transformers keeps keys and values in a rectangle, rows (samples) times the longest of them since it was empty, and may reserve
twice as many rows as it has (`RowCache`, beside which the tests run this). Large requests leave an eighth of it to small ones, which do
not wait behind them; while a large one waits, small ones take that eighth and no more. A small request that is longer than all that
run makes all of them longer: where there is no memory for that, it waits with the large ones. vLLM bounds its memory itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass
from functools import partial

from rl_vlm.http.budget import Lease
from rl_vlm.models.memory.parts import KV_BLOCK, KV_ROWS_PER_USED

_SMALL = 16  # a small request takes at most this part of all
_RESERVED = 8  # the part that large requests leave


@dataclass(eq=False, slots=True)
class _Asked:
    rows: int
    length: int  # whole blocks
    small: bool
    number: int  # in the order in which they came
    turn: asyncio.Future[None]


class KVRoom:
    """The engine's memory, from outside.

    Args:
        tokens: keys and values of so many tokens fit, in all replicas together.
        rows: samples that run at a time.
        largest: tokens of one request, which is in one replica; all by default.
    """

    def __init__(self, tokens: int, rows: int, largest: int | None = None) -> None:
        self.tokens, self._max_rows = tokens, rows
        self.largest = tokens if largest is None else min(largest, tokens)
        self._rows = self._small_rows = self._inside = self._longest = self._asked = 0
        self._small: deque[_Asked] = deque()
        self._large: deque[_Asked] = deque()

    def longest(self, rows: int) -> int:
        """Tokens that each sample of a request of so many may have, prompt included."""
        return self.largest // rows // KV_BLOCK * KV_BLOCK

    async def take(self, rows: int, length: int) -> Lease:
        """Wait for a place for `rows` samples of up to `length` tokens (at most `longest`). The caller bounds the time."""
        length = -(-length // KV_BLOCK) * KV_BLOCK
        small = rows * length * _SMALL * KV_ROWS_PER_USED <= self.tokens and rows * _SMALL <= self._max_rows
        self._asked += 1
        asked = _Asked(rows, length, small, self._asked, asyncio.get_running_loop().create_future())
        (self._small if small else self._large).append(asked)
        self._let_in()
        try:
            await asked.turn
        except asyncio.CancelledError:
            if not asked.turn.cancelled():
                self._leave(asked)  # it was let in in the same moment
            else:
                for queue in (self._small, self._large):
                    with contextlib.suppress(ValueError):  # passed over in the same moment
                        queue.remove(asked)
                self._let_in()  # who waited behind it may fit
            raise
        return Lease(partial(self._leave, asked))

    def _has_memory(self, asked: _Asked, part: float = 1.0) -> bool:
        """Whether the engine keeps within this part of its memory with one more request."""
        rows, longest = self._rows + asked.rows, max(self._longest, asked.length)
        area = rows * longest * KV_ROWS_PER_USED
        return not self._inside or (area <= part * self.tokens and rows <= part * self._max_rows)

    def _needs_all(self, asked: _Asked) -> bool:
        """Whether it does not fit beside the eighth that small ones may take, nor into what large ones leave of the rest."""
        part = 1 - 2 / _RESERVED
        return asked.rows * asked.length * KV_ROWS_PER_USED > part * self.tokens or asked.rows > part * self._max_rows

    def _small_fits(self, asked: _Asked) -> bool:
        if not self._has_memory(asked):
            return False
        if self._large and asked.number > self._large[0].number and self._needs_all(self._large[0]):
            return False
        if not self._large or not self._small_rows:
            return True
        # Counted as long as all will be once the large one is in, or it would find no place beside them.
        rows, longest = self._small_rows + asked.rows, max(self._longest, asked.length, self._large[0].length)
        return rows * longest * KV_ROWS_PER_USED * _RESERVED <= self.tokens and rows * _RESERVED <= self._max_rows

    def _let_in(self) -> None:
        while self._small:
            asked = self._small[0]
            if asked.turn.done() or self._small_fits(asked):
                self._enter(self._small.popleft())
            elif asked.length > self._longest and not self._has_memory(asked):
                asked.small = False
                self._large.append(self._small.popleft())
            else:
                break
        while self._large and (self._large[0].turn.done() or self._has_memory(self._large[0], 1 - 1 / _RESERVED)):
            self._enter(self._large.popleft())

    def _enter(self, asked: _Asked) -> None:
        if asked.turn.done():  # its client went away
            return
        self._inside += 1
        self._rows += asked.rows
        self._small_rows += asked.rows * asked.small
        self._longest = max(self._longest, asked.length)
        asked.turn.set_result(None)

    def _leave(self, asked: _Asked) -> None:
        self._inside -= 1
        self._rows -= asked.rows
        self._small_rows -= asked.rows * asked.small
        if not self._inside:
            self._longest = 0  # the engine keeps the length of its rectangle until it is empty
        self._let_in()
