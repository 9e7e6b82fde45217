"""Chat messages of a row of data, as OpenAI, TRL and most data sets write them: read, checked, and shown images."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from rl_vlm.envs.questions import IMAGE_MARKER
from rl_vlm.envs.rows import BadRowError
from rl_vlm.types import EncodedImage, Message, Role

ROLES: tuple[str, ...] = get_args(Role)
OPEN, CLOSE = "<think>", "</think>"
AFTER = f"\n{CLOSE}\n\n"  # a thought, between it and the answer
_SHAREGPT: dict[Any, str] = {"human": "user", "gpt": "assistant", "observation": "tool"}  # roles under `from`
_IMAGE_KEYS = ("image", "path", "url", "image_url", "bytes")


class Picture(NamedTuple):
    """The place of an image: as the data set has it, not decoded. None: the next of the row's images."""

    value: Any = None


RawTurn = tuple[Role, list[str | Picture]]


def read_turns(messages: Iterable[Any]) -> list[RawTurn]:
    """Role and parts of each message. Raises BadRowError."""
    return [_turn(message, number) for number, message in enumerate(messages)]


def with_images(
    turns: Sequence[RawTurn], images: Sequence[Any], decode: Callable[[Any], EncodedImage]
) -> list[Message]:
    """The messages, in which `images` take their places in order, or stand first where there are no places. Raises
    BadRowError."""
    pictures = [part for _, parts in turns for part in parts if isinstance(part, Picture)]
    if not pictures:
        pictures = [Picture()] * len(images)
        turns[1 if turns[0][0] == "system" else 0][1][:0] = pictures
    places = sum(picture.value is None for picture in pictures)
    if places != len(images):
        raise BadRowError(f"{places} image placeholders in the messages and {len(images)} images.")
    rest = iter(images)

    def shown(part: str | Picture) -> str | EncodedImage:
        if isinstance(part, str):
            return part
        return decode(next(rest) if part.value is None else part.value)

    return [Message(role, tuple(map(shown, parts))) for role, parts in turns]


def _turn(message: Any, number: int) -> tuple[Role, list[str | Picture]]:
    name = f"message {number}"
    if not isinstance(message, Mapping):
        raise BadRowError(f"{name} is a {type(message).__name__} and not {{role, content}} or {{from, value}}.")
    role, content = message.get("role"), message.get("content")
    if role is None and content is None and isinstance(message.get("from"), str):
        role, content = _SHAREGPT.get(message["from"], message["from"]), message.get("value")
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
        parts = ["".join((f"{OPEN}\n", thought.strip("\n"), AFTER, *map(str, parts)))]
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


def check_order(roles: Sequence[Role]) -> None:
    if next((role for role in roles if role != "system"), "assistant") == "assistant":
        raise BadRowError("it begins with the assistant: a message that is answered must come first.")
    if "system" in roles[1:]:
        raise BadRowError("a system message comes after another message: only the first may be one.")
    for number, pair in enumerate(itertools.pairwise(roles)):
        if pair == ("assistant", "assistant"):
            raise BadRowError(f"messages {number} and {number + 1} are both the assistant's: join them.")
