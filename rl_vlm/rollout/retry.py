"""What to do when a group fails: data, not a try/except in the middle of the loop."""

from __future__ import annotations

from dataclasses import dataclass

from rl_vlm.types import RLVLMError


class TooManyFailuresError(RLVLMError):
    """So many groups in a row were lost that going on makes no sense."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """A failed group is tried `attempts` times in all, each time with fresh environments; then it is dropped."""

    attempts: int = 3

    def again(self, attempt: int) -> bool:
        """Whether attempt number `attempt` (from 0) may be followed by another."""
        return attempt + 1 < self.attempts


@dataclass(slots=True)
class FailureBudget:
    """Stops a run that only loses groups."""

    limit: int
    in_a_row: int = 0

    def record(self, succeeded: int, lost: dict[str, str]) -> None:
        """Count one round; raises TooManyFailuresError at the limit, naming the last reason."""
        self.in_a_row = 0 if succeeded else self.in_a_row + len(lost)
        if self.in_a_row >= self.limit:
            reason = list(lost.values())[-1]
            raise TooManyFailuresError(
                f"{self.in_a_row} groups in a row were lost, the last because of: {reason}. Mend the environment or the "
                "server, or raise rollout.max_consecutive_failures."
            )
