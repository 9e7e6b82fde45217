"""Writes episodes as videos: GIF by PIL, MP4 by ffmpeg."""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from rl_vlm.files import write_atomic
from rl_vlm.types import UserInputError


def write_video(path: str | Path, frames: Sequence[np.ndarray] | np.ndarray, fps: float = 20.0) -> None:
    """Write uint8 [T, H, W, 3] as .gif or .mp4; the file appears whole or not at all. Raises UserInputError."""
    path = Path(path)
    if not len(frames):
        raise UserInputError(f"{path} cannot be written: the episode has no pictures.")
    if fps <= 0:
        raise UserInputError(f"Pictures per second ({fps}) must be more than 0.")
    writers = {".gif": _write_gif, ".mp4": _write_mp4}
    if path.suffix.lower() not in writers:
        raise UserInputError(f"A video is written as .gif or .mp4, not as {path.name}.")
    writers[path.suffix.lower()](path, frames, fps)


def _write_gif(path: Path, frames: Sequence[np.ndarray] | np.ndarray, fps: float) -> None:
    pictures = [Image.fromarray(frame) for frame in frames]
    buffer = io.BytesIO()
    # GIF counts in hundredths of a second, and viewers slow down videos with more than 50 pictures per second.
    duration = max(round(100 / fps), 2) * 10
    pictures[0].save(buffer, "GIF", save_all=True, append_images=pictures[1:], duration=duration, loop=0)
    write_atomic(path, buffer.getvalue())


def _write_mp4(path: Path, frames: Sequence[np.ndarray] | np.ndarray, fps: float) -> None:
    import imageio_ffmpeg

    height, width = (side + side % 2 for side in frames[0].shape[:2])  # the codec takes even sides only
    temporary = path.with_name(f".{path.stem}-{secrets.token_hex(4)}.mp4")
    try:
        writer = imageio_ffmpeg.write_frames(
            str(temporary), (width, height), fps=fps, codec="libx264", macro_block_size=2, ffmpeg_log_level="error"
        )
        writer.send(None)
        try:
            for frame in frames:
                rows, columns = frame.shape[:2]
                padded = np.pad(frame, ((0, height - rows), (0, width - columns), (0, 0)), mode="edge")
                writer.send(np.ascontiguousarray(padded))
        finally:
            writer.close()
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
