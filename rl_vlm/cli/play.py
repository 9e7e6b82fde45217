"""Lets a person play an environment in the terminal, with its pictures drawn in characters."""

from __future__ import annotations

import json
import tempfile
from contextlib import closing
from typing import Any

import numpy as np
from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from rl_vlm.envs.errors import check_reset, check_step
from rl_vlm.envs.registry import make
from rl_vlm.safe_text import printable
from rl_vlm.types import Observation, Split, as_encoded, as_rgb

_MAX_ROWS = 32  # characters of a picture's height
_SHOWN = 400  # characters of the info


def half_blocks(image: Image.Image, columns: int, rows: int) -> Text:
    """The image in at most `columns` × `rows` characters, its sides in proportion; enlarged by whole factors only."""
    limit = min(columns / image.width, 2 * rows / image.height)
    scale = limit if limit < 1 else int(limit)
    size = max(1, round(image.width * scale)), max(2, 2 * round(image.height * scale / 2))  # a character holds two rows
    method = Image.Resampling.BOX if scale < 1 else Image.Resampling.NEAREST
    pixels = np.asarray(as_rgb(image).resize(size, method)).tolist()
    text = Text()
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=True):
        for above, below in zip(upper, lower, strict=True):
            text.append("▀", Style(color=Color.from_rgb(*above), bgcolor=Color.from_rgb(*below)))
        text.append("\n")
    return text


def play_episode(
    env_id: str,
    kwargs: dict[str, Any],
    *,
    split: Split,
    index: int | None,
    seed: int | None,
    console: Console | None = None,
) -> float:
    """Show what the environment says and ask for answers until the episode ends; return the sum of rewards."""
    console = console or Console(highlight=False)
    total, ended = 0.0, ""
    with closing(make(env_id, **kwargs)) as env:
        options: dict[str, Any] = {"split": split} | ({} if index is None else {"index": index})
        observation, info = check_reset(env.reset(seed=seed, options=options))
        _say(console, _shorten(info), "dim")
        _show(console, observation)
        while not ended:
            try:
                answer = input("> ")
            except (EOFError, RuntimeError):  # standard input has ended, or is closed
                answer = ""
            if not answer:
                break
            observation, reward, terminated, truncated, info = check_step(env.step(answer))
            total += reward
            _say(console, f"reward {reward:g}  {_shorten(info)}", "dim")
            _show(console, observation)
            ended = "The end" if terminated else "Cut off" if truncated else ""
    if ended:
        _say(console, f"{ended}: {total:g} in all.", "bold")
    return total


def _show(console: Console, observation: Observation) -> None:
    for message in observation.messages:
        _say(console, f"[{message.role}]", "bold cyan")
        for part in message.parts:
            if isinstance(part, str):
                _say(console, part)
                continue
            image = as_encoded(part)
            if console.is_terminal and console.color_system is not None:
                rows = min(_MAX_ROWS, max(4, console.height - 6))
                console.print(half_blocks(image.to_pil(), console.width, rows), end="")
            else:
                with tempfile.NamedTemporaryFile(prefix="rl-vlm-play-", suffix=".png", delete=False) as file:
                    file.write(image.png)
                _say(console, f"(image of {image.width}x{image.height} pixels in {file.name})", "dim")


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(printable(text), style), soft_wrap=True)


def _shorten(info: dict[str, Any]) -> str:
    text = json.dumps(info, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
