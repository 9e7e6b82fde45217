"""A labelling session: draw pairs, have them labelled, draw more where too few were decided; wait for a labeller."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np

from rl_vlm.labelling.labels import IDENTICAL, SKIPPED, Label, Labeller, Score, Segment, SegmentPair, picture_of
from rl_vlm.types import RLVLMError

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0  # before a labeller that is down is asked again
_STOP_CHECK_S = 0.5  # how often a running session checks whether the user wants to stop
T = TypeVar("T")
Draw = Callable[[int], Sequence[SegmentPair]]


class LabellerDownError(RLVLMError):
    """Not one question of a session was answered: the labeller is down or rejects every question.

    Do: start the labeller again, then `--resume`.
    """


async def label_session(
    labeller: Labeller, draw: Draw, wanted: int, max_rounds: int, max_pairs: int
) -> tuple[list[SegmentPair], list[Label]]:
    """Label `wanted` pairs; while fewer than that are decided, draw and label as many again as are missing.

    With the original's single round, a policy that hardly moves (pairs look alike) leaves few usable pairs in a
    session. `max_rounds` bounds the rounds, `max_pairs` the pairs of all rounds; `draw(n)` gives up to n new pairs.
    Raises LabellerDownError if nothing could be labelled.
    """
    pairs: list[SegmentPair] = []
    labels: list[Label] = []
    for number in range(max_rounds):
        missing = min(wanted - sum(label.is_decided for label in labels), max_pairs - len(pairs))
        drawn = list(draw(missing)) if missing > 0 else []
        if not drawn:
            break
        new = await labeller.label(drawn)
        pairs += drawn
        labels += new
        failed = [label for label in new if label.error and label.error != SKIPPED]
        if failed and not any(not label.error and label.text != IDENTICAL for label in new):
            if number == 0:
                raise LabellerDownError(
                    f"None of {len(failed)} pairs could be labelled: {failed[0].error.rstrip('.')}. Start the "
                    "labeller again."
                )
            break  # what was answered before is kept; the next session asks again
    return pairs, labels


async def score_session(labeller: Labeller, drawn: Sequence[SegmentPair]) -> tuple[list[Segment], list[Score]]:
    """Score the first segment of each pair. Raises LabellerDownError if nothing could be scored."""
    segments = [pair.first for pair in drawn]
    scores = await labeller.score([picture_of(segment) for segment in segments])
    if scores and all(score.error for score in scores):
        raise LabellerDownError(f"None of {len(scores)} pictures could be scored: {scores[0].error}")
    return segments, scores


class SessionRunner:
    """Runs the sessions of a labeller, each again while the labeller is down, for `patience_s` at most."""

    def __init__(self, labeller: Labeller, patience_s: float) -> None:
        self._labeller, self._patience_s = labeller, patience_s
        # One loop for all sessions: clients of served models belong to the loop that they were first used in.
        self._loop = asyncio.new_event_loop()
        self._thread = ThreadPoolExecutor(1)  # in which it runs: the driver's own may have one, as a notebook's has

    def retry_while_labeller_down(
        self,
        session: Callable[[], Coroutine[Any, Any, T]],
        rng: np.random.Generator,
        stop_requested: Callable[[], bool],
    ) -> T | None:
        """The result of `session()`; None if the user wants to stop.

        Every attempt draws the same from `rng`. Raises LabellerDownError when the patience is over. Then, and where it
        returns None, `rng` and the labeller are as before: a resumed run asks for the same.
        """
        deadline = time.monotonic() + self._patience_s
        drawn, before = rng.bit_generator.state, self._labeller.state()
        pause = _FIRST_PAUSE_S
        while not stop_requested():
            task = self._loop.create_task(session())
            running = self._thread.submit(self._loop.run_until_complete, task)
            while not wait([running], _STOP_CHECK_S).done:
                if stop_requested():
                    self._loop.call_soon_threadsafe(task.cancel)
            try:
                return running.result()
            except asyncio.CancelledError:
                down = None
                logger.warning("The labelling session was interrupted: --resume asks again for all of its pairs.")
            except LabellerDownError as error:
                down = error
            rng.bit_generator.state = drawn
            self._labeller.set_state(before)
            if down is None:
                break
            left = deadline - time.monotonic()
            if left <= 0:
                raise LabellerDownError(f"{down} Then --resume goes on from the last checkpoint.") from down
            if pause == _FIRST_PAUSE_S:
                logger.warning("%s Waiting up to %.0f s for it.", down, left)
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return None

    def close(self) -> None:
        self._thread.shutdown()
        self._loop.close()
