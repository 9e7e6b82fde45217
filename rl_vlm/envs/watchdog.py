"""Kill an environment's processes when the process that started it is gone. Runs as a script, without this package.

`python watchdog.py FD PID MARK`: FD is the read end of a pipe that only the distant parent holds open for writing, PID the
worker that started this script, MARK a variable in the worker's environment. A worker that hangs in native code cannot
watch its parent itself. A child that made a session of its own is in no group of the worker, and one whose parent has
ended is below nobody; both still have the variable.
"""

import contextlib
import os
import select
import signal
import sys

_ROUNDS = 8  # a process may fork while the others are being found


def watch(lifeline: int, worker: int) -> None:
    """Return when the pipe's other end is closed or the worker is gone."""
    poll = select.poll()
    poll.register(lifeline, 0)  # no data events: only that the last writer has gone
    while not poll.poll(1000) and os.getppid() == worker:
        pass


def marked(mark: str) -> set[int]:
    """The running processes of this user whose environment has the variable, without this one; none where /proc is missing."""
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
    for _ in range(_ROUNDS):
        found = marked(mark)
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]))
    kill_marked(sys.argv[3])
    os.killpg(os.getpgrp(), signal.SIGKILL)
