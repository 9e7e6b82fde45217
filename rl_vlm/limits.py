"""Calls a function in a child process, with limits of time and memory: for input that may be made to exhaust both."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from rl_vlm.child import Answer, Child, ChildStartError
from rl_vlm.frames import Frame, FrameError, PeerGoneError
from rl_vlm.types import RLVLMError, UserInputError


class LimitExceededError(UserInputError):
    """The function did not end within its limits."""


def call_limited(function: str, arguments: Sequence[Any], *, what: str, seconds: float, memory: int) -> Any:
    """`function` ("package.module:name") of JSON values, and its result, which is plain JSON.

    Args:
        what: is being read, for the message.
        seconds: of wall time after which the process is killed; its imports are not counted.
        memory: bytes that the process may allocate beyond what its imports take.

    Raises LimitExceededError, UserInputError with the function's own message, and RLVLMError for other failures.
    """
    child = Child("rl_vlm.limits:prepare", [function], memory=memory)
    try:
        reply, _ = child.ask({"arguments": list(arguments)}, timeout_s=seconds)
    except ChildStartError as error:
        raise RLVLMError(f"{what} cannot be read: {error}") from error
    except TimeoutError as error:
        raise LimitExceededError(f"{what} takes more than {seconds:g} s to read: it may be made to do so.") from error
    except (PeerGoneError, FrameError) as error:
        raise LimitExceededError(
            f"{what} ended the process that read it ({child.kill()}): it may be made to do so."
        ) from error
    finally:
        child.kill()
    if reply["kind"] == "memory":
        raise LimitExceededError(
            f"{what} takes more than {memory >> 20} MiB of memory to read: it may be made to do so."
        )
    if reply["kind"] != "result":
        raise (UserInputError if reply["kind"] == "input" else RLVLMError)(reply["error"])
    return reply["value"]


def prepare(function: str) -> Answer:
    """In the child: what answers requests for one function."""
    module, _, name = function.partition(":")
    call = getattr(importlib.import_module(module), name)

    def answer(request: dict[str, Any], _: list[bytes]) -> Frame:
        try:
            return {"kind": "result", "value": call(*request["arguments"])}, []
        except MemoryError:
            return {"kind": "memory"}, []
        except UserInputError as error:
            return {"kind": "input", "error": str(error)}, []
        except Exception as error:  # the parent raises it again
            return {"kind": "error", "error": f"{type(error).__name__}: {error}"}, []

    return answer
