"""Lets a person play an environment in the terminal, with its pictures drawn in characters."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import typer
from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from rl_vlm.envs.errors import check_reset, check_step
from rl_vlm.envs.registry import make
from rl_vlm.safe_text import printable
from rl_vlm.types import EncodedImage, Observation, Split, as_rgb


def half_blocks(image: Image.Image, columns: int, rows: int) -> Text:
    """The image in at most `columns` × `rows` characters, its sides in proportion.

    It is made larger by whole factors only.
    """
    limit = min(columns / image.width, 2 * rows / image.height)
    scale = limit if limit < 1 else int(limit)
    width = max(1, round(image.width * scale))
    height = max(2, 2 * round(image.height * scale / 2))  # a character holds two
    method = Image.Resampling.BOX if scale < 1 else Image.Resampling.NEAREST
    pixels = as_rgb(image).resize((width, height), method).load()
    assert pixels is not None
    text = Text()
    for row in range(0, height, 2):
        for column in range(width):
            above, below = (Color.from_rgb(*pixels[column, row + half]) for half in (0, 1))  # type: ignore[misc]
            text.append("▀", Style(color=above, bgcolor=below))
        text.append("\n")
    return text


# Lets a person play an environment in the terminal.

_MAX_ROWS = 32  # characters of a picture's height
_SHOWN = 400  # characters of the info


def play_episode(
    env_id: str,
    kwargs: dict[str, Any],
    *,
    split: Split,
    index: int | None,
    seed: int | None,
    picture: str,
    console: Console | None = None,
) -> float:
    """Show what the environment says and ask for answers until the episode ends; return the sum of rewards."""
    console = console or Console(highlight=False)
    env = make(env_id, **kwargs)
    total = 0.0
    try:
        options: dict[str, Any] = {"split": split} | ({} if index is None else {"index": index})
        observation, info = check_reset(env.reset(seed=seed, options=options))
        _say(console, Text(_shorten(info), style="dim"))
        while True:
            _show(console, observation, picture)
            try:
                answer = input("> ")
            except EOFError:
                answer = ""
            if not answer:
                break
            observation, reward, terminated, truncated, info = check_step(env.step(answer))
            total += reward
            _say(console, Text(f"reward {reward:g}  {_shorten(info)}", style="dim"))
            if terminated or truncated:
                _show(console, observation, picture)
                _say(console, Text(f"{'The end' if terminated else 'Cut off'}: {total:g} in all.", style="bold"))
                break
    finally:
        env.close()
    return total


def _show(console: Console, observation: Observation, picture: str) -> None:
    for message in observation.messages:
        _say(console, Text(f"[{message.role}]", style="bold cyan"))
        for part in message.parts:
            if isinstance(part, str):
                _say(console, Text(printable(part)))
            else:
                _draw(console, part, picture)


def _draw(console: Console, part: Image.Image | EncodedImage, picture: str) -> None:
    image = part.to_pil() if isinstance(part, EncodedImage) else part
    if picture == "blocks" and console.is_terminal and console.color_system is not None:
        rows = min(_MAX_ROWS, max(4, console.height - 6))
        console.print(half_blocks(image, console.width, rows), end="")
        return
    said = f"image of {image.width}x{image.height} pixels"
    if picture != "none":  # no colours here, or asked for
        with tempfile.NamedTemporaryFile(prefix="rl-vlm-play-", suffix=".png", delete=False) as file:
            as_rgb(image).save(file, format="PNG")
        said += f" in {file.name}"
        if picture == "open":
            typer.launch(str(Path(file.name)))
    _say(console, Text(f"({said})", style="dim"))


def _say(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True)


def _shorten(info: dict[str, Any]) -> str:
    text = json.dumps(info, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
