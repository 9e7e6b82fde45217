"""Asks an endpoint again after failures that may pass, and many questions at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from rl_vlm.asking.endpoints import Answer, Ask, EndpointError, Question
from rl_vlm.types import RLVLMError, UserInputError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0

T = TypeVar("T")


async def ask_again(
    ask: Ask,
    question: Callable[[int], Question],
    *,
    attempts: int,
    deadline_s: float,
    who: str,
    on_retry: Callable[[EndpointError], None] = lambda error: None,
) -> Answer:
    """One answer within `deadline_s` and after at most `attempts`; `question(n)` makes the question of attempt n.

    Attempts at which the endpoint is busy do not count: only the deadline ends them. `on_retry` gets the error that the next
    attempt follows. Raises EndpointError, which names `who` was asked; an error that is not retryable ends it at once.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + deadline_s
    reason = "no answer"
    asked = failed = 0
    while failed < attempts and (asked == 0 or loop.time() < deadline):
        try:
            async with asyncio.timeout_at(deadline):
                return await ask(question(asked))
        except TimeoutError:
            break
        except UserInputError:
            raise
        except RLVLMError as error:
            known = error if isinstance(error, EndpointError) else EndpointError(str(error))
            if not known.retryable:
                raise
            reason, pause = str(error), known.retry_after_s
        failed += not known.busy
        if failed < attempts:
            on_retry(known)
            # Jitter keeps questions that failed together from coming back together.
            backoff = min(_FIRST_PAUSE_S * 2 ** min(asked, 30), _LONGEST_PAUSE_S)
            pause = max(pause, random.uniform(0.5, 1) * backoff)
            await asyncio.sleep(max(min(pause, deadline - loop.time()), 0.0))
        asked += 1
    limit = f"in {attempts} attempts" if failed >= attempts else f"within {deadline_s:g} s"
    raise EndpointError(f"The {who} gave no answer {limit}: {reason}")


async def all_of(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all at once; the first that raises an exception ends the others and is raised itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as several:
        raise several.exceptions[0] from None
    return [task.result() for task in tasks]
