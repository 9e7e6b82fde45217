"""Environments while they are played: a pool for each set of arguments, calls in threads with deadlines, and what
becomes of environments that fail."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from rl_vlm.config import PolicyConfig
from rl_vlm.deadlines import hung_calls
from rl_vlm.envs.base import Info, StepResult, VisionEnv
from rl_vlm.envs.errors import EnvError, EnvTimeoutError, check_reset, check_step, describe_error
from rl_vlm.envs.registry import make_part
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import Observation, RLVLMError


@dataclass(slots=True)
class _MethodCall:
    """A call of an environment, and what became of it."""

    function: Callable[[], Any]
    began: float = 0.0  # on the monotonic clock
    seconds: float = 0.0
    done: bool = False
    result: Any = None  # or the RLVLMError that it failed with
    future: Future[None] | None = None  # of the thread that makes it

    def make(self) -> None:
        self.began = time.monotonic()
        try:
            self.result = self.function()
        except RLVLMError as error:
            self.result = error
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C
            # User code may raise anything, and may even exit; it ends an episode, not the runner.
            self.result = EnvError(f"The environment raised {describe_error(error)}")
        self.seconds = time.monotonic() - self.began
        self.done = True


logger = logging.getLogger(__name__)

# Calls this short run one after the other in one thread: a thread switch costs about as much as they do.
_SHORT_CALL_S = 0.002
_BUILD_S = 120.0  # deadline of making an environment, at least: it may import a simulator
_PATIENCE_S = 0.1  # beyond what a batch of such calls takes, before each of the rest gets a thread of its own


class EnvPool:
    """Makes environments and runs their methods in threads, each call with a deadline of `timeout_s`.

    Args:
        inline: run calls on the event loop itself, in order and without deadline (deterministic runs).
    """

    def __init__(
        self, make: Callable[[], VisionEnv], timeout_s: float, max_threads: int = 32, inline: bool = False
    ) -> None:
        self._make, self._inline, self._max_threads = make, inline, max_threads
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(max_threads, thread_name_prefix="env")
        # Running means; the first calls go alone. Two, or slow steps would share a thread after many quick resets.
        self._call_s = {"reset": _SHORT_CALL_S, "step": _SHORT_CALL_S}
        self._idle: list[VisionEnv] = []
        self.lent = 0  # environments that groups have
        self._batch: asyncio.Task[None] | None = None
        self._batch_calls: list[_MethodCall] = []
        self.stuck = 0  # threads that a hanging environment holds

    async def borrow(self, count: int) -> list[VisionEnv]:
        """Environments for one group: idle ones first, the others are built at the same time. Raises the first
        RLVLMError of a build; what was built beside it is kept for later."""
        envs = self._idle[-count:]
        del self._idle[-count:]
        self.lent += count
        try:
            built = await self._results(
                [_MethodCall(self._make) for _ in range(count - len(envs))], max(self._timeout_s, _BUILD_S)
            )
            envs += [one for one in built if not isinstance(one, RLVLMError)]
            _raise_first(built)
        except BaseException:
            self.lent -= count - len(envs)
            self.give_back(envs)
            raise
        return envs

    def give_back(self, envs: Sequence[VisionEnv]) -> None:
        """Keep environments whose episodes ended without an error for later groups."""
        self.lent -= len(envs)
        self._idle.extend(envs)

    def discard(self, envs: Sequence[VisionEnv]) -> None:
        """Close environments that failed, unless one hangs: its thread would be waited for."""
        self.lent -= len(envs)
        for env in envs if not self.stuck else ():
            self._threads.submit(_close_quietly, env)

    async def reset(
        self, envs: Sequence[VisionEnv], seed: int, options: dict[str, Any]
    ) -> list[tuple[Observation, Info]]:
        """Open the same task instance in all copies."""

        def open_one(env: VisionEnv) -> tuple[Observation, Info]:
            return check_reset(env.reset(seed=seed, options=dict(options)))

        results = await self.run([partial(open_one, env) for env in envs], "reset")
        _raise_first(results)
        return results

    async def step(self, envs: Sequence[VisionEnv], actions: Sequence[str]) -> list[StepResult | RLVLMError]:
        """Step each environment with its action; an environment's error is returned in its place."""

        def step_one(env: VisionEnv, action: str) -> StepResult:
            return check_step(env.step(action))

        return await self.run([partial(step_one, *pair) for pair in zip(envs, actions, strict=True)])

    async def run(self, functions: Sequence[Callable[[], Any]], kind: Literal["reset", "step"] = "step") -> list[Any]:
        """Run functions; each gives its result or the RLVLMError that it failed with."""
        calls = [_MethodCall(function) for function in functions]
        if self._call_s[kind] < _SHORT_CALL_S and not self._inline:
            if self._batch is None:
                self._batch = asyncio.create_task(self._run_batch())
                self._batch_calls = []
            self._batch_calls += calls
            await asyncio.shield(self._batch)
        results = await self._results(calls, self._timeout_s)
        seconds = sum(call.seconds for call in calls) / max(len(calls), 1)
        self._call_s[kind] = 0.7 * self._call_s[kind] + 0.3 * seconds
        return results

    async def _run_batch(self) -> None:
        """Run short calls of all groups at this moment in one thread switch, so that groups that finish together send
        their requests in one call to the policy. Where one call is not short, those behind it are left over."""
        await asyncio.sleep(0)  # other tasks that are ready add their calls first
        calls, self._batch = self._batch_calls, None
        left = iter(calls)

        def make_them() -> None:
            for call in left:
                call.make()

        future = self._threads.submit(make_them)
        for call in calls:
            call.future = future
        await asyncio.wait([asyncio.wrap_future(future)], timeout=_PATIENCE_S + 2 * _SHORT_CALL_S * len(calls))
        for call in left:  # the thread ends after its present call
            call.future = None

    async def _results(self, calls: Sequence[_MethodCall], timeout_s: float) -> list[Any]:
        """What the calls give. A call that no thread has gets a thread of its own."""
        for call in calls:
            if self._inline:
                call.make()
            elif call.future is None:
                call.future = self._threads.submit(call.make)
        await asyncio.gather(*(self._wait(call, timeout_s) for call in calls if not call.done))
        return [call.result for call in calls]

    async def _wait(self, call: _MethodCall, timeout_s: float) -> None:
        """Wait for a call. The deadline starts when it begins; where all threads hang it never does."""
        assert call.future is not None
        waited = asyncio.wrap_future(call.future)
        while not waited.done():
            left = call.began + timeout_s - time.monotonic() if call.began else timeout_s
            if left <= 0 or (not call.began and self.stuck >= self._max_threads):
                break
            await asyncio.wait([waited], timeout=left)
        if call.done:
            return
        # The thread cannot be stopped: it keeps running, and the driver restarts this runner.
        if call.began:
            self.stuck += 1
            ended = threading.Event()
            call.future.add_done_callback(lambda _: ended.set())
            hung_calls.append(("an environment", ended))
        else:
            call.future.cancel()
        call.seconds = timeout_s
        call.result = EnvTimeoutError(
            f"The environment did not answer within {timeout_s:g} s: raise env.step_timeout_s, or set env.isolation to "
            "process."
        )

    def close(self) -> None:
        for env in self._idle:
            _close_quietly(env)
        self._threads.shutdown(wait=False)  # environments that failed may still be waiting to be closed


