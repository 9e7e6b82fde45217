"""The order in which requests of several policies enter one engine: fair turns, and a bound on the work inside."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rl_vlm.types import GenerationRequest

T = TypeVar("T")

_IMAGE_PIXELS = 1024  # per token, of Qwen's processors
# Tokens of a turn: some hundred short answers, so that a round of a small run is one turn.
QUANTUM = 8192


def cost_of(request: GenerationRequest) -> int:
    """Tokens that a request may keep in memory: its prompt, and all new ones of its samples."""
    images = sum(image.width * image.height for image in request.images) // _IMAGE_PIXELS
    return len(request.prompt_ids) + images + request.sampling.n * request.sampling.max_new_tokens


class DeficitRoundRobin:
    """Deficit round robin (Shreedhar and Varghese 1996), paid afterwards, so that costs need not be known in advance.

    Each turn brings `quantum`; a name goes on while its account is positive and may overdraw it once, which its next
    turns pay back. So of two names that both have work all the time, neither gets more than `quantum` and one overdraft
    ahead of the other per round, whatever the sizes of their pieces. A name without work loses what it has
    saved, and keeps what it owes.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._accounts: dict[str, int] = {}  # in the order of the turns, the current one first

    def next(self, busy: Collection[str]) -> str | None:
        """The name whose turn it is, of those that have work; None if none has."""
        if not busy:
            return None
        for name, account in self._accounts.items():
            if name not in busy:
                self._accounts[name] = min(account, 0)
        for name in busy:
            self._accounts.setdefault(name, 0)
        while True:
            name = next(iter(self._accounts))
            if name in busy and self._accounts[name] > 0:
                return name
            # To the end of the order. What it gets is for the turn that begins when it is the first again.
            account = self._accounts.pop(name)
            self._accounts[name] = account + self._quantum if name in busy else account

    def charge(self, name: str, cost: int) -> None:
        """`name` has used this much."""
        if name in self._accounts:
            self._accounts[name] -= cost

    def forget(self, name: str) -> None:
        """`name` will not come back."""
        self._accounts.pop(name, None)


@dataclass(slots=True)
class _Account:
    """One policy's waiting items with their costs, and the cost of its items inside."""

    waiting: deque[tuple[int, Any]]
    inside: int = 0


class FairQueue(Generic[T]):
    """Items of policies, by deficit round robin over their costs (`DeficitRoundRobin`). No clock, no threads, no event
    loop.

    At most `capacity` is inside at a time, and half of it of one policy, so that another one always finds room soon; an
    item that costs more enters when its policy (and, if need be, everybody) has nothing else inside.
    """

    def __init__(self, capacity: int, quantum: int) -> None:
        self._capacity, self._share = capacity, max(capacity // 2, 1)
        self._turns = DeficitRoundRobin(quantum)
        self._accounts: dict[str, _Account] = {}
        self.inside = 0

    def push(self, policy: str, cost: int, item: T) -> None:
        """Queue an item."""
        self._accounts.setdefault(policy, _Account(deque())).waiting.append((cost, item))

    def pop(self) -> T | None:
        """The item that enters now; None while there is no room or no item waits."""
        ready = [
            policy
            for policy, account in self._accounts.items()
            if account.waiting and (not account.inside or account.inside + account.waiting[0][0] <= self._share)
        ]
        policy = self._turns.next(ready)
        if policy is None:
            return None
        account = self._accounts[policy]
        cost, item = account.waiting[0]
        if self.inside and self.inside + cost > self._capacity:
            return None  # the others wait with it: an item that is passed by for smaller ones might wait for ever
        account.waiting.popleft()
        account.inside += cost
        self.inside += cost
        self._turns.charge(policy, cost)
        return item  # type: ignore[no-any-return]

    def leave(self, policy: str, cost: int) -> None:
        """An item has left the engine."""
        self._accounts[policy].inside -= cost
        self.inside -= cost
        self._tidy(policy)

    def remove(self, policy: str, cost: int, item: T) -> bool:
        """Take back an item that has not entered; False if it has."""
        account = self._accounts.get(policy)
        if account is None or (cost, item) not in account.waiting:
            return False
        account.waiting.remove((cost, item))
        self._tidy(policy)
        return True

    def _tidy(self, policy: str) -> None:
        account = self._accounts[policy]
        if not account.waiting and not account.inside:
            del self._accounts[policy]

    def forget(self, policy: str) -> None:
        """A policy is gone: nothing is owed any more."""
        self._turns.forget(policy)

    def waiting(self) -> dict[str, int]:
        """Items that wait, by policy."""
        return {policy: len(account.waiting) for policy, account in self._accounts.items()}


class Gate:
    """A `FairQueue` for coroutines."""

    def __init__(self, capacity: int, quantum: int) -> None:
        self.queue: FairQueue[asyncio.Future[None]] = FairQueue(capacity, quantum)

    @contextlib.asynccontextmanager
    async def entered(self, policy: str, cost: int) -> AsyncIterator[None]:
        """Inside this context the work of `cost` may be in the engine."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.queue.push(policy, cost, turn)
        self._let_in()
        try:
            await turn
            yield
        finally:
            if not self.queue.remove(policy, cost, turn):
                self.queue.leave(policy, cost)
            self._let_in()

    def _let_in(self) -> None:
        while (turn := self.queue.pop()) is not None:
            if not turn.done():
                turn.set_result(None)
