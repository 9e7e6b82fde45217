"""A child process that can be killed, with limits of time and memory, for code that may hang or crash.

The child is `child_program` run as a program. It calls one function, `package.module:name`, which prepares the work and
returns the function that answers requests. Requests and replies are frames (see `frames`) over the child's stdin and
stdout. Python-level limits do not suffice: only a kill interrupts a long call of native code.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rl_vlm.frames import Channel, Frame, FrameError, PeerGoneError
from rl_vlm.safe_text import child_environment

STARTUP_S = 120.0  # imports take seconds, much longer from a slow network disk
_SUPERVISOR_S = 10.0  # in which a supervisor has killed all that is below it
_GRACE_S = 1.0  # after its time for a request a child whose parent is gone ends itself
_PROGRAM = (sys.executable, "-P", "-m", "rl_vlm.child_program")

Answer = Callable[[dict[str, Any], list[bytes]], Frame]


class ChildStartError(Exception):
    """The child did not get ready; the message says how to see why."""


class CPULimitError(Exception):
    """A request took more CPU time than it may."""


class Child:
    """A child process. It takes one request at a time: threads that share a child need a lock.

    Args:
        function: "package.module:name", called once in the child with `arguments`; it returns what answers requests.
        memory: bytes of address space that the child may map beyond what its imports take.
        whole: everything that the child starts ends with it and with this process, also orphans and processes in
            sessions of their own: `pid` is then a supervisor (see `child_program`), and the work is done below it. The
            requests' time is limited by this process alone.
        variables: further environment variables of the child. It sees none that hold secrets, except those in `keep`.
        quiet: its standard error is dropped.
    """

    def __init__(
        self,
        function: str,
        arguments: Sequence[Any] = (),
        *,
        memory: int | None = None,
        whole: bool = False,
        keep: Iterable[str] = (),
        variables: Mapping[str, str] | None = None,
        quiet: bool = True,
    ) -> None:
        settings = {"function": function, "arguments": list(arguments), "memory": memory, "whole": whole}
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.command = [*_PROGRAM, json.dumps(settings)]
        environment = child_environment(keep, PYTHONPATH=path, **(variables or {}))
        self._process = process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            start_new_session=True,  # a group, which can be killed whole and gets no Ctrl-C
            env=environment,
        )
        assert process.stdin is not None and process.stdout is not None
        with process.stdin, process.stdout:  # the channel keeps ends of its own
            reads, writes = os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno())
        self._limits_itself = not whole
        self._ready = False
        self._channel = Channel(reads, writes, alive=lambda: _is_running(process.pid))
        self._end = weakref.finalize(self, _end, process, self._channel, whole, os.getpid())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._end.alive and _is_running(self.pid)

    def wait_ready(self, timeout_s: float = STARTUP_S) -> None:
        """Wait until its imports are done. Raises ChildStartError, and kills it, if they fail or take longer."""
        if self._ready:
            return
        try:
            self._ready = self._exchange(None, (), timeout_s)[0] == {"ready": True}
        except (TimeoutError, PeerGoneError, FrameError) as error:
            command = shlex.join(self.command)
            raise ChildStartError(f"the process did not start. Run this to see why: {command} < /dev/null") from error

    def ask(
        self, content: dict[str, Any], blobs: Sequence[bytes] = (), *, timeout_s: float, cpu_s: float = 0.0
    ) -> Frame:
        """The reply to one request.

        Raises TimeoutError after `timeout_s`, CPULimitError after `cpu_s` of CPU time (0: any), PeerGoneError when the
        child died, FrameError when it sent no frame. Whatever is raised, the child was killed: a late reply must not
        answer the next request.
        """
        self.wait_ready()
        limit_s = timeout_s + _GRACE_S if self._limits_itself else 0.0
        return self._exchange({"request": content, "limit_s": limit_s, "cpu_s": cpu_s}, blobs, timeout_s)

    def _exchange(self, frame: dict[str, Any] | None, blobs: Sequence[bytes], timeout_s: float) -> Frame:
        if not self._end.alive:
            raise PeerGoneError
        deadline = time.monotonic() + timeout_s
        try:
            if frame is not None:
                self._channel.send(frame, blobs, timeout_s)
            return self._channel.receive(deadline - time.monotonic())
        except PeerGoneError:
            self.kill(grace_s=1.0)
            if self._limits_itself and self._process.returncode == -signal.SIGALRM:
                raise TimeoutError from None  # this process may have been stopped meanwhile
            if self._process.returncode == -signal.SIGPROF:
                raise CPULimitError from None
            raise
        except BaseException:  # also KeyboardInterrupt
            self.kill()
            raise

    def kill(self, grace_s: float = 0.0) -> str:
        """Kill it, and with `whole` all that it started, unless it ends in `grace_s`; how it ended, in words."""
        if self._end.alive:
            _wait(self.pid, grace_s)
        self._end()
        code = self._process.returncode
        return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _end(process: subprocess.Popen[bytes], channel: Channel, whole: bool, owner: int) -> None:
    """Kill a child, with `whole` by its supervisor, reap it and close its pipes; a fork of its owner only closes the
    pipes."""
    if os.getpid() == owner:
        # Before the child is reaped: until then its id cannot name another process or group.
        with contextlib.suppress(ProcessLookupError):
            if whole:
                os.kill(process.pid, signal.SIGTERM)
                _wait(process.pid, _SUPERVISOR_S)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    else:
        process.returncode = 0  # only the owner can wait for it
    channel.close()


def _wait(pid: int, seconds: float) -> None:
    """Until a child has ended, for so long at most."""
    deadline = time.monotonic() + seconds
    while _is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    """Whether a child runs; it is not reaped, so its id stays taken."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False
