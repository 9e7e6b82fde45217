"""Environments while they are played: their calls in threads beside the event loop, with deadlines, one pool for each
set of arguments, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from rl_vlm.config import PolicyConfig
from rl_vlm.envs.base import Info, StepResult, VisionEnv
from rl_vlm.envs.errors import EnvError, EnvTimeoutError, check_reset, check_step
from rl_vlm.envs.registry import make_part
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import Observation, RLVLMError
from rl_vlm.waiting import note_hung_thread

Timed = tuple[Any, float]  # the result or RLVLMError of a call, and its seconds


def timed(call: Callable[[], Any]) -> Timed:
    """The result of a call; what it raises becomes an RLVLMError in its place."""
    started = time.perf_counter()
    try:
        result = call()
    except RLVLMError as error:
        result = error
    except (Exception, SystemExit) as error:
        # User code may raise anything, and may even exit; it ends an episode, not the runner.
        result = EnvError(f"The environment raised {type(error).__name__}: {error}")
    return result, time.perf_counter() - started


class CallBatch:
    """Calls that one thread makes in their order, until the rest is taken from it.

    done: of the calls so far, in their order. began: when the present call began, on the monotonic clock.
    """

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self.calls = calls
        self.done: list[Timed] = []
        self.began = 0.0
        self._begun = 0
        self._taken = False
        self._lock = threading.Lock()

    def run(self) -> Timed | None:
        """What the thread does; returns the last call's result, None if it made none."""
        for call in self.calls:
            with self._lock:
                if self._taken:
                    break
                self._begun += 1
                self.began = time.monotonic()
            self.done.append(timed(call))
        return self.done[-1] if self.done else None

    def take_rest(self) -> int:
        """Let the thread end after its present call; returns how many it has begun."""
        with self._lock:
            self._taken = True
            return self._begun


logger = logging.getLogger(__name__)

# Calls this short run one after the other in one thread: a thread switch costs about as much as they do.
_SHORT_CALL_S = 0.002
_PATIENCE_S = 0.1  # beyond what a batch of such calls takes, before each of the rest gets a thread of its own


