"""Calls a function in a process of its own, with limits of time and memory: for input that may be made to exhaust both."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from rl_vlm.safe_text import child_environment
from rl_vlm.types import RLVLMError, UserInputError


class LimitExceededError(UserInputError):
    """The function did not end within its limits."""


def call_limited(function: str, arguments: Sequence[Any], *, what: str, seconds: float, memory: int) -> Any:
    """`function` ("package.module:name") of JSON values, and its result, which is plain JSON.

    Args:
        what: is being read, for the message.
        seconds: of wall time after which the process is killed.
        memory: bytes that the process may allocate beyond what its imports take.

    Raises LimitExceededError, UserInputError with the function's own message, and RLVLMError for other failures.
    """
    request = json.dumps({"function": function, "arguments": list(arguments), "memory": memory, "seconds": seconds})
    path = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "rl_vlm.limits"],
            input=request.encode(),
            capture_output=True,
            env=child_environment(PYTHONPATH=path),
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LimitExceededError(f"{what} takes more than {seconds:g} s to read: it may be made to do so.") from error
    try:
        reply = json.loads(done.stdout)
    except ValueError as error:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1][:200]
        raise LimitExceededError(
            f"{what} ended the process that read it (exit code {done.returncode}; {last}): it may be made to do so."
        ) from error
    if reply["kind"] == "memory":
        raise LimitExceededError(
            f"{what} takes more than {memory >> 20} MiB of memory to read: it may be made to do so."
        )
    if reply["kind"] != "result":
        raise (UserInputError if reply["kind"] == "input" else RLVLMError)(reply["value"])
    return reply["value"]


def _serve() -> None:
    request = json.load(sys.stdin)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the reply
    module, _, name = request["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    _limit(request["memory"], request["seconds"])
    try:
        reply = {"kind": "result", "value": function(*request["arguments"])}
    except MemoryError:
        reply = {"kind": "memory"}
    except UserInputError as error:
        reply = {"kind": "input", "value": str(error)}
    except Exception as error:  # the parent raises it again
        reply = {"kind": "error", "value": f"{type(error).__name__}: {error}"}
    json.dump(reply, replies)
    replies.flush()


def _limit(memory: int, seconds: float) -> None:
    """Limit the address space to what is mapped now and `memory` bytes more, and the time on the CPU."""
    with contextlib.suppress(OSError, ValueError):  # not every system has these; the parent's deadline still holds
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + memory, mapped + memory))
    with contextlib.suppress(OSError, ValueError):
        whole = int(seconds) + 5
        resource.setrlimit(resource.RLIMIT_CPU, (4 * whole, 4 * whole))  # of all threads, where the parent has died


if __name__ == "__main__":
    _serve()
