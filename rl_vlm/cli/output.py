"""What commands print: nothing that a file, a model or an environment said reaches the terminal as a command to it."""

from __future__ import annotations

import typer

from rl_vlm.safe_text import printable


def say(text: str, err: bool = False, nl: bool = True) -> None:
    """Print a text to stdout, or to stderr with `err`; control characters as escapes."""
    typer.echo(printable(text), err=err, nl=nl)