class EnvPool:
    """Makes environments and runs their methods in threads with a deadline.

    Args:
        make: makes one environment.
        timeout_s: deadline of one call.
        max_threads: calls that run at once.
        build_timeout_s: deadline of making an environment, if longer than `timeout_s`: it may import a simulator.
        inline: run calls on the event loop itself, in order and without deadline (deterministic runs).
    """

    def __init__(
        self,
        make: Callable[[], VisionEnv],
        timeout_s: float,
        max_threads: int = 32,
        inline: bool = False,
        build_timeout_s: float = 120.0,
    ) -> None:
        self._make = make
        self._timeout_s = timeout_s
        self._build_timeout_s = build_timeout_s
        self._inline = inline
        self._max_threads = max_threads
        self._threads = ThreadPoolExecutor(max_threads, thread_name_prefix="env")
        # Running means; the first calls go alone. Not one for both: after many quick resets slow steps would go in one
        # thread.
        self._call_s = {"reset": _SHORT_CALL_S, "step": _SHORT_CALL_S}
        self._idle: list[VisionEnv] = []
        self.lent = 0  # environments that groups have
        self._batch: asyncio.Task[list[Timed | asyncio.Task[Timed]]] | None = None
        self._batch_calls: list[Callable[[], Any]] = []
        self.busy_s = 0.0
        self.stuck = 0  # threads that a hanging environment holds

    async def borrow(self, count: int) -> list[VisionEnv]:
        """Environments for one group, reused ones first; the others are built at once, each within the deadline.

        Raises the first RLVLMError of a build; what was built beside it is kept for later.
        """
        reused = self._idle[-count:]
        del self._idle[-count:]
        missing = count - len(reused)
        self.lent += count
        try:
            built = await self._build(missing) if missing else []
        except BaseException:
            self.lent -= missing
            self.give_back(reused)
            raise
        error = next((result for result in built if isinstance(result, RLVLMError)), None)
        if error is None:
            return reused + built
        whole = [result for result in built if not isinstance(result, RLVLMError)]
        self.lent -= missing - len(whole)
        self.give_back([*reused, *whole])
        raise error

    async def _build(self, count: int) -> list[Any]:
        """New environments, or the error of each."""
        if self._inline:
            built = [timed(self._make) for _ in range(count)]
        else:
            limit_s = max(self._timeout_s, self._build_timeout_s)
            built = await asyncio.gather(*(self._within_deadline(self._make, limit_s) for _ in range(count)))
        self.busy_s += sum(seconds for _, seconds in built)
        return [env for env, _ in built]

    def give_back(self, envs: Sequence[VisionEnv]) -> None:
        """Keep environments whose episodes ended without an error for later groups."""
        self.lent -= len(envs)
        self._idle.extend(envs)

    def discard(self, envs: Sequence[VisionEnv]) -> None:
        """Close environments that failed, unless one hangs: its thread would be waited for."""
        self.lent -= len(envs)
        self._close_later(envs)

    def close_surplus(self, keep: int) -> None:
        """Close idle environments beyond `keep`, those that groups have included."""
        surplus = self._idle[: max(len(self._idle) + self.lent - keep, 0)]
        del self._idle[: len(surplus)]
        self._close_later(surplus)

    def _close_later(self, envs: Sequence[VisionEnv]) -> None:
        if self.stuck:
            return
        for env in envs:
            self._threads.submit(_close_quietly, env)

    async def reset(
        self, envs: Sequence[VisionEnv], seed: int, options: dict[str, Any]
    ) -> list[tuple[Observation, Info]]:
        """Open the same task instance in all copies."""
        results = await self.run([partial(_reset, env, seed, options) for env in envs], "reset")
        return [_result_or_raise(result) for result in results]

    async def step(self, envs: Sequence[VisionEnv], actions: Sequence[str]) -> list[StepResult | RLVLMError]:
        """Step each environment with its action; an environment's error is returned in its place."""
        return await self.run([partial(_step, env, action) for env, action in zip(envs, actions, strict=True)])

    async def run(self, calls: Sequence[Callable[[], Any]], kind: Literal["reset", "step"] = "step") -> list[Any]:
        """Run calls; each gives its result or the RLVLMError that it failed with."""
        if self._inline:
            parts = [timed(call) for call in calls]
        elif self._call_s[kind] < _SHORT_CALL_S:
            parts = await self._run_batched(calls)
        else:
            parts = await asyncio.gather(*(self._within_deadline(call, self._timeout_s) for call in calls))
        seconds = sum(taken for _, taken in parts)
        self.busy_s += seconds
        self._call_s[kind] = 0.7 * self._call_s[kind] + 0.3 * seconds / max(len(calls), 1)
        return [result for result, _ in parts]

    async def _run_batched(self, calls: Sequence[Callable[[], Any]]) -> list[Timed]:
        """Run short calls of all groups at this moment in one thread switch.

        Groups that finish together then send their requests in one call to the policy.
        """
        if self._batch is None:
            self._batch = asyncio.get_running_loop().create_task(self._run_batch())
            self._batch_calls = []
        start = len(self._batch_calls)
        self._batch_calls.extend(calls)
        parts = (await asyncio.shield(self._batch))[start : start + len(calls)]
        return [await part if isinstance(part, asyncio.Task) else part for part in parts]

    async def _run_batch(self) -> list[Timed | asyncio.Task[Timed]]:
        """The calls' results, or the tasks that wait for them: a call that is not short holds up only its own group."""
        await asyncio.sleep(0)  # other tasks that are ready add their calls first
        calls, self._batch = self._batch_calls, None
        batch = CallBatch(calls)
        loop = asyncio.get_running_loop()
        ended = threading.Event()
        future = loop.run_in_executor(self._threads, _noted(batch.run, ended))
        await asyncio.wait([future], timeout=_PATIENCE_S + 2 * _SHORT_CALL_S * len(calls))
        if future.done():
            return list(batch.done)
        begun = batch.take_rest()
        waiting = [self._answer(future, [batch.began], self._timeout_s, ended)] if begun else []
        waiting += [self._within_deadline(call, self._timeout_s) for call in calls[begun:]]
        return [*batch.done[: max(begun - 1, 0)], *map(loop.create_task, waiting)]

    async def _within_deadline(self, call: Callable[[], Any], timeout_s: float) -> Timed:
        began: list[float] = []
        ended = threading.Event()

        def work() -> Timed:
            began.append(time.monotonic())
            return timed(call)

        # The thread cannot be stopped: after a timeout it keeps running, and the driver restarts this runner.
        future = asyncio.get_running_loop().run_in_executor(self._threads, _noted(work, ended))
        return await self._answer(future, began, timeout_s, ended)

    async def _answer(
        self, future: asyncio.Future[Any], began: list[float], timeout_s: float, ended: threading.Event
    ) -> Timed:
        """What a thread gives; `began` holds when it began, once it has.

        The deadline starts then, unless all threads hang.

        `ended` is set when the thread is done.
        """
        while True:
            left = began[0] + timeout_s - time.monotonic() if began else timeout_s
            if left <= 0 or (not began and self.stuck >= self._max_threads):
                break
            done, _ = await asyncio.wait([future], timeout=left)
            if done:
                return future.result()  # type: ignore[no-any-return]
        if began:
            self.stuck += 1
            note_hung_thread("an environment", ended)
        else:
            future.cancel()
        error = EnvTimeoutError(
            f"The environment did not answer within {timeout_s:g} s: raise env.step_timeout_s, or set "
            "env.isolation to process."
        )
        return error, timeout_s

    def close(self) -> None:
        """Close all idle environments and the threads."""
        for env in self._idle:
            _close_quietly(env)
        self._threads.shutdown(wait=False)  # environments that failed may still be waiting to be closed


