"""What the HTTP side lets into the engine, beside the keys and values that the engine then holds."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from rl_vlm.engines.kv_cache import RowCache
from rl_vlm.http.budget import Lease
from rl_vlm.http.kv_room import KVRoom

TOKENS, ROWS = 64 * 4096, 512


@dataclass(eq=False)
class Asked:
    """A request on its way through room and engine."""

    rows: int
    length: int
    place: asyncio.Task[Lease]
    left: int = 0  # samples that are not finished


@dataclass
class Engine:
    """Keys and values of one layer, one head and one number each; rows as `Decoder` admits and retires them."""

    cache: RowCache = field(default_factory=RowCache)
    owners: list[Asked] = field(default_factory=list)

    @property
    def held(self) -> int:
        """Tokens that there is memory for, in use or not."""
        keys = self.cache._keys
        return keys[0].shape[0] * keys[0].shape[2] if keys else 0

    def admit(self, batch: list[Asked]) -> None:
        """Prefill requests together."""
        prompt = torch.zeros(len(batch), 1, min(one.length for one in batch), 1)
        source = [k for k, one in enumerate(batch) for _ in range(one.rows)]
        self.cache.admit([(prompt, prompt)], torch.tensor(source), max(one.length for one in batch))
        for one in batch:
            one.left = one.rows
            self.owners += [one] * one.rows

    def retire(self, rows: set[int]) -> None:
        """Finish samples; a request gives its place back with the last of its own."""
        kept = [row for row in range(len(self.owners)) if row not in rows]
        self.cache.keep(torch.tensor(kept, dtype=torch.long))
        ended = [self.owners[row] for row in rows]
        self.owners = [self.owners[row] for row in kept]
        for one in ended:
            one.left -= 1
            if not one.left:
                one.place.result().release()


class Both:
    """A room and the engine behind it."""

    def __init__(self, tokens: int, rows: int) -> None:
        self.room, self.engine = KVRoom(tokens, rows), Engine()
        self.waiting: list[Asked] = []

    def ask(self, rows: int, length: int) -> Asked:
        """Send a request."""
        one = Asked(rows, length, asyncio.ensure_future(self.room.take(rows, length)))
        self.waiting.append(one)
        return one

    async def settle(self) -> None:
        """Let everybody act who can."""
        for _ in range(4):
            await asyncio.sleep(0)

    def take(self) -> list[Asked]:
        """The requests that have been let in since."""
        ready = [one for one in self.waiting if one.place.done()]
        self.waiting = [one for one in self.waiting if not one.place.done()]
        return ready

    async def enter(self) -> None:
        """The engine takes what is let in, request by request."""
        await self.settle()
        for one in self.take():
            self.engine.admit([one])

    async def finish(self, *requests: Asked) -> None:
        """All samples of these requests end."""
        self.engine.retire({row for row, owner in enumerate(self.engine.owners) if owner in requests})
        await self.enter()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


def test_rows_that_a_burst_left_behind_do_not_become_longer() -> None:
    async def work() -> None:
        both = Both(TOKENS, ROWS)
        stays = both.ask(8, 256)
        burst = [both.ask(64, 256) for _ in range(6)]
        await both.enter()
        assert len(both.engine.owners) == 8 + 6 * 64
        await both.finish(*burst)
        both.ask(1, 4096)
        await both.enter()
        assert len(both.engine.owners) == 9 and both.engine.held <= 2 * 9 * 4096
        await both.finish(stays)

    run(work())


def test_a_long_request_waits_for_memory_however_few_samples_it_has() -> None:
    async def work() -> None:
        both = Both(TOKENS, ROWS)
        large = [both.ask(64, 256) for _ in range(8)]
        await both.enter()
        assert not large[-1].place.done()
        long, short = both.ask(1, 4096), both.ask(1, 256)
        await both.enter()
        assert not long.place.done() and short.place.done()  # which does not wait behind the long one
        assert both.engine.held <= TOKENS
        later = both.ask(64, 256)  # nor does a large one that comes later go first
        for one in large:
            await both.finish(one)
            assert both.engine.held <= TOKENS
        assert long.place.done() and not later.place.done()
        await both.finish(short)
        await both.finish(long)
        assert later.place.done()

    run(work())


def test_small_requests_leave_room_for_a_long_one_that_waits() -> None:
    """However many come: each that ends is followed by two others."""

    async def work() -> None:
        rng = np.random.default_rng(0)
        both = Both(TOKENS, ROWS)
        for _ in range(300):
            both.ask(1, 256)
        await both.enter()
        long = both.ask(2, 4096)
        for _ in range(300):
            owners = both.engine.owners
            await both.finish(owners[int(rng.integers(len(owners)))])
            both.ask(1, 256)
            both.ask(1, 256)
            await both.enter()
        assert long.place.done()
        for one in both.waiting:
            one.place.cancel()
        await both.settle()

    run(work())


@pytest.mark.parametrize("size", [(64, 4096), (26, 4096), (400, 256)])
def test_one_that_needs_nearly_everything_gets_in_though_small_ones_come_for_ever(size: tuple[int, int]) -> None:
    async def work() -> None:
        rng = np.random.default_rng(0)
        both = Both(TOKENS, ROWS)
        earlier = [both.ask(1, 256) for _ in range(300)]
        await both.enter()
        large = both.ask(*size)
        steps = 0
        while not large.place.done():
            owners = both.engine.owners
            await both.finish(owners[int(rng.integers(len(owners)))])
            both.ask(1, 256)
            await both.enter()
            steps += 1
            assert steps <= 400
        assert all(one.place.done() for one in earlier)
        waited = list(both.waiting)
        second = both.ask(*size)
        await both.finish(large)  # and those that waited for it come before the next of its kind
        assert any(one.place.done() for one in waited) and not second.place.done()
        while both.engine.owners:
            await both.finish(both.engine.owners[0])
        assert second.place.done()

    run(work())


@pytest.mark.parametrize("seed", range(6))
def test_the_engine_never_holds_more_than_the_limit(seed: int) -> None:
    """Requests of all sizes come, give up, are prefilled in batches, and end sample by sample."""

    async def work() -> None:
        rng = np.random.default_rng(seed)
        tokens, rows = int(rng.integers(64, 400)) * 256, int(rng.integers(32, 512))
        both, entered = Both(tokens, rows), 0
        for step in range(1200):
            event = rng.random()
            if step < 1000 and event < 0.4 + 0.3 * np.sin(step / 40):
                count = int(min(2 ** rng.integers(0, 7), rows, tokens // 64))
                usual = rng.choice([8, 12], p=[0.95, 0.05])  # mostly short ones, so that a long one stretches many rows
                both.ask(count, int(min(both.room.longest(count), 2 ** rng.uniform(4, usual))))
            elif event < 0.45 and both.waiting:
                both.waiting.pop(int(rng.integers(len(both.waiting)))).place.cancel()
            elif event < 0.75:
                ready = sorted(both.take(), key=lambda one: one.length)
                entered += len(ready)
                cut = int(rng.integers(0, len(ready) + 1))
                for batch in (ready[:cut], ready[cut:]):
                    if batch:
                        both.engine.admit(batch)
            elif number := len(both.engine.owners):
                ends = rng.random(number) < rng.choice([0.02, 0.3, 0.97], p=[0.6, 0.2, 0.2])
                both.engine.retire(set(np.flatnonzero(ends).tolist()))
            await both.settle()
            assert both.engine.held <= tokens and len(both.engine.owners) <= rows
        while both.waiting or both.engine.owners:  # nobody waits for ever
            both.engine.retire(set(range(len(both.engine.owners))))
            before = len(both.waiting)
            await both.enter()
            assert both.engine.held <= tokens and (len(both.waiting) < before or both.engine.owners or not before)
        assert entered > 40 and both.room._inside == 0

    run(work())
