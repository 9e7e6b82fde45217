"""Symbolic comparison with a hard time limit that holds in any thread, actor or executor.

math_verify limits time with SIGALRM, which only the main thread may use, and no Python-level limit interrupts a long
big-integer power. So the comparison runs in a child process that is killed when it is late. There is one child per
process; it starts on first use and is used by one thread at a time.
"""

from __future__ import annotations

import os
import time
from enum import StrEnum

from rl_vlm.child import STARTUP_S, BusyError, Child, ChildStartError, Queue
from rl_vlm.frames import FrameError, PeerGoneError
from rl_vlm.types import RLVLMError

TIMEOUT_S = 2.0
MEMORY = 2 << 30  # bytes beyond the imports
MAX_WAITING, MAX_WAIT_S = 256, 300.0  # threads of one process, and how long each waits for the others


class GraderError(RLVLMError):
    """The symbolic grader does not start, or has too much to do."""


class Reason(StrEnum):
    """Why a response was graded as it was."""

    CORRECT = "correct"
    WRONG = "wrong"  # another value, unit, kind or number of elements
    NO_ANSWER = "no_answer"  # no box with something in it
    TOO_LONG = "too_long"  # more than MAX_CHARS characters in the box
    TIMED_OUT = "timed_out"  # the symbolic comparison took longer than its limit
    UNPARSABLE = "unparsable"  # differs as text and number, and is no expression that may be evaluated


class SymbolicWorker:
    """The child process and the queue before it; waiting does not count as time spent."""

    def __init__(
        self,
        function: str = "rl_vlm.rewards.sympy_child:prepare",
        startup_s: float = STARTUP_S,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._function, self._startup_s, self._max_waiting = function, startup_s, max_waiting
        self._child: Child | None = None
        self.forget()

    @property
    def pid(self) -> int | None:
        """The child's process id, or None while there is none."""
        return self._child.pid if self._child else None

    def compare(self, answer: str, truth: str, timeout_s: float = TIMEOUT_S) -> tuple[Reason, float]:
        """Compare two normalised expressions that passed `math.refusal`.

        Returns the verdict and the seconds that it took, at most about `timeout_s`, without the wait for other threads
        and for the start of the child. Raises GraderError if the child does not start, or too many threads wait.
        """
        try:
            with self._queue.turn():
                return self._compare({"answer": answer, "truth": truth}, timeout_s)
        except BusyError as error:
            raise GraderError(f"The symbolic grader has too much to do: {error}.") from error

    def _compare(self, request: dict[str, str], timeout_s: float) -> tuple[Reason, float]:
        spent_s = 0.0
        for _ in range(2):  # again if the child was killed from outside, by the OOM killer for example
            child = self._ready_child()
            started = time.monotonic()
            reason: Reason | None = None
            try:
                reason = Reason(child.ask(request, timeout_s=timeout_s)[0]["reason"])
            except TimeoutError:
                reason = Reason.TIMED_OUT
                self._child = self._start()  # so that it imports while the caller goes on
            except (PeerGoneError, FrameError):
                pass
            spent_s += time.monotonic() - started
            if reason is not None:
                return reason, spent_s
        return Reason.UNPARSABLE, spent_s

    def close(self) -> None:
        """Kill the child; the next comparison starts a new one."""
        with self._queue.turn():
            child, self._child = self._child, None
            if child is not None:
                child.kill()

    def forget(self) -> None:
        """Drop the child and the queue, as in a forked process: they belong to the parent."""
        self._queue = Queue(self._max_waiting, MAX_WAIT_S)
        self._child = None

    def _ready_child(self) -> Child:
        if self._child is None or not self._child.alive:
            self._child = self._start()
        try:
            self._child.wait_ready(self._startup_s)
        except ChildStartError as error:
            self._child = None
            raise GraderError(
                f"The symbolic grader: {error} Install what is missing: pip install 'math-verify[antlr4_13_2]'."
            ) from error
        return self._child

    def _start(self) -> Child:
        # A fixed hash seed, because sympy orders its steps by hash and equal pairs must give equal results.
        return Child(self._function, memory=MEMORY, variables={"PYTHONHASHSEED": "0"})


WORKER = SymbolicWorker()
os.register_at_fork(after_in_child=WORKER.forget)
