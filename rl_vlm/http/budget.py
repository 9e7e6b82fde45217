"""A bounded amount of something (bytes, values) that requests share: they take turns, in the order in which they came."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial


class Lease:
    """A part of something shared. `give_back` is called once, however often `release` is, and at the latest when nobody has it."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        """Give it back."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    def __del__(self) -> None:
        self.release()


class Budget:
    """At most `capacity` is out at a time. Who asks for more than that gets all of it."""

    def __init__(self, capacity: int) -> None:
        self._capacity = self._left = capacity
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def left(self) -> int:
        """What is not out."""
        return self._left

    async def take(self, amount: int) -> Lease:
        """Wait until `amount` is there. The caller bounds the time."""
        amount = min(amount, self._capacity)
        if self._waiting or amount > self._left:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((amount, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._give(amount)  # it was given in the same moment
                else:
                    with contextlib.suppress(ValueError):  # passed over in the same moment
                        self._waiting.remove((amount, turn))
                    self._give(0)  # who waited behind it may fit
                raise
        else:
            self._left -= amount
        return Lease(partial(self._give, amount))

    def _give(self, amount: int) -> None:
        self._left += amount
        while self._waiting and self._waiting[0][0] <= self._left:
            wanted, turn = self._waiting.popleft()
            if not turn.done():
                self._left -= wanted
                turn.set_result(None)
