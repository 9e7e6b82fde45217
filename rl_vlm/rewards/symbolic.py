"""Symbolic comparison with a hard time limit that holds in any thread, actor or executor.

math_verify limits time with SIGALRM, which only the main thread may use, and no Python-level limit interrupts a long
big-integer power. So the comparison runs in a child process that is killed when it is late. There is one child per
process; it starts on first use and is used by one thread at a time.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from rl_vlm.types import RLVLMError

TIMEOUT_S = 2.0
STARTUP_S = 120.0  # imports take about 2 s, much longer from a slow network disk

# By file name and without the script's folder on the path (-P): `rl_vlm/rewards` holds a module called math.
_COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("worker.py")))


class GraderError(RLVLMError):
    """The symbolic grader does not start."""


class Verdict(StrEnum):
    """What the comparison found."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNPARSABLE = "unparsable"  # not an expression, or it broke the worker twice
    TIMED_OUT = "timed_out"


class SymbolicWorker:
    """The child process and the lock around it. Threads wait for each other; waiting does not count as time spent."""

    def __init__(self, command: Sequence[str] = _COMMAND, startup_s: float = STARTUP_S) -> None:
        self._command = tuple(command)
        self._startup_s = startup_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._received = b""

    @property
    def pid(self) -> int | None:
        """The child's process id, or None while there is none."""
        return self._process.pid if self._process else None

    def compare(self, answer: str, truth: str, timeout_s: float = TIMEOUT_S) -> tuple[Verdict, float]:
        """Compare two normalised expressions that passed `guard.refusal`.

        Returns the verdict and the seconds that it took, at most about `timeout_s`, without the wait for other threads
        and for the start of the child. Raises GraderError if the child does not start.
        """
        request = json.dumps({"answer": answer, "truth": truth, "limit_s": timeout_s}).encode() + b"\n"
        with self._lock:
            spent_s = 0.0
            for _ in range(2):  # again if the child was killed from outside, by the OOM killer for example
                self._ensure_ready()
                started = time.monotonic()
                verdict = self._ask(request, timeout_s)
                spent_s += time.monotonic() - started
                if verdict is not None:
                    return verdict, spent_s
        return Verdict.UNPARSABLE, spent_s

    def close(self) -> None:
        """Kill the child; the next comparison starts a new one."""
        with self._lock:
            self._kill()

    def forget(self) -> None:
        """Drop the child in a forked process: it belongs to the parent, and its pipes must not be shared."""
        self._lock = threading.Lock()
        if self._process is not None:
            self._close_pipes(self._process)
            self._process.returncode = 0  # only the parent can wait for it
            self._process = None

    def _ask(self, request: bytes, timeout_s: float) -> Verdict | None:
        """One question to a ready child; None if the child died."""
        assert self._process is not None and self._process.stdin is not None
        finished = False
        try:
            self._process.stdin.write(request)
            reply = self._read_line(time.monotonic() + timeout_s)
            finished = True
            return Verdict(reply["verdict"])
        except TimeoutError:
            return Verdict.TIMED_OUT
        except (BrokenPipeError, EOFError):
            # SIGALRM is the child's own limit: it comes first when this process was stopped meanwhile.
            return Verdict.TIMED_OUT if self._process.wait() == -signal.SIGALRM else None
        finally:
            if not finished:  # also after KeyboardInterrupt: a late reply must not answer the next question
                self._kill()
                self._spawn()  # so that it imports while the caller goes on

    def _ensure_ready(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self._kill()
            self._spawn()
        if not self._ready:
            try:
                self._ready = self._read_line(time.monotonic() + self._startup_s) == {"ready": True}
            except (TimeoutError, EOFError, ValueError) as error:
                self._kill()
                raise GraderError(
                    "The symbolic grader did not start. Run this to see why, and install what is missing "
                    f"(pip install 'math-verify[antlr4_13_2]'): {' '.join(self._command)} < /dev/null"
                ) from error

    def _spawn(self) -> None:
        # A session of its own, so that Ctrl-C does not end it: the run may still have episodes to grade. A fixed hash seed,
        # because sympy orders its steps by hash and equal pairs must give equal results.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        self._ready, self._received = False, b""

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            self._close_pipes(process)

    @staticmethod
    def _close_pipes(process: subprocess.Popen[bytes]) -> None:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _read_line(self, deadline: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poll = select.poll()  # select.select fails on descriptors above 1023, which busy actors have
        poll.register(descriptor, select.POLLIN)
        while b"\n" not in self._received:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            chunk = os.read(descriptor, 65536)
            if not chunk:
                raise EOFError
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


WORKER = SymbolicWorker()
atexit.register(WORKER.close)
os.register_at_fork(after_in_child=WORKER.forget)
