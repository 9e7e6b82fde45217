"""Conversations: read from a row and checked, and encoded as the trajectories that reinforcement learning trains on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from rl_vlm.chat import EncodedSpan, expand_image_tokens
from rl_vlm.envs.data import BadRowError
from rl_vlm.envs.images import ImageError, check_header, decode, image_bytes
from rl_vlm.models.loading import TextSide
from rl_vlm.types import (
    EncodedImage,
    Message,
    Role,
    StopReason,
    Trajectory,
    TrajectoryStatus,
    Turn,
    UserInputError,
)

IMAGE_MARKER = "<image>"
ROLES: tuple[str, ...] = get_args(Role)
_NO_TOOLS: tuple[Any, ...] = (None, "", "[]", "null", [])  # some data sets keep them as JSON
_IMAGE_KEYS = ("image", "path", "url", "image_url", "bytes")

T = TypeVar("T")


class ConversationError(UserInputError):
    """A row is no conversation to learn from; the message says why, in half a sentence."""


@dataclass(frozen=True, slots=True)
class Picture:
    """The place of an image: as the data set has it, not decoded. None: the next of the row's `images`."""

    value: Any = None


Turns = list[tuple[Role, tuple[str | Picture, ...]]]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages (role, parts) up to the last assistant turn; the first message is never the assistant's.

    where: file and line in words. folder: what image paths are relative to; None: paths are refused. has_thoughts: a
    message had `reasoning_content`, which its text now begins with.
    """

    turns: Turns
    where: str
    folder: Path | None
    has_thoughts: bool = False

    def sizes(self) -> list[tuple[int, int]]:
        """Width and height of each image, from its header. Raises BadRowError."""
        return self._each(lambda data: check_header(data))

    def decoded(self) -> list[EncodedImage]:
        """The images. Raises BadRowError for one that is missing, damaged or too large."""
        return self._each(lambda data: decode(data))

    def _each(self, use: Callable[[bytes], T]) -> list[T]:
        results = []
        for number, picture in enumerate(_pictures(self.turns)):
            try:
                results.append(use(image_bytes(picture.value, self.folder)))
            except ImageError as error:
                raise BadRowError(f"{self.where}: image {number} {error}.") from error
        return results

    def messages(self, images: Sequence[EncodedImage]) -> list[Message]:
        """The messages with these images in their places."""
        return [Message(role, parts) for role, parts in _filled(self.turns, images)]


def _pictures(turns: Turns) -> list[Picture]:
    return [part for _, parts in turns for part in parts if isinstance(part, Picture)]


def _filled(turns: Turns, images: Iterable[T]) -> list[tuple[Role, tuple[str | T, ...]]]:
    """The turns with these images in place of the pictures."""
    rest = iter(images)
    return [(role, tuple(next(rest) if isinstance(part, Picture) else part for part in parts)) for role, parts in turns]


def read_conversation(row: Mapping[str, Any], where: str, folder: Path | None) -> Conversation:
    """The conversation of a row. Raises BadRowError, which begins with `where`.

    `messages` is a list of {role, content}; content is a text or a list of {type: text, text} and {type: image}. An
    image part names its image itself (`image`, a path, bytes or data URI) or takes the next of the row's `images`, as
    does the marker `<image>` in a text. Without any of these the images come first. What follows the last assistant
    turn is left out. `reasoning_content` of the assistant's messages is their thought.
    """
    try:
        return _read(row, where, folder)
    except ConversationError as error:
        raise BadRowError(f"{where}: {error}.") from error


def _read(row: Mapping[str, Any], where: str, folder: Path | None) -> Conversation:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ConversationError("`messages` is missing, empty or not a list")
    if row.get("tools") not in _NO_TOOLS:
        raise ConversationError("it has tools: write what they are into the system message, as the model is to be told")
    column = row.get("images", row.get("file_names", row.get("file_name")))
    column = column if isinstance(column, list) else [] if column is None else [column]
    turns = [_turn(message, number) for number, message in enumerate(messages)]
    last = max((number for number, (role, _) in enumerate(turns) if role == "assistant"), default=-1)
    if last < 0:
        raise ConversationError("no message is the assistant's, so there is nothing to learn")
    _check_order(turns[: last + 1])
    if column and not _pictures(turns):
        first = next(number for number, (role, _) in enumerate(turns) if role != "system")
        turns[first] = (turns[first][0], (*[Picture()] * len(column), *turns[first][1]))
    pictures = _pictures(turns)
    places = sum(picture.value is None for picture in pictures)
    if places != len(column):
        raise ConversationError(f"{places} image placeholders in the messages and {len(column)} images")
    rest = iter(column)
    named = [Picture(next(rest)) if picture.value is None else picture for picture in pictures]
    has_thoughts = any(message.get("reasoning_content") for message in messages[: last + 1])
    return Conversation(_filled(turns, named)[: last + 1], where, folder, has_thoughts)


def _turn(message: Any, number: int) -> tuple[Role, tuple[str | Picture, ...]]:
    name = f"message {number}"
    if not isinstance(message, Mapping):
        raise ConversationError(f"{name} is a {type(message).__name__} and not {{role, content}}")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ConversationError(f"{name} has the role {role!r}; roles are {', '.join(ROLES)}")
    if message.get("tool_calls"):
        raise ConversationError(f"{name} has tool_calls: write the call into its content, as the model is to write it")
    items = content if isinstance(content, list) else [{"type": "text", "text": content}]
    parts = [part for item in items for part in _parts(item, name, role)]
    if role == "assistant" and not all(isinstance(part, str) for part in parts):
        raise ConversationError(f"{name} is the assistant's and holds an image: a model answers in text")
    if not parts:
        raise ConversationError(f"{name} is empty")
    if thought := message.get("reasoning_content"):
        if role != "assistant" or not isinstance(thought, str):
            raise ConversationError(f"{name} has a reasoning_content that is no text of the assistant")
        parts = [with_thought(thought, "".join(part for part in parts if isinstance(part, str)))]
    return role, tuple(parts)


def _parts(item: Any, name: str, role: str) -> list[str | Picture]:
    kind = item.get("type") if isinstance(item, Mapping) else None
    if kind == "text" and isinstance(item.get("text"), str):
        if role == "assistant":  # what is to be said is never split
            return [item["text"]] if item["text"] else []
        pieces: list[str | Picture] = []
        for number, text in enumerate(item["text"].split(IMAGE_MARKER)):
            pieces += [Picture(), text] if number else [text]
        return [piece for piece in pieces if piece != ""]
    if kind in ("image", "image_url"):
        value = next((item[key] for key in _IMAGE_KEYS if item.get(key) is not None), None)
        if isinstance(value, Mapping) and "url" in value:
            value = value["url"]
        return [Picture(value)]
    raise ConversationError(f"{name} has a part that is neither {{type: text, text}} nor {{type: image}}")


def _check_order(turns: Sequence[tuple[Role, Any]]) -> None:
    roles = [role for role, _ in turns]
    if next((role for role in roles if role != "system"), "assistant") == "assistant":
        raise ConversationError("it begins with the assistant: a message that is answered must come first")
    if "system" in roles[1:]:
        raise ConversationError("a system message comes after another message: only the first may be one")
    for number, pair in enumerate(itertools.pairwise(roles)):
        if pair == ("assistant", "assistant"):
            raise ConversationError(f"messages {number} and {number + 1} are both the assistant's: join them")


_OPEN, _CLOSE = "<think>", "</think>"
_AFTER = f"\n{_CLOSE}\n\n"  # a thought, between it and the answer


def with_thought(thought: str, answer: str) -> str:
    """One text of both, as a template without thoughts would leave it."""
    thought = thought.strip("\n")
    return f"{_OPEN}\n{thought}{_AFTER}{answer}"


def after_opened_thought(text: str) -> tuple[str, str]:
    """How a turn goes on after a prompt that opens a thought: (what is given, what is said).

    An answer without a thought is given the end of an empty one. Raises UserInputError for a thought that does not end,
    or does not come first.
    """
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


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the last assistant turn answers: token ids int32 [P] with one placeholder per image, and the images.

    reply: that turn, as the model is to write it.
    """

    token_ids: np.ndarray
    images: tuple[EncodedImage, ...]
    reply: str


