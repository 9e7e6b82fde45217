"""Symbolic comparison with a hard limit that holds in any thread, actor or executor.

math_verify limits time with SIGALRM, which only the main thread may use, and no Python-level limit interrupts a long
big-integer power. So the comparison runs in a child process that the kernel ends when it has used up its CPU time: a
reward must not depend on what else the machine does. Each process has one child, for one thread at a time.
"""

from __future__ import annotations

import os
import threading
from enum import StrEnum

from rl_vlm.child import STARTUP_S, Child, ChildStartError, CPULimitError
from rl_vlm.frames import FrameError, PeerGoneError
from rl_vlm.types import RLVLMError

CPU_S = 2.0
TIMEOUT_S = 60.0  # of the clock, for CPU_S on a machine with thirty times more to do than it can
MEMORY = 2 << 30  # bytes beyond the imports
MAX_WAIT_S = 300.0  # that a thread waits for the others


class GraderError(RLVLMError):
    """The symbolic grader does not start, has too much to do, or was killed: the comparison is not decided.

    Do: nothing: the group is sampled again. If it is frequent, give the machine more CPUs.
    """


class Reason(StrEnum):
    """Why a response was graded as it was."""

    CORRECT = "correct"
    WRONG = "wrong"  # another value, unit, kind or number of elements
    NO_ANSWER = "no_answer"  # no box with something in it
    TOO_LONG = "too_long"  # more than MAX_CHARS characters in the box
    TIMED_OUT = "timed_out"  # the symbolic comparison used up its CPU time
    UNPARSABLE = "unparsable"  # differs as text and number, and is no expression that may be evaluated


class SymbolicWorker:
    """The child process, for one thread at a time; waiting does not count as time spent."""

    def __init__(
        self,
        function: str = "rl_vlm.rewards.sympy_child:prepare",
        startup_s: float = STARTUP_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._function, self._startup_s, self._timeout_s = function, startup_s, timeout_s
        self._child: Child | None = None
        self.forget()

    @property
    def pid(self) -> int | None:
        """The child's process id, or None while there is none."""
        return self._child.pid if self._child else None

    def compare(self, answer: str, truth: str, cpu_s: float = CPU_S) -> tuple[Reason, float]:
        """The verdict on two expressions that passed `algebra.why_not_evaluated`, and its CPU seconds, at most about
        `cpu_s`. Raises GraderError if the child does not start, or if a limit of the clock passed first."""
        if not self._turn.acquire(timeout=MAX_WAIT_S):
            raise GraderError(f"The symbolic grader has too much to do: waited {MAX_WAIT_S:g} s for others.")
        try:
            return self._compare({"answer": answer, "truth": truth}, cpu_s)
        finally:
            self._turn.release()

    def _compare(self, request: dict[str, str], cpu_s: float) -> tuple[Reason, float]:
        for _ in range(2):  # again if the child was killed from outside, by the OOM killer for example
            child = self._ready_child()
            try:
                reply, _ = child.ask(request, timeout_s=self._timeout_s, cpu_s=cpu_s)
                return Reason(reply["reason"]), reply["cpu_s"]
            except CPULimitError:
                self._child = self._start()  # so that it imports while the caller goes on
                return Reason.TIMED_OUT, cpu_s
            except (PeerGoneError, FrameError, TimeoutError) as error:
                failure, ended = error, child.kill()
        if ended == "signal SIGKILL":
            raise GraderError(f"The symbolic grader was killed, or got no CPU for {self._timeout_s:g} s.") from failure
        return Reason.UNPARSABLE, cpu_s  # the request itself ends the child

    def forget(self) -> None:
        """Drop the child and the lock, which in a forked process belong to the parent."""
        self._turn = threading.Lock()
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