def _raise_first(results: Sequence[Any]) -> None:
    for result in results:
        if isinstance(result, RLVLMError):
            raise result


def _close_quietly(env: VisionEnv) -> None:
    try:
        env.close()
    except Exception as error:
        # Nothing depends on closing an environment that failed.
        logger.debug("closing an environment failed: %s", error)


# Threads of slow environments, which mostly wait: one for each episode as far as that goes.
_MIN_THREADS, _MAX_THREADS = 32, 256
# Pools without a group that are kept: an evaluation's variants, and what a curriculum set last. Where each environment
# is a process of its own, as many as there are environments.
_MAX_IDLE = 16


class EnvPools:
    """The environments of a worker. A task's environment and its changed arguments name its pool."""

    def __init__(self, run: PolicyConfig) -> None:
        self._run = run
        self._pools: dict[tuple[str, str], EnvPool] = {}  # the least recently used first

    def of(self, task: RolloutTask) -> EnvPool:
        """The pool whose environments play a task."""
        variant = self._run.variant_arguments(task.variant, task.env) if task.variant else {}
        changes = {**variant, **task.arguments}
        key = task.env, json.dumps(changes, sort_keys=True)
        pool = self._pools.pop(key, None) or self._new(task.env, changes)
        self._pools[key] = pool
        # A pool whose environment hangs is kept, so that `stuck` shows it.
        idle = [key for key, old in self._pools.items() if not old.lent and not old.stuck and old is not pool]
        kept = len(self._run.env.parts) if self._run.env.isolation == "process" else _MAX_IDLE
        for key in idle[: max(len(idle) - kept, 0)]:
            self._pools.pop(key).close()
        return pool

    def _new(self, name: str, changes: dict[str, Any]) -> EnvPool:
        env, rollout = self._run.env, self._run.rollout

        def build() -> VisionEnv:
            if env.isolation == "process":
                from rl_vlm.envs.isolation import ProcessEnv

                part = env.parts[name]
                return ProcessEnv(part.id, part.make_kwargs(changes), step_timeout_s=env.step_timeout_s)
            return make_part(env, name, changes)

        threads = min(max(rollout.groups_at_once * rollout.group_size, _MIN_THREADS), _MAX_THREADS)
        return EnvPool(build, env.step_timeout_s, threads, inline=self._run.deterministic)

    @property
    def stuck(self) -> bool:
        return any(pool.stuck for pool in self._pools.values())

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools = {}


class GroupFailedError(RLVLMError):
    """An episode of the group failed; `reason` is the name under which it is counted.

    Do: nothing: the group is sampled again; `failures.jsonl` counts the reasons.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@contextmanager
def discard_on_failure(pool: EnvPool, envs: list[VisionEnv]) -> Iterator[None]:
    """Discard the environments on any error; an RLVLMError is raised as GroupFailedError."""
    try:
        yield
    except BaseException as error:
        pool.discard(envs)
        if isinstance(error, RLVLMError) and not isinstance(error, GroupFailedError):
            raise GroupFailedError(reason_of(error), str(error)) from error
        raise


def reason_of(error: Exception) -> str:
    """The name under which an error is counted: `counted_as`, or that of its class; EnvTimeoutError is env_timeout."""
    if counted_as := getattr(error, "counted_as", ""):
        return str(counted_as)
    name = type(error).__name__.removesuffix("Error")
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
