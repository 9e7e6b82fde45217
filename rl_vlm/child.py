"""A child process that can be killed, with limits of time and memory, for code that may hang or crash.

The child is this module run as a program. It calls one function, `package.module:name`, which prepares the work and
returns the function that answers requests. Requests and replies are frames (see `frames`) over the child's stdin and
stdout. Python-level limits do not suffice: only a kill interrupts a long call of native code.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import secrets
import select
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
_GRACE_S = 1.0  # after its time for a request a child whose parent is gone ends itself
_KILL_ROUNDS = 8  # a process may fork while the others are being found
_PROGRAM = (sys.executable, "-P", "-m", "rl_vlm.child")

Answer = Callable[[dict[str, Any], list[bytes]], Frame]


class ChildStartError(Exception):
    """The child did not get ready; the message says how to see why."""


class CPULimitError(Exception):
    """A request took more CPU time than it may."""


class Child:
    """A child process. Requests come one at a time; whoever shares a child among threads holds a lock.

    Args:
        function: "package.module:name", called once in the child with `arguments`; it returns what answers requests.
        memory: bytes of address space that the child may map beyond what its imports take.
        whole: everything that the child starts ends with it and with this process, also in sessions of its own. The
            requests' time is then limited by this process alone.
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
        mark = f"RL_VLM_CHILD_{secrets.token_hex(8)}" if whole else ""  # tells its processes from all others
        settings = {"function": function, "arguments": list(arguments), "memory": memory, "mark": mark}
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.command = [*_PROGRAM, json.dumps(settings)]
        environment = child_environment(keep, PYTHONPATH=path, **(variables or {}), **({mark: "1"} if mark else {}))
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
        self._end = weakref.finalize(self, _end, process, self._channel, mark, os.getpid())

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
        deadline = time.monotonic() + grace_s
        while self._end.alive and _is_running(self.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._end()
        code = self._process.returncode
        return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _end(process: subprocess.Popen[bytes], channel: Channel, mark: str, owner: int) -> None:
    """Kill a child and all that it started, reap it and close its pipes; a fork of its owner only closes the pipes."""
    if os.getpid() == owner:
        kill_marked(mark)
        # Before the child is reaped: until then its id cannot name another group, which may have gone already.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kill_marked(mark)  # what was started while the others were killed
    else:
        process.returncode = 0  # only the owner can wait for it
    channel.close()


def _is_running(pid: int) -> bool:
    """Whether a child runs; it is not reaped, so its id stays taken."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def marked(mark: str) -> set[int]:
    """The other running processes of this user whose environment has the variable; none if /proc is missing."""
    found, own = set(), os.getpid()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) == own:
                continue
            # It may have ended, or belong to another user.
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if f"\0{mark}=".encode() in b"\0" + file.read():
                    found.add(int(name))
    return found


def kill_marked(mark: str) -> None:
    """Kill all processes whose environment has the variable, also those that they start meanwhile."""
    for _ in range(_KILL_ROUNDS if mark else 0):
        found = marked(mark)
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _serve(settings: dict[str, Any]) -> None:
    """Answer requests until the parent closes the pipe."""
    read_fd, write_fd = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # output of libraries must not mix with the replies
    if settings["mark"]:
        watched = json.dumps({"watch": [read_fd, os.getpid(), settings["mark"]]})
        subprocess.Popen([*_PROGRAM, watched], pass_fds=(read_fd,))
    channel = Channel(read_fd, write_fd)
    module, _, name = settings["function"].partition(":")
    answer: Answer = getattr(importlib.import_module(module), name)(*settings["arguments"])
    with contextlib.suppress(OSError, ValueError):  # not every system has this; the parent's deadline still holds
        if (memory := settings["memory"]) is not None:
            with open("/proc/self/statm") as file:
                memory += int(file.read().split()[0]) * resource.getpagesize()  # beyond what is mapped now
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    channel.send({"ready": True})
    while True:
        try:
            content, blobs = channel.receive()
        except PeerGoneError:
            return
        # The parent kills a child that takes too long. If the parent is gone as well, the kernel does it: the default
        # action of SIGALRM, and of SIGPROF, ends the process even inside one long call of native code.
        signal.setitimer(signal.ITIMER_REAL, content["limit_s"])  # 0: no limit
        signal.setitimer(signal.ITIMER_PROF, content["cpu_s"])
        reply = answer(content["request"], blobs)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        try:
            channel.send(*reply)
        except (FrameError, ValueError, TypeError, RecursionError) as error:  # what JSON cannot hold
            channel.send({"kind": "env", "error": f"the reply cannot be sent ({' '.join(str(error).split())[:500]})"})


def _watch(lifeline: int, worker: int, mark: str) -> None:
    """Kill a child's processes when its parent or the child itself is gone.

    `lifeline` is the read end of a pipe that only the parent holds open for writing. A child that hangs in native code
    cannot watch its parent itself. A process in a session of its own is in no group of the child, and one that was
    orphaned is no descendant of it; both still have the variable `mark` in their environment.
    """
    poll = select.poll()
    poll.register(lifeline, 0)  # no data events: only that the last writer has gone
    while not poll.poll(1000) and os.getppid() == worker:
        pass
    kill_marked(mark)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    _settings = json.loads(sys.argv[1])
    if "watch" in _settings:
        _watch(*_settings["watch"])
    else:
        _serve(_settings)