class ConversationEncoder:
    """Encodes conversations for one model, span by span as rollouts are encoded.

    Every assistant turn, its end-of-turn token included, is what the loss is taken of. Where the model's template opens
    a thought, the turn goes on with its own, or the end of an empty one is given; thoughts of earlier turns stay, as in
    rollouts.

    Args:
        text: the model's codec and image geometry.
        max_length: tokens of a conversation, images included.
        too_long: see `sft.too_long`.
    """

    def __init__(self, text: TextSide, max_length: int, too_long: TooLong = "leave_out") -> None:
        self._text = text
        self._max_length = max_length
        self._too_long = too_long

    def length(self, conversation: Conversation) -> int | None:
        """Tokens that are trained on or shown, read from headers of images alone; None: the conversation is left out.

        Raises BadRowError.
        """
        # The number of an image's tokens is the same when a camera's rotation exchanges width and height.
        images = [EncodedImage("", b"", width, height) for width, height in conversation.sizes()]
        trajectory = self._trajectory(conversation, images)
        return None if trajectory is None else len(trajectory)

    def encode(self, conversation: Conversation) -> Trajectory:
        """The conversation with its images, decoded. Raises BadRowError."""
        trajectory = self._trajectory(conversation, conversation.decoded())
        if trajectory is None:
            raise BadRowError(f"{conversation.where}: longer than sft.max_length ({self._max_length}).")
        return trajectory

    def prompt(self, conversation: Conversation) -> Prompt:
        """Everything before the last assistant turn. Raises BadRowError."""
        *spans, (reply, _) = self._spans(conversation, conversation.decoded())
        return Prompt(
            np.concatenate([span.token_ids for span, _ in spans]),
            tuple(image for span, _ in spans for image in span.images),
            self._text.codec.decode(reply.token_ids),
        )

    def _spans(self, conversation: Conversation, images: Sequence[EncodedImage]) -> list[tuple[EncodedSpan, bool]]:
        """The conversation in order: what is given, and what the model says (True), by turns."""
        codec = self._text.codec
        if conversation.has_thoughts and not codec.opens_thought:
            raise BadRowError(
                f"{conversation.where}: a message has reasoning_content, and the model's template opens no thought: "
                "write it into the content, as the model is to write it."
            )
        spans: list[tuple[EncodedSpan, bool]] = []
        try:
            for said, group in groupby(conversation.messages(images), key=lambda message: message.role == "assistant"):
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

    def _trajectory(self, conversation: Conversation, images: Sequence[EncodedImage]) -> Trajectory | None:
        """The whole conversation, or as much of it as fits; None: it is left out."""
        ids: list[np.ndarray] = []
        said: list[np.ndarray] = []
        shown: list[EncodedImage] = []
        length = 0
        for span, is_reply in self._spans(conversation, images):
            expanded = self._expanded(span, conversation)
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
            shown = shown[: self._count_images(token_ids, shown)]
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

    def _expanded(self, span: EncodedSpan, conversation: Conversation) -> np.ndarray:
        try:
            counts = [self._text.images.count_tokens(image.width, image.height) for image in span.images]
            return expand_image_tokens(span.token_ids, self._text.codec.image_token_id, counts)
        except UserInputError as error:  # an image of a shape that the model cannot be shown
            raise BadRowError(f"{conversation.where}: {error}") from error

    def _count_images(self, token_ids: np.ndarray, images: Sequence[EncodedImage]) -> int:
        """How many of the images have their placeholders in these ids."""
        rest = int((token_ids == self._text.codec.image_token_id).sum())
        ends = np.cumsum([self._text.images.count_tokens(image.width, image.height) for image in images])
        return int(np.searchsorted(ends, rest, side="right"))
