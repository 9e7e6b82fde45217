"""Counts the values of a JSON text while it arrives, before anything is built from it: parsed, a value takes a hundred times its bytes."""

from __future__ import annotations

from rl_vlm.http.errors import RequestError

_PIECE = 1 << 16  # bytes that are looked at in one go


class JSONBounds:
    """Refuses a text with more than `max_values` values, keys not counted, or `max_escapes` backslashes. It neither parses nor
    keeps the text.

    A value follows a comma or an opening bracket outside of strings; so does every level of nesting.
    """

    def __init__(self, max_values: int, max_escapes: int) -> None:
        self._max_values, self._max_escapes = max_values, max_escapes
        self._values = self._quotes = self._escapes = 0
        self._in_string = False
        self._escape = False  # the last byte was a backslash that escapes the next one

    def feed(self, data: bytes) -> None:
        """The next bytes of the text. Raises RequestError."""
        for start in range(0, len(data), _PIECE):
            self._count(data[start : start + _PIECE])
            if (
                self._values > self._max_values or self._quotes > 4 * self._max_values
            ):  # a key and a string: four quotes
                raise RequestError(400, f"The body has more than {self._max_values} JSON values: send less.")
            if self._escapes > self._max_escapes:
                raise RequestError(400, f"The body has more than {self._max_escapes} backslashes: send less text.")

    def _count(self, piece: bytes) -> None:
        self._escapes += piece.count(b"\\")
        if self._escape:
            piece = b"\\" + piece
        # Pairs of backslashes stand for one and escape nothing; what is left escapes the next byte.
        piece = piece.replace(b"\\\\", b"")
        self._escape = piece.endswith(b"\\")
        if self._escape:
            piece = piece[:-1]
        parts = piece.replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        self._in_string ^= len(parts) % 2 == 0
        self._quotes += len(parts) - 1
        self._values += sum(map(outside.count, (b",", b"[", b"{")))
