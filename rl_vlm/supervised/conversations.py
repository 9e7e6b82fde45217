"""Conversations: read from a row and checked, and encoded as the trajectories that reinforcement learning trains on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from rl_vlm.chat import EncodedSpan
from rl_vlm.envs.data import Row, Schema, as_list
from rl_vlm.envs.messages import AFTER, CLOSE, OPEN, RawTurn, check_order, read_turns, with_images
from rl_vlm.envs.rows import BadRowError
from rl_vlm.learning.batching import count_images
from rl_vlm.models.images import TextSide
from rl_vlm.types import EncodedImage, Message, StopReason, Trajectory, TrajectoryStatus, Turn, UserInputError

TooLong = Literal["leave_out", "truncate"]
_NO_TOOLS: tuple[Any, ...] = (None, "", "[]", "null", [])  # some data sets keep them as JSON


_IMAGES = ("images", "image", "file_names", "file_name")
_TRAINED = ("weight", "loss", "loss_mask", "trainable", "train", "training")  # keys that say it by a truth value
_ABOUT_LOSS = re.compile("weight|loss|mask|train|learn", re.IGNORECASE)
_FLAG = TypeAdapter(bool)


@dataclass(frozen=True, slots=True)
class SFTConversation:
    """Messages up to the last one that is learned. where: file and line. has_thoughts: a message had
    `reasoning_content`. excluded: numbers of the assistant's messages that are shown and not learned."""

    messages: list[Message]
    where: str
    has_thoughts: bool = False
    excluded: frozenset[int] = frozenset()


FORM = (
    "`rl-vlm sft-example FOLDER` writes the form; a table of questions and answers is for `rl-vlm train qa_tiny "
    "env.data=FILE`."
)


def read_conversation(row: Row) -> SFTConversation:
    """The conversation of a row, as docs/fine_tuning.md describes it. Raises BadRowError."""
    cells = {name: cell for name, cell in row.cells.items() if cell is not None}
    messages = cells.get("messages", cells.get("conversations"))
    if not isinstance(messages, list) or not messages:
        raise BadRowError(f"`messages` is missing, empty or not a list: {FORM}")
    if cells.get("tools") not in _NO_TOOLS:
        raise BadRowError("it has tools: describe them in the system message, as the model is to see them.")
    if _trained({name: cells[name] for name in _TRAINED if name in cells}, "the row") is False:
        raise BadRowError("it is excluded as a whole, so there is nothing to learn: leave it out.")
    turns = read_turns(messages)
    said = [number for number, (role, _) in enumerate(turns) if role == "assistant"]
    learned = _learned(messages, turns)
    if not learned:
        reason = "every message of the assistant is excluded" if said else "no message is the assistant's"
        raise BadRowError(f"{reason}, so there is nothing to learn.")
    count = learned[-1] + 1
    check_order([role for role, _ in turns[:count]])
    images = next((cells[name] for name in _IMAGES if name in cells), None)
    return SFTConversation(
        with_images(turns, as_list(images), row.image)[:count],
        row.where,
        any(message.get("reasoning_content") for message in messages[:count]),
        frozenset(said).difference(learned),
    )


def _learned(messages: list[Any], turns: list[RawTurn]) -> list[int]:
    """The numbers of the assistant's messages that the data do not exclude. Raises BadRowError."""
    learned = []
    for number, (message, (role, _)) in enumerate(zip(messages, turns, strict=True)):
        trained = _trained(message, f"message {number}")
        if trained and role != "assistant":
            keys = ", ".join(key for key in message if key in _TRAINED)
            raise BadRowError(f"message {number} is the {role}'s and has {keys}: only the assistant's are trained on.")
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            if key := next((key for key, value in part.items() if value is not None and _ABOUT_LOSS.search(key)), None):
                raise BadRowError(f"message {number} has a part with {key}: only a whole message can be excluded.")
        if role == "assistant" and trained is not False:
            learned.append(number)
    return learned


def _trained(content: Mapping[str, Any], name: str) -> bool | None:
    """Whether the keys of a message say that it is trained on; None where they do not say. Raises BadRowError."""
    said = {key: value for key, value in content.items() if value is not None and _ABOUT_LOSS.search(key)}
    try:
        flags = {_FLAG.validate_python(value) if key in _TRAINED else None for key, value in said.items()}
    except ValidationError:
        flags = {None}
    if None in flags or len(flags) > 1:
        keys = ", ".join(f"{key}: {str(value)[:40]}" for key, value in said.items())
        raise BadRowError(f"{name} has {keys}, which cannot be followed: write weight: 0 to exclude it, or weight: 1.")
    return next(iter(flags), None)


