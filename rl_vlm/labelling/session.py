"""One labelling session: draw pairs, have them labelled, draw more where too few were decided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rl_vlm.labelling.types import IDENTICAL, SKIPPED, Label, Labeller, SegmentPair
from rl_vlm.types import RLVLMError

Draw = Callable[[int], Sequence[SegmentPair]]


class LabellerDownError(RLVLMError):
    """Not one pair of a session could be labelled: the labeller is down or refuses every question."""


@dataclass(slots=True)
class LabelledSession:
    """The pairs of a session and their labels, in the order in which they were asked."""

    pairs: list[SegmentPair] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def num_decided(self) -> int:
        """Labels 0 and 1."""
        return sum(is_decided(label) for label in self.labels)


def is_answer(label: Label) -> bool:
    """Whether the label may be trained on: not an error, not skipped."""
    return not label.error


def is_decided(label: Label) -> bool:
    """Whether one of the two was preferred."""
    return is_answer(label) and label.value != -1


async def label_session(
    labeller: Labeller, draw: Draw, wanted: int, max_rounds: int = 4, max_pairs: int | None = None
) -> LabelledSession:
    """Label `wanted` pairs; while fewer than that are decided, draw and label as many again as are missing.

    With the original's single round, a policy that hardly moves (pairs look alike) leaves few usable pairs in a
    session, and the reward model learns nothing from them. `max_rounds` bounds the rounds (1: no further pairs are
    drawn), `max_pairs` the pairs of all rounds; `draw(n)` gives up to n new pairs. Raises LabellerDownError if nothing
    could be labelled.
    """
    session = LabelledSession()
    for number in range(max_rounds):
        missing = wanted - session.num_decided
        if max_pairs is not None:
            missing = min(missing, max_pairs - len(session))
        if missing <= 0:
            break
        pairs = list(draw(missing))
        if not pairs:
            break
        labels = await labeller.label(pairs)
        session.pairs += pairs
        session.labels += labels
        failed = [label for label in labels if label.error and label.error != SKIPPED]
        answered = [label for label in labels if is_answer(label) and label.text != IDENTICAL]
        if failed and not answered:
            if number == 0:
                raise LabellerDownError(
                    f"None of {len(failed)} pairs could be labelled: {failed[0].error.rstrip('.')}. Start the "
                    "labeller again."
                )
            break  # what was answered before is kept; the next session asks again
    return session
