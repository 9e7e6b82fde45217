"""Asks an endpoint again after failures that may pass, and many questions at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from rl_vlm.asking.endpoints import Answer, Ask, EndpointError, Question
from rl_vlm.types import RLVLMError, UserInputError

_FIRST_PAUSE_S = 0.25

T = TypeVar("T")


async def ask_again(
    ask: Ask,
    question: Callable[[int], Question],
    *,
    attempts: int,
    deadline_s: float,
    who: str,
    on_retry: Callable[[], None] = lambda: None,
) -> Answer:
    """One answer after at most so many attempts and seconds; `question` makes the question of each attempt.

    Raises EndpointError, which names `who` was asked; errors that another attempt cannot change end it at once.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + deadline_s
    reason = "no answer"
    for attempt in range(attempts):
        try:
            async with asyncio.timeout_at(deadline):
                return await ask(question(attempt))
        except TimeoutError:
            break
        except UserInputError:
            raise
        except RLVLMError as error:
            if isinstance(error, EndpointError) and not error.retryable:
                raise
            reason = str(error)
            pause = error.retry_after_s if isinstance(error, EndpointError) else 0.0
        if attempt + 1 < attempts:
            on_retry()
            # Full jitter keeps questions that failed together from coming back together.
            pause = max(pause, random.uniform(0.5, 1) * _FIRST_PAUSE_S * 2**attempt)
            await asyncio.sleep(max(min(pause, deadline - loop.time()), 0.0))
    raise EndpointError(f"The {who} gave no answer within {deadline_s:g} s and {attempts} attempts: {reason}")


async def all_of(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all at once; the first that raises an exception ends the others and is raised itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as several:
        raise several.exceptions[0] from None
    return [task.result() for task in tasks]