CONVERSATIONS = Schema(read_conversation, (), ("messages", "conversations", "tools", *_IMAGES, *_TRAINED))


def after_opened_thought(text: str) -> tuple[str, str]:
    """How a turn goes on after a prompt that opens a thought: (given text, the model's text). Raises UserInputError."""
    before, closed, answer = text.partition(CLOSE)
    if not closed:
        if text.lstrip().startswith(OPEN):
            raise UserInputError(f"an answer opens a thought ({OPEN}) that it does not end ({CLOSE}).")
        return AFTER, text.lstrip("\n")
    outside, _, thought = before.rpartition(OPEN)
    if outside.strip():
        raise UserInputError(f"an answer has text before its thought ({OPEN}): the model's thought comes first.")
    thought, answer = thought.strip("\n"), answer.lstrip("\n")
    return ("", thought + AFTER + answer) if thought else (AFTER, answer)


class ConversationEncoder:
    """Encodes conversations span by span, as rollouts are; assistant turns are learned with their end-of-turn."""

    def __init__(self, text: TextSide, max_length: int, too_long: TooLong = "leave_out") -> None:
        self._text, self._max_length, self._too_long = text, max_length, too_long

    def length(self, conversation: SFTConversation) -> int | None:
        """Tokens, for which sizes of images are enough; None: it is left out. Raises BadRowError."""
        trajectory = self._trajectory(conversation)
        return None if trajectory is None else len(trajectory)

    def encode(self, conversation: SFTConversation) -> Trajectory:
        trajectory = self._trajectory(conversation)
        if trajectory is None:
            raise BadRowError(f"{conversation.where}: longer than sft.max_length ({self._max_length}).")
        return trajectory

    def _spans(self, conversation: SFTConversation) -> list[tuple[EncodedSpan, bool]]:
        """The conversation in order: what is given, and what the model learns to say (True), by turns."""
        codec = self._text.codec
        if conversation.has_thoughts and not codec.opens_thought:
            raise BadRowError(
                f"{conversation.where}: a message has reasoning_content, and the model's template opens no thought: "
                "write it into the content, as the model is to write it."
            )
        spans: list[tuple[EncodedSpan, bool]] = []
        try:
            numbered = enumerate(conversation.messages)
            for said, group in groupby(numbered, key=lambda pair: pair[1].role == "assistant"):
                numbers, messages = zip(*group, strict=True)
                if said:
                    given, reply = "", messages[0].text
                    if codec.opens_thought:
                        given, reply = after_opened_thought(reply)
                    if given:
                        spans.append((EncodedSpan(codec.encode_text(given), ()), False))
                    ids = np.append(codec.encode_text(reply), codec.end_of_turn_id).astype(np.int32)
                    spans.append((EncodedSpan(ids, ()), numbers[0] not in conversation.excluded))
                elif spans:
                    spans.append((codec.encode_continuation(messages, ended=True), False))
                else:
                    spans.append((codec.encode_prompt(messages), False))
        except UserInputError as error:
            raise BadRowError(f"{conversation.where}: {error}") from error
        return spans

    def _trajectory(self, conversation: SFTConversation) -> Trajectory | None:
        """The whole conversation, or as much of it as fits; None: it is left out."""
        ids: list[np.ndarray] = []
        said: list[np.ndarray] = []
        shown: list[EncodedImage] = []
        length = 0
        for span, is_reply in self._spans(conversation):
            try:
                expanded = self._text.expand(span.token_ids, span.images)
            except UserInputError as error:  # an image of a shape that the model cannot be shown
                raise BadRowError(f"{conversation.where}: {error}") from error
            ids.append(expanded)
            said.append(np.full(len(expanded), is_reply))
            if length < self._max_length:
                shown.extend(span.images)
            length += len(expanded)
        token_ids, mask = np.concatenate(ids), np.concatenate(said)
        if length > self._max_length:
            if self._too_long == "leave_out" or not mask[: self._max_length].any():
                return None
            # Up to the model's last token that fits: no image is cut, and no message is left without an answer.
            stop = int(np.flatnonzero(mask[: self._max_length])[-1]) + 1
            token_ids, mask = token_ids[:stop], mask[:stop]
            shown = shown[: count_images(token_ids, shown, self._text.images)]
        changes = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
        return Trajectory(
            trajectory_id=conversation.where,
            token_ids=token_ids,
            loss_mask=mask,
            logprobs=np.zeros(len(token_ids), dtype=np.float32),
            turns=tuple(Turn(int(start), int(stop), 0, StopReason.END_OF_TURN) for start, stop in changes),
            status=TrajectoryStatus.COMPLETED,
            images=tuple(shown),
        )
