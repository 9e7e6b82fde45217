"""What commands print: nothing that a file, a model or an environment said reaches the terminal as a command to it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TextIO

import typer

from rl_vlm.safe_text import printable, redact, safe


def say(text: str, err: bool = False) -> None:
    """Print a text to stdout, or to stderr with `err`; control characters as escapes."""
    typer.echo(printable(text), err=err)


def say_check(name: str, status: str, detail: str, width: int = 12) -> None:
    """Print the line of a check, whose status is ok, warn or fail."""
    colors = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "fail": typer.colors.RED}
    typer.secho(f"{status:<5}", fg=colors[status], nl=False)
    say(f"{name:<{width}}  {detail}")


# How a command ends when something goes wrong: one sentence on stderr, an exit code, a traceback in a file.


class ErrorReport:
    """Turns an exception into a sentence and an exit code; tracebacks go to `folder`."""

    folder: Path | None = None

    def report(self, error: Exception) -> int:
        """Print the sentence; return 2 for bad input, an interrupted run's own code, 1 otherwise."""
        from rl_vlm.types import RLVLMError, UserInputError  # imported here because --help must not wait for it

        if isinstance(error, RLVLMError):
            print(f"error: {error}", file=sys.stderr)
            return 2 if isinstance(error, UserInputError) else int(getattr(error, "exit_code", 1))
        lines = str(error).strip().splitlines()
        reason = safe(f"{type(error).__name__}: {lines[0][:300]}") if lines else type(error).__name__
        print(f"error: {reason} (unexpected; the traceback is in {self._write(error)})", file=sys.stderr)
        return 1

    def _write(self, error: Exception) -> str:
        text = redact("".join(traceback.format_exception(error)))
        with contextlib.suppress(OSError):
            if self.folder is not None and self.folder.is_dir():
                path = self.folder / "error.log"
                path.unlink(missing_ok=True)  # it may be a symbolic link
                path.write_text(text)
                return str(path)
        try:
            descriptor, name = tempfile.mkstemp(prefix="rl-vlm-error-", suffix=".log")
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
        except OSError:
            return "no file, because none could be written"
        return name


error_report = ErrorReport()  # of this process: `rl-vlm train` sets its folder


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current sys.stderr, which a live display replaces while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        return safe(super().format(record))


def log_to_stderr() -> None:
    """Show this package's own log messages, from INFO on, as plain lines."""
    logger = logging.getLogger("rl_vlm")
    if not logger.handlers:
        logger.addHandler(_StderrHandler())
        logger.setLevel(logging.INFO)
