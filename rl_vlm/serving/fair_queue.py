"""The order in which requests of several policies enter one engine: fair turns, and a bound on the work inside."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator

from rl_vlm.types import GenerationRequest

_IMAGE_PIXELS = 1024  # per token, of Qwen's processors
# Tokens of a part of a call that enters by itself: some hundred short answers, so that a round of a small run is one.
QUANTUM = 8192


def cost_of(request: GenerationRequest) -> int:
    """Tokens that a request may keep in memory: its prompt, and all new ones of its samples."""
    images = sum(image.width * image.height for image in request.images) // _IMAGE_PIXELS
    return len(request.prompt_ids) + images + request.sampling.n * request.sampling.max_new_tokens


class FairQueue:
    """Lets work of several policies into one engine, the policy first that has used least of it (fair queueing by
    virtual time), so that no busy policy gets ahead of another by more than one piece of work.

    A policy that comes, or comes back, counts as having used the least of those at work: being idle earns nothing. At
    most `capacity` is inside, and half of it of one policy, so that another one always finds room soon; work that costs
    more enters when its policy (and, if need be, everybody) has nothing else inside.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self._share = capacity, max(capacity // 2, 1)
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}
        self._inside: Counter[str] = Counter()
        self._used: dict[str, int] = {}

    @contextlib.asynccontextmanager
    async def entered(self, policy: str, cost: int) -> AsyncIterator[None]:
        """Inside this context the work of `cost` may be in the engine."""
        busy = [used for name, used in self._used.items() if self._inside[name] or self._waiting.get(name)]
        if not self._inside[policy] and not self._waiting.get(policy):
            self._used[policy] = max(self._used.get(policy, 0), min(busy, default=0))
        turn = (cost, asyncio.get_running_loop().create_future())
        waiting = self._waiting.setdefault(policy, deque())
        waiting.append(turn)
        try:
            self._let_in()
            await turn[1]
            yield
        finally:
            if turn in waiting:
                waiting.remove(turn)
            else:
                self._inside[policy] -= cost
            self._let_in()

    def _let_in(self) -> None:
        while (policy := self._next()) is not None:
            cost, turn = self._waiting[policy].popleft()
            self._inside[policy] += cost
            self._used[policy] += cost
            if not turn.done():
                turn.set_result(None)

    def _next(self) -> str | None:
        """The policy whose first piece of work enters now; None while there is no room or none waits."""
        ready = [
            policy
            for policy, waiting in self._waiting.items()
            if waiting and (not self._inside[policy] or self._inside[policy] + waiting[0][0] <= self._share)
        ]
        first = min(ready, key=lambda policy: self._used[policy], default=None)
        total = self._inside.total()
        if first is None or (total and total + self._waiting[first][0][0] > self._capacity):
            return None  # the others wait with it: work that is passed by for smaller one might wait for ever
        return first

    def forget(self, policy: str) -> None:
        """A policy is gone: nothing is owed any more."""
        if not self._inside[policy] and not self._waiting.get(policy):
            for known in (self._waiting, self._inside, self._used):
                known.pop(policy, None)
