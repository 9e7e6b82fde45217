"""Building environments: at once, beside the event loop, within a deadline, and nothing is lost when one fails."""

import asyncio
import threading
import time

import pytest

from rl_vlm.envs.base import VisionEnv
from rl_vlm.envs.errors import EnvError, EnvTimeoutError
from rl_vlm.rollout.env_pool import EnvPool


def take(pool: EnvPool, count: int) -> list[VisionEnv]:
    return asyncio.run(pool.borrow(count))


def test_environments_are_built_at_once_and_the_event_loop_goes_on():
    together = threading.Barrier(4)  # breaks unless four builds and the event loop's own wait overlap

    def make() -> VisionEnv:
        together.wait(30)
        return VisionEnv()

    async def run() -> tuple[list[VisionEnv], int]:
        ticks = 0
        task = asyncio.ensure_future(pool.borrow(3))
        while together.n_waiting < 3:  # the loop is not held by the builds
            ticks += 1
            await asyncio.sleep(0.01)
        await asyncio.to_thread(together.wait, 30)
        return await task, ticks

    pool = EnvPool(make, timeout_s=60)
    envs, ticks = asyncio.run(asyncio.wait_for(run(), 60))
    assert len(set(map(id, envs))) == 3 and ticks
    pool.close()


def test_a_build_that_hangs_ends_at_the_deadline():
    end = threading.Event()

    def make() -> VisionEnv:
        end.wait(60)
        return VisionEnv()

    pool = EnvPool(make, timeout_s=0.2, build_timeout_s=0.3)
    started = time.monotonic()
    with pytest.raises(EnvTimeoutError):
        take(pool, 2)
    assert time.monotonic() - started < 30 and pool.stuck == 2
    end.set()
    pool.close()


@pytest.mark.parametrize("inline", [False, True])
def test_a_build_that_fails_loses_no_other_environment(inline):
    failures = iter([False, False, True, False, False])
    lock = threading.Lock()
    made: list[VisionEnv] = []

    def make() -> VisionEnv:
        with lock:
            if next(failures):
                raise ValueError("no licence")
            made.append(VisionEnv())
            return made[-1]

    pool = EnvPool(make, timeout_s=60, inline=inline)
    first = take(pool, 1)
    pool.give_back(first)
    with pytest.raises(EnvError, match="no licence"):
        take(pool, 4)
    assert len(made) == 3  # one reused and two built
    kept = take(pool, 4)
    assert {id(env) for env in kept} == {id(env) for env in made} and len(made) == 4
    pool.close()


def test_reused_environments_come_first():
    pool = EnvPool(VisionEnv, timeout_s=60)
    envs = take(pool, 2)
    pool.give_back(envs)
    again = take(pool, 3)
    assert again[:2] == envs and again[2] not in envs
    assert take(pool, 1)[0] not in again
    pool.close()


def test_a_long_call_holds_up_no_other_group_that_ran_in_its_thread():
    gate, made = threading.Event(), []

    def long() -> str:
        return "long" if gate.wait(60) else "no gate"

    async def run() -> tuple[list[str], list[str], bool]:
        await pool.run([int] * 8)  # short calls: the next ones share a thread
        groups = [[lambda: "before", long], [lambda: "after", lambda: made.append(1)], [lambda: "late"]]
        first, *others = [asyncio.ensure_future(pool.run(calls)) for calls in groups]  # of one moment, so of one thread
        done = await asyncio.wait_for(asyncio.gather(*others), 30)
        held = not first.done()
        gate.set()
        return await first, done, held

    pool = EnvPool(VisionEnv, timeout_s=60)
    assert asyncio.run(run()) == (["before", "long"], [["after", None], ["late"]], True)
    assert made == [1] and pool.stuck == 0
    pool.close()


def test_of_a_batch_only_the_call_that_hangs_misses_its_deadline():
    end = threading.Event()

    async def run() -> list[list[object]]:
        await pool.run([int] * 8)
        return await asyncio.gather(pool.run([lambda: 1, lambda: end.wait(60), lambda: 3]), pool.run([lambda: 4]))

    pool = EnvPool(VisionEnv, timeout_s=0.5)
    (first, hung, third), other = asyncio.run(run())
    assert (first, third, other) == (1, 3, [4]) and isinstance(hung, EnvTimeoutError) and pool.stuck == 1
    end.set()
    pool.close()
