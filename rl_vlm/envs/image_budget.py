"""What decoding an image file may cost, read from the file before a pixel is decoded.

The size in the header bounds the memory, and for most formats the time. Not for JPEG: each scan of a file goes over the
whole picture again, and an empty scan takes forty bytes. Headers of many small parts take time as well, because Pillow
reads them in Python.
"""

from __future__ import annotations

import re

from rl_vlm.types import UserInputError

# Ordinary progressive files have 10 scans, thoroughly optimised ones 20.
MAX_SCANS = 100
# Pixels times the components of every scan: a worst-case scan takes 3 ns for each, so that this is some 5 s of CPU.
MAX_WORK = 64_000_000 * 24
# Above this a file is decoded in a process that can be killed.
MAX_WORK_HERE = 200_000_000
MAX_PARTS = 20_000  # chunks of a PNG, segments of a JPEG
MAX_FILL = 4096  # bytes without meaning between the segments of a JPEG

_SOI, _EOI, _SOS, _TEM = 0xD8, 0xD9, 0xDA, 0x01
_RESTARTS = range(0xD0, 0xD8)
# In the data of a scan: neither an escaped 0xFF, nor a restart, nor fill.
_END_OF_SCAN = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_MARKER = re.compile(rb"\xff[^\x00\xff]")
_PNG = b"\x89PNG\r\n\x1a\n"


class ImageError(UserInputError):
    """An image cannot be read, or must not be."""


def check_parts(data: bytes) -> list[int]:
    """Look through the parts of a PNG or JPEG file; of a JPEG, the number of components of every scan.

    Linear in the file's size. Raises ImageError for more parts or scans than a picture needs; a damaged file is left to
    the decoder, which says what is wrong with it.
    """
    if data.startswith(_PNG):
        _check_chunks(data)
    elif data.startswith(b"\xff\xd8"):
        return _scans(data)
    return []


def is_costly(scans: list[int], width: int, height: int) -> bool:
    """Whether a JPEG of these scans should be decoded in a process that can be killed. ImageError if not even there."""
    work = width * height * sum(scans)
    if len(scans) < 2:
        return False
    if work > MAX_WORK:
        raise ImageError(
            f"is a JPEG of {len(scans)} scans of {width}x{height} pixels, which takes too long to decode: save it "
            "without progressive scans"
        )
    return work > MAX_WORK_HERE


def _check_chunks(data: bytes) -> None:
    place, chunks = len(_PNG), 0
    while place + 12 <= len(data):
        place += 12 + int.from_bytes(data[place : place + 4], "big")
        chunks += 1
        if chunks > MAX_PARTS:
            raise ImageError(f"is a PNG of more than {MAX_PARTS} chunks: save it again")


def _scans(data: bytes) -> list[int]:
    """Follows the markers as libjpeg does."""
    scans: list[int] = []
    place, segments, fill = 2, 0, 0
    while place + 1 < len(data):
        if data[place] != 0xFF or data[place + 1] in (0x00, 0xFF):
            after = _next_marker(data, place)
            fill += after - place
            if fill > MAX_FILL and not scans:
                raise ImageError(f"is a JPEG with more than {MAX_FILL} bytes between its segments: save it again")
            place = after
            continue
        marker = data[place + 1]
        place += 2
        if marker == _EOI:
            break
        if marker in _RESTARTS or marker in (_SOI, _TEM):
            continue
        length = int.from_bytes(data[place : place + 2], "big")
        segments += 1
        if segments > MAX_PARTS:
            raise ImageError(f"is a JPEG of more than {MAX_PARTS} segments: save it again")
        if marker == _SOS:
            scans.append(min(max(data[place + 2], 1), 4) if place + 2 < len(data) else 1)
            if len(scans) > MAX_SCANS:
                raise ImageError(
                    f"is a JPEG of more than {MAX_SCANS} scans, which takes too long to decode: save it without "
                    "progressive scans"
                )
            found = _END_OF_SCAN.search(data, place + length)
            place = found.start() if found else len(data)
        else:
            place += length
    return scans


def _next_marker(data: bytes, place: int) -> int:
    """Where the next 0xFF is that a marker follows."""
    found = _MARKER.search(data, place)
    return found.start() if found else len(data)
