"""Decodes an image in a process of its own, with a limit of time and memory: for files that may cost seconds."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image

from rl_vlm.envs.image_budget import ImageError
from rl_vlm.safe_text import child_environment

TIMEOUT_S = 120.0  # of one image, on a machine that is busy with other things; the child limits its time on the CPU
_TURN_S = 300.0  # how long one waits for others

# By file name and without the script's folder on the path (-P): the child needs nothing of this package, and no secrets.
_COMMAND = (sys.executable, "-P", "-W", "ignore", str(Path(__file__).with_name("image_child.py")))
_turn = threading.Lock()  # one at a time, so that many costly images take one core and the memory of one


def decode_in_process(
    data: bytes, formats: Sequence[str], max_pixels: int, timeout_s: float = TIMEOUT_S
) -> Image.Image:
    """The first frame, upright. Raises ImageError for a damaged image, and where the limits do not suffice."""
    with _own_turn():
        try:
            done = subprocess.run(
                [*_COMMAND, str(max_pixels), *formats],
                input=data,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=child_environment(),
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ImageError(f"takes more than {timeout_s:g} s to decode: save it as a plain JPEG or PNG") from error
        except OSError as error:
            raise ImageError(f"cannot be decoded, because no process could be started for it ({error})") from error
    line, found, pixels = done.stdout.partition(b"\n")
    if not found and done.returncode == -signal.SIGXCPU:
        raise ImageError("takes too long to decode: save it as a plain JPEG or PNG")
    if not found:
        raise ImageError(f"broke the process that decoded it (exit code {done.returncode})")
    head = json.loads(line)
    if "error" in head:
        raise ImageError(f"cannot be decoded ({head['error']})")
    return Image.frombytes(head["mode"], (head["width"], head["height"]), pixels)


@contextlib.contextmanager
def _own_turn() -> Iterator[None]:
    if not _turn.acquire(timeout=_TURN_S):
        raise ImageError(f"waited {_TURN_S:g} s for other images to be decoded")
    try:
        yield
    finally:
        _turn.release()
