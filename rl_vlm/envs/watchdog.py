"""Kill a process group when the process that started it is gone. Runs as a script, without this package.

`python watchdog.py FD PID`: FD is the read end of a pipe that only the distant parent holds open for writing, PID the
worker that started this script. A worker that hangs in native code cannot watch its parent itself.
"""

import os
import select
import signal
import sys


def watch(lifeline: int, worker: int) -> None:
    """Return when the pipe's other end is closed or the worker is gone."""
    poll = select.poll()
    poll.register(lifeline, 0)  # no data events: only that the last writer has gone
    while not poll.poll(1000) and os.getppid() == worker:
        pass


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]))
    os.killpg(os.getpgrp(), signal.SIGKILL)
