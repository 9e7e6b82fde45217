"""The queue in front of a shared engine: no policy is starved, work inside is bounded, nothing is lost. No Ray, no clock."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from loops import in_loop

from rl_vlm.serving.fair_queue import FairQueue


class Work:
    """Work that waits in a queue or is inside, and the order in which it entered."""

    def __init__(self, capacity: int) -> None:
        self.queue = FairQueue(capacity)
        self.order: list[str] = []
        self._leave: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def push(self, policy: str, cost: int, name: str) -> None:
        """Queue a piece of work."""
        self._leave[name] = asyncio.Event()

        async def work() -> None:
            async with self.queue.entered(policy, cost):
                self.order.append(name)
                await self._leave[name].wait()

        self.tasks[name] = asyncio.ensure_future(work())

    async def leave(self, name: str) -> None:
        """A piece of work is done."""
        self._leave[name].set()
        await self.settle()

    @staticmethod
    async def settle() -> None:
        """Until all that can enter has entered."""
        for _ in range(6):
            await asyncio.sleep(0)


@in_loop
async def test_a_greedy_policy_does_not_keep_a_modest_one_waiting() -> None:
    """A thousand large items wait; what another policy brings then is served with them, share by share."""
    work, served, done = Work(capacity=400), Counter[str](), 0
    for number in range(1000):
        work.push("greedy", 90, f"greedy {number}")
    await work.settle()
    assert len(work.order) == 2  # half of the capacity stays free for others
    for number in range(60):
        work.push("modest", 30, f"modest {number}")
    await work.settle()
    assert work.order[2].startswith("modest")
    while served["modest"] < 60 * 30:
        name = work.order[done]
        done += 1
        served[name.split()[0]] += 90 if name.startswith("greedy") else 30
        await work.leave(name)
        if 0 < served["modest"] < 60 * 30:
            assert abs(served["greedy"] - served["modest"]) <= 4 * 90
    for task in work.tasks.values():
        task.cancel()


@settings(max_examples=100, deadline=None)
@given(
    pushes=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 250)), min_size=1, max_size=40),
    capacity=st.integers(50, 600),
    seed=st.integers(0, 1000),
)
def test_everything_enters_once_in_its_order_and_never_too_much_at_a_time(
    pushes: list[tuple[str, int]], capacity: int, seed: int
) -> None:
    async def story() -> list[str]:
        work, chosen, waiting = Work(capacity), Random(seed), list(enumerate(pushes))
        inside: list[str] = []
        seen = 0
        while waiting or len(work.order) < len(pushes):
            if waiting and chosen.random() < 0.5:
                number, (policy, cost) = waiting.pop(0)
                work.push(policy, cost, str(number))
                await work.settle()
            for name in work.order[seen:]:
                inside.append(name)
                costs = [pushes[int(one)] for one in inside]
                assert sum(cost for _, cost in costs) <= capacity or len(inside) == 1
                own = [cost for policy, cost in costs if policy == pushes[int(name)][0]]
                assert sum(own) <= max(capacity // 2, 1) or len(own) == 1
            seen = len(work.order)
            if inside and chosen.random() < 0.5:
                await work.leave(inside.pop(chosen.randrange(len(inside))))
        for name in work.order:  # also those that entered last
            await work.leave(name)
        await asyncio.gather(*work.tasks.values())
        return work.order

    entered = list(map(int, asyncio.run(story())))
    assert sorted(entered) == list(range(len(pushes)))
    for policy in "abcd":
        mine = [k for k in entered if pushes[k][0] == policy]
        assert mine == sorted(mine)


@in_loop
async def test_a_call_that_is_cancelled_gives_its_place_back() -> None:
    work = Work(capacity=10)
    for name in ("a1", "b1", "b2", "c1"):
        work.push(name[0], 10, name)
    await work.settle()
    assert work.order == ["a1"]  # as large as the capacity
    work.tasks["b1"].cancel()  # while it waits
    work.tasks["a1"].cancel()  # while it is inside
    await work.settle()
    assert len(work.order) == 2 and "b1" not in work.order
    for name in ("b2", "c1"):
        await work.leave(name)
    await asyncio.gather(*work.tasks.values(), return_exceptions=True)
    assert sorted(work.order) == ["a1", "b2", "c1"]
    assert all(task.done() for task in work.tasks.values())


@in_loop
async def test_a_policy_that_was_idle_has_saved_nothing() -> None:
    work = Work(capacity=20)
    work.push("idle", 10, "idle 0")
    await work.settle()
    await work.leave("idle 0")
    for number in range(10):
        work.push("busy", 10, f"busy {number}")
    await work.settle()
    for number in range(8):
        await work.leave(f"busy {number}")
    for number in range(4):
        work.push("idle", 10, f"idle {1 + number}")
    await work.settle()
    for name in ("idle 1", "busy 8"):
        await work.leave(name)
    assert {"idle 2", "busy 9"} <= set(work.order)  # side by side
    for task in work.tasks.values():
        task.cancel()
