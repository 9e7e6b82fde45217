"""Conversations: read from a row and checked, and encoded as the trajectories that reinforcement learning trains on."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from rl_vlm.chat import EncodedSpan
from rl_vlm.envs.data import IMAGE_MARKER, BadRowError, Row, Schema
from rl_vlm.learning.batching import count_images
from rl_vlm.models.images import TextSide
from rl_vlm.types import EncodedImage, Message, Role, StopReason, Trajectory, TrajectoryStatus, Turn, UserInputError

ROLES: tuple[str, ...] = get_args(Role)
_NO_TOOLS: tuple[Any, ...] = (None, "", "[]", "null", [])  # some data sets keep them as JSON
_IMAGE_KEYS = ("image", "path", "url", "image_url", "bytes")


class Picture(NamedTuple):
    """The place of an image: as the data set has it, not decoded. None: the next of the row's `images`."""

    value: Any = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages up to the last assistant turn. where: file and line. has_thoughts: a message had `reasoning_content`."""

    messages: list[Message]
    where: str
    has_thoughts: bool = False


def read_conversation(row: Row) -> Conversation:
    """The conversation of a row, as docs/fine_tuning.md describes it. Raises BadRowError."""
    messages = row.cells.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRowError("`messages` is missing, empty or not a list.")
    if row.cells.get("tools") not in _NO_TOOLS:
        raise BadRowError("it has tools: write what they are into the system message, as the model is to be told.")
    column = row.cells.get("images", row.cells.get("file_names", row.cells.get("file_name")))
    column = column if isinstance(column, list) else [] if column is None else [column]
    turns = [_turn(message, number) for number, message in enumerate(messages)]
    last = max((number for number, (role, _) in enumerate(turns) if role == "assistant"), default=-1)
    if last < 0:
        raise BadRowError("no message is the assistant's, so there is nothing to learn.")
    _check_order([role for role, _ in turns[: last + 1]])
    pictures = [part for _, parts in turns for part in parts if isinstance(part, Picture)]
    if not pictures:
        pictures = [Picture()] * len(column)
        turns[1 if turns[0][0] == "system" else 0][1][:0] = pictures
    places = sum(picture.value is None for picture in pictures)
    if places != len(column):
        raise BadRowError(f"{places} image placeholders in the messages and {len(column)} images.")
    rest = iter(column)

    def shown(part: str | Picture) -> str | EncodedImage:
        if isinstance(part, str):
            return part
        return row.image(next(rest) if part.value is None else part.value)

    return Conversation(
        [Message(role, tuple(map(shown, parts))) for role, parts in turns[: last + 1]],
        row.where,
        any(message.get("reasoning_content") for message in messages[: last + 1]),
    )


CONVERSATIONS = Schema(read_conversation, ("messages",), ("images", "tools"))


def _turn(message: Any, number: int) -> tuple[Role, list[str | Picture]]:
    name = f"message {number}"
    if not isinstance(message, Mapping):
        raise BadRowError(f"{name} is a {type(message).__name__} and not {{role, content}}.")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise BadRowError(f"{name} has the role {role!r}; roles are {', '.join(ROLES)}.")
    if message.get("tool_calls"):
        raise BadRowError(f"{name} has tool_calls: write the call into its content, as the model is to write it.")
    items = content if isinstance(content, list) else [{"type": "text", "text": content}]
    parts = [part for item in items for part in _parts(item, name, role)]
    if role == "assistant" and not all(isinstance(part, str) for part in parts):
        raise BadRowError(f"{name} is the assistant's and holds an image: a model answers in text.")
    if not parts:
        raise BadRowError(f"{name} is empty.")
    if thought := message.get("reasoning_content"):
        if role != "assistant" or not isinstance(thought, str):
            raise BadRowError(f"{name} has a reasoning_content that is no text of the assistant.")
        parts = ["".join((f"{_OPEN}\n", thought.strip("\n"), _AFTER, *map(str, parts)))]
    return role, parts


def _parts(item: Any, name: str, role: str) -> list[str | Picture]:
    kind = item.get("type") if isinstance(item, Mapping) else None
    if kind == "text" and isinstance(item.get("text"), str):
        # What the assistant is to say is never split.
        texts = [item["text"]] if role == "assistant" else item["text"].split(IMAGE_MARKER)
        pieces = [piece for text in texts for piece in (Picture(), text)][1:]
        return [piece for piece in pieces if piece != ""]
    if kind in ("image", "image_url"):
        value = next((item[key] for key in _IMAGE_KEYS if item.get(key) is not None), None)
        return [Picture(value["url"] if isinstance(value, Mapping) and "url" in value else value)]
    raise BadRowError(f"{name} has a part that is neither {{type: text, text}} nor {{type: image}}.")


def _check_order(roles: Sequence[Role]) -> None:
    if next((role for role in roles if role != "system"), "assistant") == "assistant":
        raise BadRowError("it begins with the assistant: a message that is answered must come first.")
    if "system" in roles[1:]:
        raise BadRowError("a system message comes after another message: only the first may be one.")
    for number, pair in enumerate(itertools.pairwise(roles)):
        if pair == ("assistant", "assistant"):
            raise BadRowError(f"messages {number} and {number + 1} are both the assistant's: join them.")


_OPEN, _CLOSE = "<think>", "</think>"
_AFTER = f"\n{_CLOSE}\n\n"  # a thought, between it and the answer


def after_opened_thought(text: str) -> tuple[str, str]:
    """How a turn goes on after a prompt that opens a thought: (what is given, what is said). Raises UserInputError."""
    before, closed, answer = text.partition(_CLOSE)
    if not closed:
        if text.lstrip().startswith(_OPEN):
            raise UserInputError(f"an answer opens a thought ({_OPEN}) that it does not end ({_CLOSE}).")
        return _AFTER, text.lstrip("\n")
    outside, _, thought = before.rpartition(_OPEN)
    if outside.strip():
        raise UserInputError(f"an answer has text before its thought ({_OPEN}): the model's thought comes first.")
    thought, answer = thought.strip("\n"), answer.lstrip("\n")
    return ("", thought + _AFTER + answer) if thought else (_AFTER, answer)


TooLong = Literal["leave_out", "truncate"]


class ConversationEncoder:
    """Encodes conversations span by span, as rollouts are; assistant turns are learned with their end-of-turn."""

    def __init__(self, text: TextSide, max_length: int, too_long: TooLong = "leave_out") -> None:
        self._text, self._max_length, self._too_long = text, max_length, too_long

    def length(self, conversation: Conversation) -> int | None:
        """Tokens, for which sizes of images are enough; None: it is left out. Raises BadRowError."""
        trajectory = self._trajectory(conversation)
        return None if trajectory is None else len(trajectory)

    def encode(self, conversation: Conversation) -> Trajectory:
        trajectory = self._trajectory(conversation)
        if trajectory is None:
            raise BadRowError(f"{conversation.where}: longer than sft.max_length ({self._max_length}).")
        return trajectory

    def _spans(self, conversation: Conversation) -> list[tuple[EncodedSpan, bool]]:
        """The conversation in order: what is given, and what the model says (True), by turns."""
        codec = self._text.codec
        if conversation.has_thoughts and not codec.opens_thought:
            raise BadRowError(
                f"{conversation.where}: a message has reasoning_content, and the model's template opens no thought: "
                "write it into the content, as the model is to write it."
            )
        spans: list[tuple[EncodedSpan, bool]] = []
        try:
            for said, group in groupby(conversation.messages, key=lambda message: message.role == "assistant"):
                messages: list[Message] = list(group)
                if said:
                    given, reply = "", messages[0].text
                    if codec.opens_thought:
                        given, reply = after_opened_thought(reply)
                    if given:
                        spans.append((EncodedSpan(codec.encode_text(given), ()), False))
                    ids = np.append(codec.encode_text(reply), codec.end_of_turn_id).astype(np.int32)
                    spans.append((EncodedSpan(ids, ()), True))
                elif spans:
                    spans.append((codec.encode_continuation(messages, ended=True), False))
                else:
                    spans.append((codec.encode_prompt(messages), False))
        except UserInputError as error:
            raise BadRowError(f"{conversation.where}: {error}") from error
        return spans

    def _trajectory(self, conversation: Conversation) -> Trajectory | None:
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
            # Up to the last token that is said and fits: no image is cut, and nothing is shown that nobody answers.
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
