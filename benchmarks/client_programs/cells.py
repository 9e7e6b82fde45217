"""What the client programs share: cells of the table, and a picture. The standard library alone."""

import asyncio
import base64
import inspect
import json
import os
import struct
import sys
import traceback
import zlib

URL, MODEL, KEY, AGENT_URL = (os.environ.get(f"CLIENT_{name}", "") for name in ("URL", "MODEL", "KEY", "AGENT_URL"))
# AGENT_URL is that of a model that calls the tool `look` once, then says "Two."


def cell(feature: str, tries: int = 3):
    """Run the function below and print how it went. A model that answers noise may fill an answer with blanks until it
    is cut off: such a cell is tried again."""

    def run(function):
        for _ in range(tries):
            try:
                result = function()
                if inspect.iscoroutine(result):
                    asyncio.run(result)
                error = None
                break
            except Exception as caught:
                traceback.print_exc(file=sys.stderr)
                error = f"{type(caught).__name__}: {caught}"[:600]
        print("CELL " + json.dumps({"feature": feature, "error": error}), flush=True)

    return run


def png(width: int = 64, height: int = 64) -> bytes:
    """A picture of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + b"\x20\x80\xe0" * width) * height
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


PICTURE = "data:image/png;base64," + base64.b64encode(png()).decode()
