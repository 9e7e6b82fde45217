"""Plays the items of an evaluation, a bounded number at once, and keeps each as soon as it is finished."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rl_vlm.evaluation.outcomes import Outcome
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import RLVLMError

# Plays one task: its outcomes, or why it is lost.
Play = Callable[[RolloutTask], Awaitable[list[Outcome] | str]]


class EpisodesLostError(RLVLMError):
    """No episode could be finished, or too many in a row were lost."""


async def play_tasks(
    tasks: Sequence[RolloutTask],
    play: Play,
    keep: Callable[[list[Outcome]], None],
    *,
    at_once: int,
    max_losses: int,
) -> dict[str, str]:
    """Play all tasks, `at_once` at a time; returns why which task was lost.

    Raises EpisodesLostError after `max_losses` losses in a row; what was finished before is kept.
    """
    waiting = iter(tasks)
    lost: dict[str, str] = {}
    in_a_row = 0

    async def work() -> None:
        nonlocal in_a_row
        for task in waiting:
            played = await play(task)
            if isinstance(played, str):
                lost[task.group_id] = played
                in_a_row += 1
                if in_a_row >= max_losses:
                    raise EpisodesLostError(f"{in_a_row} episodes in a row were lost, the last because of: {played}")
            else:
                in_a_row = 0
                keep(played)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(tasks))):
                group.create_task(work())
    except ExceptionGroup as several:
        raise several.exceptions[0] from None
    return lost


def losses(lost: Mapping[str, str]) -> dict[str, Any]:
    """What results say of lost tasks: how many and, where there are any, the commonest reasons with their counts."""
    if not lost:
        return {"lost": 0}
    return {"lost": len(lost), "lost_because": dict(Counter(lost.values()).most_common(5))}
