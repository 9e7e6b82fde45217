"""A conversation in parts, as the page shows it: texts, thoughts, tool calls and pictures."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rl_vlm.envs.tool_forms import ToolCallError
from rl_vlm.envs.tools import parse_tool_call

Answer = dict[str, Any]
_BLOCKS = re.compile(r"(<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)|<tool_call>.*?(?:</tool_call>|\Z))", re.DOTALL)
_THOUGHT = re.compile(r"</?think(?:ing)?>")


def messages_in_parts(
    messages: Sequence[Mapping[str, Any]],
    turns: int,
    size: Callable[[str], tuple[int, int]],
    crops: Mapping[int, Answer],
) -> list[Answer]:
    """The conversation in parts: texts, thoughts, tool calls and pictures."""
    spoken = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    turn_of = {k: turn for turn, k in enumerate(spoken[max(len(spoken) - turns, 0) :])}
    pictures = itertools.count()

    def parts_of(part: Any, role: str) -> Iterator[Answer]:
        if not isinstance(part, str):
            number, (width, height) = next(pictures), size(part["image"])
            yield {"picture": {"sha": part["image"], "width": width, "height": height, "of": crops.get(number)}}
        elif role == "assistant":
            yield from _said(part)
        elif part:
            yield {"text": part}

    return [
        {
            "role": message["role"],
            "parts": [one for part in message["parts"] for one in parts_of(part, message["role"])],
            "turn": turn_of.get(k),
        }
        for k, message in enumerate(messages)
    ]


def _said(text: str) -> Iterator[Answer]:
    """An answer as texts, thoughts and tool calls; everything before a lone `</think>` is a thought."""
    lone = re.match(r"((?:(?!<think).)*?)</think(?:ing)?>", text, re.DOTALL)
    if lone:
        yield {"thought": lone[1]}
        text = text[lone.end() :]
    for block in _BLOCKS.split(text):
        if block.startswith("<think"):
            yield {"thought": _THOUGHT.sub("", block)}
        elif block.startswith("<tool_call>"):
            call = None
            with suppress(ToolCallError):
                call = parse_tool_call(block)
            yield (
                {"text": block}
                if call is None
                else {"call": {"name": call.name, "arguments": call.arguments, "raw": block}}
            )
        elif block:
            yield {"text": block}


def crops_of(info: Mapping[str, Any]) -> dict[int, Answer]:
    """By the number of a picture: which earlier one it shows a part of, as an environment says in `info["crops"]`."""
    crops: dict[int, Answer] = {}
    with suppress(ValueError, KeyError, TypeError):
        for crop in info.get("crops", ()):
            left, top, right, bottom = map(float, crop["box"])
            crops[int(crop["picture"])] = {"picture": int(crop["of"]), "box": [left, top, right, bottom]}
    return crops


def turn_facts(turn: Mapping[str, Any], replica: str) -> Answer:
    return {
        "start": turn["start"],
        "stop": turn["stop"],
        "version": turn["policy_version"],
        "versions": [{"tokens": tokens, "version": version} for tokens, version in turn.get("pieces") or ()],
        "replica": replica,
        "stopReason": turn["stop_reason"],
        "reward": turn["reward"],
        "parts": turn.get("parts") or [],
        "wellFormed": turn.get("well_formed") is not False,
    }
