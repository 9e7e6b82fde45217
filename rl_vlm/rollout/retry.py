"""Stops a run that loses too many groups in a row."""

from __future__ import annotations

from dataclasses import dataclass

from rl_vlm.types import RLVLMError


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
                f"{self.in_a_row} groups in a row were lost, the last because of: {reason}. Mend the environment or the "
                "server, or raise rollout.max_consecutive_failures."
            )
