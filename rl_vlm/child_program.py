"""The program of a child process (see `child`): answers requests, with `whole` below a supervisor of its own."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any

from rl_vlm.frames import Channel, FrameError, PeerGoneError

_DEATH_SIGNAL, _SUBREAPER = 1, 36  # of prctl(2)
_KILL_S, _PAUSE_S = 5.0, 0.005  # a process of another user, such as one of sudo, cannot be killed


def _serve(settings: dict[str, Any]) -> None:
    """Answer requests until the parent closes the pipe."""
    read_fd, write_fd = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # output of libraries must not mix with the replies
    channel = Channel(read_fd, write_fd)
    module, _, name = settings["function"].partition(":")
    answer = getattr(importlib.import_module(module), name)(*settings["arguments"])
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


def _serve_supervised(settings: dict[str, Any]) -> None:
    """Serve in a fork. This process ends with all that the fork started: when the fork ends, when the parent is gone,
    or at SIGTERM.

    A worker that hangs in native code cannot watch its parent itself. The supervisor is a subreaper: a process whose
    parent has died becomes its child, whatever session it is in, so all of them are found below it.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(_SUBREAPER, 1, 0, 0, 0)
    worker = os.fork()
    if worker == 0:
        prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        _serve(settings)
        return
    os.close(1)  # so that the parent reads to the end once the worker's own is closed
    code = os.waitstatus_to_exitcode(_supervise(worker))
    if code < 0:  # the parent reports the signal that ended the worker
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _supervise(worker: int) -> int:
    """Wait for an end, and kill all processes below this one. Returns the worker's wait status."""
    import psutil

    signals, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    poll = select.poll()
    poll.register(0, 0)  # the pipe from the parent. No data events: only that its last writer has gone
    poll.register(signals, select.POLLIN)
    ended = _reap()
    while worker not in ended and 0 not in dict(poll.poll()) and signal.SIGTERM not in os.read(signals, 4096):
        ended |= _reap()
    supervisor, deadline = psutil.Process(), time.monotonic() + _KILL_S
    while (below := supervisor.children(recursive=True)) and time.monotonic() < deadline:
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(_PAUSE_S)
        ended |= _reap()
    return ended.get(worker, 0)


def _reap() -> dict[int, int]:
    """The wait statuses of children that have ended, by process id."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


if __name__ == "__main__":
    _settings = json.loads(sys.argv[1])
    (_serve_supervised if _settings["whole"] else _serve)(_settings)