def _noted(call: Callable[[], Any], ended: threading.Event) -> Callable[[], Any]:
    """The call, after which `ended` is set, also where it fails."""

    def noted() -> Any:
        try:
            return call()
        finally:
            ended.set()

    return noted


def _reset(env: VisionEnv, seed: int, options: dict[str, Any]) -> tuple[Observation, Info]:
    return check_reset(env.reset(seed=seed, options=dict(options)))


def _step(env: VisionEnv, action: str) -> StepResult:
    return check_step(env.step(action))


def _result_or_raise(result: Any) -> Any:
    if isinstance(result, RLVLMError):
        raise result
    return result


def _close_quietly(env: VisionEnv) -> None:
    try:
        env.close()
    except Exception as error:
        # Nothing depends on closing an environment that failed.
        logger.debug("closing an environment failed: %s", error)


# Threads of slow environments, which mostly wait: one for each episode as far as that goes.
_MIN_THREADS, _MAX_THREADS = 32, 256
# Pools without a group that are kept: an evaluation's variants, and what a curriculum set last.
_MAX_IDLE = 16
_UNCHANGED = json.dumps({})


class EnvPools:
    """The environments of a worker. A task's environment and its changed arguments name its pool."""

    def __init__(self, run: PolicyConfig) -> None:
        self._run = run
        self._pools: dict[tuple[str, str], EnvPool] = {}  # the least recently used first
        self._closed_busy_s = 0.0

    def __len__(self) -> int:
        return len(self._pools)

    def of(self, task: RolloutTask) -> EnvPool:
        """The pool whose environments play a task."""
        key = self._key(task)
        pool = self._pools.pop(key, None) or self._new(task)
        self._pools[key] = pool
        self._close_old(pool)
        return pool

    def close_surplus(self, tasks: Iterable[RolloutTask]) -> None:
        """Of the environments that played these held-out tasks, close those that training has no use for.

        It has none for changed arguments: those of a curriculum's stages come back as they are asked for.
        """
        for key in {self._key(task) for task in tasks} & self._pools.keys():
            self._pools[key].close_surplus(self._episodes if key[1] == _UNCHANGED else 0)

    def _changes(self, task: RolloutTask) -> dict[str, Any]:
        variant = self._run.variant_arguments(task.variant, task.env) if task.variant else {}
        return {**variant, **task.arguments}

    def _key(self, task: RolloutTask) -> tuple[str, str]:
        return task.env, json.dumps(self._changes(task), sort_keys=True)

    @property
    def _episodes(self) -> int:
        """Episodes that training plays at once here."""
        return self._run.rollout.groups_at_once * self._run.rollout.group_size

    def _new(self, task: RolloutTask) -> EnvPool:
        run = self._run
        env, changes = run.env, self._changes(task)

        def build() -> VisionEnv:
            if env.isolation == "process":
                from rl_vlm.envs.isolation import ProcessEnv

                part = env.parts[task.env]
                return ProcessEnv(part.id, part.make_kwargs(changes), step_timeout_s=env.step_timeout_s)
            return make_part(env, task.env, changes)

        return EnvPool(
            build,
            env.step_timeout_s,
            max_threads=min(max(self._episodes, _MIN_THREADS), _MAX_THREADS),
            inline=run.deterministic,
        )

    def _close_old(self, newest: EnvPool) -> None:
        # A pool whose environment hangs is kept, so that `stuck` shows it.
        idle = [key for key, pool in self._pools.items() if not pool.lent and not pool.stuck and pool is not newest]
        for key in idle[: max(len(idle) - _MAX_IDLE, 0)]:
            pool = self._pools.pop(key)
            self._closed_busy_s += pool.busy_s
            pool.close()

    @property
    def busy_s(self) -> float:
        """Seconds that environments worked, all pools together."""
        return self._closed_busy_s + sum(pool.busy_s for pool in self._pools.values())

    @property
    def stuck(self) -> bool:
        """Whether an environment hangs."""
        return any(pool.stuck for pool in self._pools.values())

    def close(self) -> None:
        """Close all environments; new ones are made as tasks need them."""
        for pool in self._pools.values():
            pool.close()
        self._pools = {}
        self._closed_busy_s = 0.0


