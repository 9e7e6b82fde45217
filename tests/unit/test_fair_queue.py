"""Turns and the queue in front of a shared engine: nobody is starved, work inside is bounded, nothing is lost. No Ray, no clock."""

from __future__ import annotations

import asyncio
from collections import Counter, deque

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_vlm.serving.fair_queue import DeficitRoundRobin, FairQueue, Gate

QUANTUM = 100


def test_a_greedy_policy_does_not_keep_a_modest_one_waiting() -> None:
    """A thousand large items wait; what another policy brings then is served with them, share by share."""
    queue: FairQueue[str] = FairQueue(capacity=400, quantum=QUANTUM)
    for number in range(1000):
        queue.push("greedy", 90, f"greedy {number}")
    inside: deque[tuple[str, int]] = deque()
    served: Counter[str] = Counter()
    order: list[str] = []

    def admit() -> None:
        while (item := queue.pop()) is not None:
            name = item.split()[0]
            inside.append((name, 90 if name == "greedy" else 30))
            served[name] += inside[-1][1]
            order.append(name)

    admit()
    assert order == ["greedy"] * 2  # half of the capacity stays free for others
    for number in range(60):
        queue.push("modest", 30, f"modest {number}")
    admit()
    assert "modest" in order[2:4]
    while served["modest"] < 60 * 30:
        name, cost = inside.popleft()
        queue.leave(name, cost)
        admit()
        if 0 < served["modest"] < 60 * 30:
            assert abs(served["greedy"] - 180 - served["modest"]) <= 2 * (QUANTUM + 90)
    assert order.count("modest") == 60 and order.count("greedy") < 60


@settings(max_examples=300, deadline=None)
@given(
    pushes=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 250)), min_size=1, max_size=60),
    capacity=st.integers(50, 600),
    choices=st.randoms(use_true_random=False),
)
def test_everything_enters_once_in_its_order_and_never_too_much_at_a_time(
    pushes: list[tuple[str, int]], capacity: int, choices: np.random.Generator
) -> None:
    queue: FairQueue[int] = FairQueue(capacity, QUANTUM)
    waiting = list(enumerate(pushes))
    inside: list[int] = []
    entered: list[int] = []
    while waiting or len(entered) < len(pushes):
        if waiting and choices.random() < 0.5:
            number, (policy, cost) = waiting.pop(0)
            queue.push(policy, cost, number)
        while (item := queue.pop()) is not None:
            inside.append(item)
            entered.append(item)
            total = sum(pushes[k][1] for k in inside)
            assert total <= capacity or len(inside) == 1
            own = [pushes[k][1] for k in inside if pushes[k][0] == pushes[item][0]]
            assert sum(own) <= max(capacity // 2, 1) or len(own) == 1
        if inside and choices.random() < 0.5:
            gone = inside.pop(choices.randrange(len(inside)))  # type: ignore[attr-defined]
            queue.leave(*pushes[gone])
    assert sorted(entered) == list(range(len(pushes)))
    for policy in "abcd":
        mine = [k for k in entered if pushes[k][0] == policy]
        assert mine == sorted(mine)


def test_a_call_that_is_cancelled_gives_its_place_back() -> None:
    async def story() -> None:
        gate = Gate(capacity=10, quantum=5)
        entered: list[str] = []
        leave = asyncio.Event()

        async def work(policy: str, name: str, cost: int = 10) -> None:
            async with gate.entered(policy, cost):
                entered.append(name)
                await leave.wait()

        tasks = {name: asyncio.ensure_future(work(name[0], name)) for name in ("a1", "b1", "b2", "c1")}
        await asyncio.sleep(0.01)
        assert entered == ["a1"]  # as large as the capacity
        tasks["b1"].cancel()  # while it waits
        tasks["a1"].cancel()  # while it is inside
        await asyncio.sleep(0.01)
        assert len(entered) == 2 and "b1" not in entered
        leave.set()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert sorted(entered) == ["a1", "b2", "c1"]
        assert (gate.queue.inside, gate.queue.waiting()) == (0, {})

    asyncio.run(story())


@settings(max_examples=200, deadline=None)
@given(costs=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 1000), min_size=2), steps=st.integers(50, 2000))
def test_of_names_that_always_have_work_none_gets_ahead(costs: dict[str, int], steps: int) -> None:
    turns, used = DeficitRoundRobin(QUANTUM), Counter[str]()
    for _ in range(steps):
        name = turns.next(costs)
        assert name is not None
        turns.charge(name, costs[name])
        used[name] += costs[name]
    largest = max(costs.values())
    assert max(used.values()) - min(used[name] for name in costs) <= 2 * (QUANTUM + largest)
