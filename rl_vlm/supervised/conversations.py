"""One conversation of a data set: OpenAI's messages with images, read from a row and checked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from rl_vlm.envs.images import ImageError, check_header, decode, image_bytes
from rl_vlm.envs.rows import BadRowError
from rl_vlm.supervised.thoughts import with_thought
from rl_vlm.types import EncodedImage, Message, Part, Role, UserInputError

IMAGE_MARKER = "<image>"
ROLES: tuple[str, ...] = get_args(Role)
_NO_TOOLS: tuple[Any, ...] = (None, "", "[]", "null", [])  # some data sets keep them as JSON
_IMAGE_KEYS = ("image", "path", "url", "image_url", "bytes")

T = TypeVar("T")


class ConversationError(UserInputError):
    """A row is no conversation to learn from; the message says why, in half a sentence."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages up to the last assistant turn; the first message is never the assistant's.

    turns: (role, parts), where None among the parts stands for the next of `images`. images: as the data set has them, not
    decoded. where: file and line in words. folder: what image paths are relative to; None: paths are refused. has_thoughts: a
    message had `reasoning_content`, which its text now begins with.
    """

    turns: tuple[tuple[Role, tuple[str | None, ...]], ...]
    images: tuple[Any, ...]
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
        for number, image in enumerate(self.images):
            try:
                results.append(use(image_bytes(image, self.folder)))
            except ImageError as error:
                raise BadRowError(f"{self.where}: image {number} {error}.") from error
        return results

    def messages(self, images: Sequence[EncodedImage]) -> list[Message]:
        """The messages with these images in their places."""
        rest = iter(images)
        return [Message(role, tuple(_filled(part, rest) for part in parts)) for role, parts in self.turns]


def _filled(part: str | None, images: Any) -> Part:
    return next(images) if part is None else part


def read_conversation(row: Mapping[str, Any], where: str, folder: Path | None) -> Conversation:
    """The conversation of a row. Raises BadRowError, which begins with `where`.

    `messages` is a list of {role, content}; content is a text or a list of {type: text, text} and {type: image}. An image part
    names its image itself (`image`, a path, bytes or data URI) or takes the next of the row's `images`, as does the marker
    `<image>` in a text. Without any of these the images come first. What follows the last assistant turn is left out.
    `reasoning_content` of the assistant's messages is their thought.
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
    flat = [part for _, parts in turns for part in parts if not isinstance(part, str)]
    if column and not flat:
        first = next(number for number, (role, _) in enumerate(turns) if role != "system")
        turns[first] = (turns[first][0], (*[_Image()] * len(column), *turns[first][1]))
        flat = [_Image()] * len(column)
    open_places = sum(image.value is None for image in flat)
    if open_places != len(column):
        raise ConversationError(f"{open_places} image placeholders in the messages and {len(column)} images")
    rest = iter(column)
    images = [next(rest) if image.value is None else image.value for image in flat]
    kept = tuple(
        (role, tuple(part if isinstance(part, str) else None for part in parts)) for role, parts in turns[: last + 1]
    )
    shown = sum(part is None for _, parts in kept for part in parts)
    has_thoughts = any(message.get("reasoning_content") for message in messages[: last + 1])
    return Conversation(kept, tuple(images[:shown]), where, folder, has_thoughts)


@dataclass(frozen=True, slots=True)
class _Image:
    """The place of an image, with the image where the message names it itself."""

    value: Any = None


def _turn(message: Any, number: int) -> tuple[Role, tuple[str | _Image, ...]]:
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


def _parts(item: Any, name: str, role: str) -> list[str | _Image]:
    kind = item.get("type") if isinstance(item, Mapping) else None
    if kind == "text" and isinstance(item.get("text"), str):
        if role == "assistant":  # what is to be said is never split
            return [item["text"]] if item["text"] else []
        pieces: list[str | _Image] = []
        for number, text in enumerate(item["text"].split(IMAGE_MARKER)):
            pieces += [_Image(), text] if number else [text]
        return [piece for piece in pieces if piece != ""]
    if kind in ("image", "image_url"):
        value = next((item[key] for key in _IMAGE_KEYS if item.get(key) is not None), None)
        if isinstance(value, Mapping) and "url" in value:
            value = value["url"]
        return [_Image(value)]
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