class GroupFailedError(RLVLMError):
    """An episode of the group failed; `reason` is the name under which it is counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@contextmanager
def discard_on_failure(pool: EnvPool, envs: list[VisionEnv]) -> Iterator[None]:
    """Discard the environments on any error; an RLVLMError is raised as GroupFailedError."""
    try:
        yield
    except RLVLMError as error:
        pool.discard(envs)
        if isinstance(error, GroupFailedError):
            raise
        raise GroupFailedError(reason_of(error), str(error)) from error
    except BaseException:
        pool.discard(envs)
        raise


def reason_of(error: Exception) -> str:
    """The name under which an error is counted: EnvTimeoutError is env_timeout."""
    name = type(error).__name__.removesuffix("Error")
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


class TooManyFailuresError(RLVLMError):
    """Too many groups in a row were lost."""


@dataclass(slots=True)
class FailureBudget:
    """Counts groups that were lost in a row."""

    limit: int
    in_a_row: int = 0

    def record(self, succeeded: int, lost: dict[str, str]) -> None:
        """Count one round; raises TooManyFailuresError at the limit, naming the last reason."""
        self.in_a_row = 0 if succeeded else self.in_a_row + len(lost)
        if self.in_a_row >= self.limit:
            reason = list(lost.values())[-1]
            raise TooManyFailuresError(
                f"{self.in_a_row} groups in a row were lost, the last because of: {reason}. Repair the environment or "
                "the server, or raise rollout.max_consecutive_failures."
            )
