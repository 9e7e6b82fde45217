"""What a turn's prompt shows of its episode: all, what `rollout.history` leaves, or what the environment says."""

from __future__ import annotations

from collections.abc import Sequence

from rl_vlm.config import HistorySection
from rl_vlm.types import Message, Observation

Blocks = Sequence[Sequence[Message]]  # what stands before, between and after replies


class Shown:
    """What the prompts of one episode show, from its `opening` on."""

    replies = range(0)  # the turns, from 0 on, whose replies the last rewritten prompt repeats as they were sampled

    def __init__(self, settings: HistorySection, opening: Sequence[Message]) -> None:
        self._history = None if settings.is_all else History(settings, opening)
        self._prompt = [*opening]

    def rewritten(self, reply: str, observation: Observation) -> Blocks | None:
        """The next prompt, around the `replies` that it repeats, unless it is the last one, the policy's reply and the
        new messages."""
        self._prompt += [Message.of("assistant", reply), *observation.messages]
        if observation.context is not None:
            is_longer, self._prompt = self._prompt == [*observation.context], [*observation.context]
            self.replies = range(0)
            return None if is_longer else [self._prompt]
        if self._history is None or not self._history.add(observation.messages):
            return None
        self.replies = self._history.replies
        return self._history.messages


class History:
    """The observations of one episode, and which of them the next prompt shows.

    Older ones go in blocks: when one more than allowed would be shown, all but the newest `keep` are left out. So most
    prompts go on from the one before, whose keys and values engine and learner have.
    """

    def __init__(self, settings: HistorySection, opening: Sequence[Message]) -> None:
        self._settings, self._observations = settings, [tuple(opening)]
        self._ends = [0, sum(map(_pictures, opening))]  # how many pictures came before each observation
        self._first = 1  # the oldest observation that is shown beside the opening
        self._first_image = 0  # the oldest picture that is shown, counted over the episode

    def add(self, messages: Sequence[Message]) -> bool:
        """Take in an observation. Returns whether the prompt leaves out something that the one before it showed."""
        self._observations.append(tuple(messages))
        newest = sum(map(_pictures, messages))
        self._ends.append(self._ends[-1] + newest)
        before = self._first, self._first_image
        settings, count = self._settings, len(self._observations)
        if settings.turns is not None and count - self._first > settings.turns:
            self._first = count - settings.kept(settings.turns)
        shown = self.images
        if settings.images is not None and len(shown) > settings.images:
            self._first_image = shown[-max(settings.kept(settings.images), newest)]
        return before != (self._first, self._first_image)

    @property
    def images(self) -> list[int]:
        """The pictures that the prompt shows, counted over the episode, in order."""
        return [image for number in self._shown for image in self._images_of(number) if image >= self._first_image]

    @property
    def replies(self) -> range:
        """The turns whose replies the prompt repeats, counted from 0."""
        return range(0 if self._first == 1 else self._first, len(self._observations) - 1)

    @property
    def messages(self) -> Blocks:
        """What the prompt shows before, between and after these replies."""
        opening, *others = map(self._visible, self._shown)
        return [opening, *others] if self._first == 1 else [_joined(opening, others[0]), *others[1:]]

    @property
    def _shown(self) -> list[int]:
        return [0, *range(self._first, len(self._observations))]

    def _images_of(self, number: int) -> range:
        return range(self._ends[number], self._ends[number + 1])

    def _visible(self, number: int) -> tuple[Message, ...]:
        """An observation with a text in the place of each picture that is left out."""
        left = iter(self._images_of(number))
        return tuple(
            Message(
                message.role,
                tuple(
                    part if isinstance(part, str) or next(left) >= self._first_image else self._settings.omitted
                    for part in message.parts
                ),
                message.fields,
            )
            for message in self._observations[number]
        )


def _pictures(message: Message) -> int:
    return sum(not isinstance(part, str) for part in message.parts)


def _joined(first: Sequence[Message], then: Sequence[Message]) -> list[Message]:
    """Two observations in a row; templates may forbid two messages of one role, so these become one."""
    last, following = first[-1], then[0]
    if last.role != following.role:
        return [*first, *then]
    return [*first[:-1], Message(last.role, (*last.parts, "\n", *following.parts), last.fields), *then[1:]]
