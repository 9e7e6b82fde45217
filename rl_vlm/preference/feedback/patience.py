"""Waits for a labeller that is down, and ends a session that keeps a run from stopping. No Ray here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np

from rl_vlm.labelling.session import LabellerDownError
from rl_vlm.labelling.types import HasState

logger = logging.getLogger(__name__)

# How long a session that is under way may go on when the user wants to stop: batch systems and Kubernetes kill after 30 s or more.
_STOP_GRACE_S = 10.0
T = TypeVar("T")


class PatientSessions:
    """Runs sessions with a labeller, and repeats a session while the labeller is down, for up to `patience_s`."""

    def __init__(self, labeller: object, patience_s: float) -> None:
        self._labeller, self._patience_s = labeller, patience_s
        # One loop for all sessions: clients of served models belong to the loop that they were first used in.
        self._loop = asyncio.new_event_loop()

    def run(
        self,
        session: Callable[[], Coroutine[Any, Any, T]],
        rng: np.random.Generator,
        stop_requested: Callable[[], bool],
    ) -> T | None:
        """The result of `session()`; None if the user wants to stop. Every attempt draws the same from `rng`.

        Raises LabellerDownError when the patience is over. Then, and where it returns None, `rng` and the labeller are as before.
        """
        deadline = time.monotonic() + self._patience_s
        drawn, labeller = rng.bit_generator.state, self._labeller
        before = labeller.state() if isinstance(labeller, HasState) else None
        pause, warned = 0.5, False

        def take_back() -> None:
            rng.bit_generator.state = drawn
            if isinstance(labeller, HasState) and before is not None:
                labeller.set_state(before)

        while not stop_requested():
            try:
                result = self._loop.run_until_complete(self._unless_stopped(session(), stop_requested))
                if result is not None:
                    return result
                take_back()
            except LabellerDownError as error:
                take_back()  # a checkpoint may follow
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LabellerDownError(f"{error} Then --resume goes on from the last checkpoint.") from error
                if not warned:
                    logger.warning("%s Waiting up to %.0f s for it.", error, left)
                    warned = True
                time.sleep(min(pause, left))
                pause = min(2 * pause, 10.0)
        return None

    async def _unless_stopped(self, session: Coroutine[Any, Any, T], stop_requested: Callable[[], bool]) -> T | None:
        """The result of a session; None where the user wants to stop and it does not end soon."""
        task = asyncio.ensure_future(session)
        while not (await asyncio.wait([task], timeout=0.5))[0]:
            if stop_requested() and not (await asyncio.wait([task], timeout=_STOP_GRACE_S))[0]:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                logger.warning("The labelling session did not end in time: --resume asks again for all of its pairs.")
                return None
        return task.result()

    def close(self) -> None:
        """End the event loop."""
        self._loop.close()
