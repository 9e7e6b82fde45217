"""Failures while groups are sampled: each has a name that is counted, and too many in a row stop the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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


class TooManyFailuresError(RLVLMError):
    """Too many groups in a row were lost."""


@dataclass(slots=True)
class FailureBudget:
    """Counts groups that were lost in a row."""

    limit: int
    in_a_row: int = 0

    def record(self, succeeded: int, lost: dict[str, str]) -> None:
        """Count one round; raises TooManyFailuresError at the limit, naming the last reason."""
        self.in_a_row = 0 if succeeded else self.in_a_row + len(lost)
        if self.in_a_row >= self.limit:
            reason = list(lost.values())[-1]
            raise TooManyFailuresError(
                f"{self.in_a_row} groups in a row were lost, the last because of: {reason}. Repair the environment or the "
                "server, or raise rollout.max_consecutive_failures."
            )
