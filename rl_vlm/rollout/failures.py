"""What ends the sampling of a group: its environments are discarded, and the reason has a name that is counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rl_vlm.envs.base import VisionEnv
from rl_vlm.rollout.env_pool import EnvPool
from rl_vlm.types import RLVLMError


class GroupFailedError(RLVLMError):
    """An episode of the group failed; `reason` is the name under which it is counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@contextmanager
def discard_on_failure(pool: EnvPool, envs: list[VisionEnv]) -> Iterator[None]:
    """Discard the environments on any error; an RLVLMError is raised as GroupFailedError."""
    try:
        yield
    except RLVLMError as error:
        pool.discard(envs)
        if isinstance(error, GroupFailedError):
            raise
        raise GroupFailedError(reason_of(error), str(error)) from error
    except BaseException:
        pool.discard(envs)
        raise


def reason_of(error: Exception) -> str:
    """The name under which an error is counted: EnvTimeoutError is env_timeout."""
    name = type(error).__name__.removesuffix("Error")
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
