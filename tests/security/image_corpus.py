"""Images that are made to cost time or memory, or to lie about themselves."""

from __future__ import annotations

import io
import struct
import zlib

from PIL import Image

PNG = b"\x89PNG\r\n\x1a\n"


def encoded(kind: str, side: int = 8, mode: str = "RGB", **options) -> bytes:
    """A plain picture of `side` pixels."""
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((side, side)).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def scan_bomb(side: int, scans: int, mode: str = "L") -> bytes:
    """A progressive JPEG whose last scan is repeated: some 40 bytes for each pass over the whole picture."""
    buffer = io.BytesIO()
    Image.new(mode, (side, side), "grey").save(buffer, "JPEG", progressive=True, quality=50)
    data = buffer.getvalue()
    last = data.rindex(b"\xff\xc4", 0, data.rindex(b"\xff\xda"))  # its Huffman table comes before it
    end = data.rindex(b"\xff\xd9")
    return data[:end] + data[last:end] * scans + b"\xff\xd9"


def sequential_bomb(side: int, scans: int) -> bytes:
    """A baseline JPEG whose components have scans of their own, all of them empty."""
    data = encoded("JPEG", side)
    start = data.rindex(b"\xff\xda")
    scan = b"\xff\xda" + struct.pack(">HB", 8, 1) + bytes([1, 0, 0, 63, 0])
    return data[:start] + scan * scans + b"\xff\xd9"


def with_segments(data: bytes, segment: bytes, count: int) -> bytes:
    """A JPEG with so many more segments behind its first marker."""
    return data[:2] + segment * count + data[2:]


def png(width: int, height: int, rows: bytes, *extra: bytes) -> bytes:
    """A grey PNG of raw `rows` (filter byte and pixels), whatever its header says, with more chunks before the pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return PNG + b"".join((chunk(b"IHDR", header), *extra, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")))


def jpeg_in_tiff(side: int = 64) -> bytes:
    """A TIFF whose strips are JPEGs."""
    return encoded("TIFF", side, compression="jpeg")
