"""Frames between two processes: JSON and blobs of bytes, never pickle.

A frame is the JSON's length (4 bytes, big-endian), the JSON, and the blobs one after the other, whose lengths the JSON
names under "blobs". Reading and writing have deadlines, and a frame above the size limits is an error.
"""

from __future__ import annotations

import io
import json
import os
import select
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MAX_JSON = 64 * 2**20
MAX_BLOBS = 512 * 2**20
_SLICE_S = 0.25  # how often a waiting side checks that the other process is alive
_LENGTH = struct.Struct(">I")

Frame = tuple[dict[str, Any], list[bytes]]


class FrameError(Exception):
    """The other side sent something that is not a frame."""


class PeerGoneError(Exception):
    """The other side closed the connection or died."""


class Channel:
    """A pair of pipe ends. By `alive` a waiting side sees that the peer died, although others hold its pipe open."""

    def __init__(self, read_fd: int, write_fd: int, alive: Callable[[], bool] | None = None) -> None:
        self._read_fd, self._write_fd, self._alive = read_fd, write_fd, alive
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

    def send(self, content: Mapping[str, Any], blobs: Sequence[bytes] = (), timeout_s: float | None = None) -> None:
        """Write one frame. TimeoutError after `timeout_s`, PeerGoneError if the reader is gone."""
        deadline = _deadline(timeout_s)
        view = memoryview(pack_frame(content, blobs))
        while view:
            self._wait(self._write_fd, select.POLLOUT, deadline)
            try:
                view = view[os.write(self._write_fd, view) :]
            except BlockingIOError:
                continue  # the pipe filled up between poll and write
            except BrokenPipeError as error:
                raise PeerGoneError from error

    def receive(self, timeout_s: float | None = None) -> Frame:
        """Read one frame. TimeoutError after `timeout_s`, PeerGoneError at the end, FrameError for invalid data."""
        deadline = _deadline(timeout_s)
        return _read_frame(lambda size: self._read(size, deadline))

    def close(self) -> None:
        for fd in (self._read_fd, self._write_fd):
            os.close(fd)

    def _read(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._wait(self._read_fd, select.POLLIN, deadline)
            try:
                chunk = os.read(self._read_fd, min(size - len(data), 2**20))
            except BlockingIOError:
                continue
            if not chunk:
                raise PeerGoneError
            data += chunk
        return bytes(data)

    def _wait(self, fd: int, event: int, deadline: float) -> None:
        poll = select.poll()  # select.select fails on descriptors above 1023, which busy actors have
        poll.register(fd, event)
        while True:
            # Called before the last poll, so that data which the peer wrote before it died is still read.
            alive = self._alive is None or self._alive()
            left = deadline - time.monotonic()
            wait_s = min(left, _SLICE_S if self._alive else float("inf")) if alive else 0.0
            if poll.poll(None if wait_s == float("inf") else 1000 * max(0.0, wait_s)):
                return
            if not alive:
                raise PeerGoneError
            if left <= 0:
                raise TimeoutError


def pack_frame(content: Mapping[str, Any], blobs: Sequence[bytes]) -> bytes:
    """The bytes of one frame. FrameError above the size limits."""
    text = json.dumps({**content, "blobs": [len(blob) for blob in blobs]}, default=_plain).encode()
    if len(text) > MAX_JSON or sum(map(len, blobs)) > MAX_BLOBS:
        raise FrameError(f"a message of {len(text)} bytes with {sum(map(len, blobs))} bytes of images is too large")
    return b"".join((_LENGTH.pack(len(text)), text, *blobs))


def unpack_frame(data: bytes) -> Frame:
    """The inverse of `pack_frame`; FrameError where the bytes are not exactly one frame."""
    rest = io.BytesIO(data)

    def read(size: int) -> bytes:
        part = rest.read(size)
        if len(part) < size:
            raise FrameError(f"{len(data)} bytes are not a whole frame")
        return part

    frame = _read_frame(read)
    if more := len(rest.read()):
        raise FrameError(f"{more} bytes follow a frame")
    return frame


def _read_frame(read: Callable[[int], bytes]) -> Frame:
    """One frame, of whose bytes `read(size)` gives the next."""
    (length,) = _LENGTH.unpack(read(_LENGTH.size))
    if length > MAX_JSON:
        raise FrameError(f"a message of {length} bytes is too large")
    try:
        content = json.loads(read(length))
        lengths = content.pop("blobs")
        if not all(isinstance(size, int) and size >= 0 for size in lengths) or sum(lengths) > MAX_BLOBS:
            raise ValueError(f"image sizes {lengths[:4]}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FrameError(f"a message is not a frame ({error})") from error
    return content, [read(size) for size in lengths]


def _deadline(timeout_s: float | None) -> float:
    return time.monotonic() + (timeout_s if timeout_s is not None else float("inf"))


def _plain(value: Any) -> Any:
    """Values that JSON does not know: numpy values as numbers and lists, others as their text."""
    if type(value).__module__ == "numpy":  # not imported here: a child process may do without it
        return value.tolist()
    return repr(value)[:200]
