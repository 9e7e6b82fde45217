"""Prints conversations with their pictures: as pixels (kitty, sixel) or half blocks where the terminal can."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable

from PIL import Image
from rich.console import Console
from rich.text import Text

from rl_vlm.safe_text import printable
from rl_vlm.types import EncodedImage, Message, as_encoded

_MAX_ROWS = 32  # characters of a picture's height


def draws_pictures(console: Console) -> bool:
    """Whether the console is a terminal with colours and a known size."""
    if not console.is_terminal or console.color_system is None:
        return False
    try:
        return 0 not in os.get_terminal_size(console.file.fileno())
    except OSError:
        return False


def print_message(console: Console, role: str, parts: Iterable[str | Image.Image | EncodedImage]) -> None:
    """Without a terminal a picture is written to a file of its own, whose name is printed."""
    print_line(console, f"[{role}]", "bold cyan")
    for part in parts:
        if isinstance(part, str):
            print_line(console, part)
            continue
        image = as_encoded(part)
        if draws_pictures(console):
            from textual_image.renderable import Image as Picture  # asks the terminal what it can

            console.print(Picture(image.to_pil(), height=min(_MAX_ROWS, max(4, console.height - 6))))
        else:
            with tempfile.NamedTemporaryFile(prefix="rl-vlm-", suffix=".png", delete=False) as file:
                file.write(image.png)
            print_line(console, f"(image of {image.width}x{image.height} pixels in {file.name})", "dim")


def print_messages(console: Console, messages: Iterable[Message]) -> None:
    for message in messages:
        print_message(console, message.role, message.parts)


def print_line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(printable(text), style), soft_wrap=True)
