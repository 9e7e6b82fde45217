"""Text from elsewhere, made fit for terminals, logs, tables and child processes: no control characters, no secrets.

Every exception of this package passes its message through `safe`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

# C0 without tab and line feed, DEL and C1: a terminal obeys them. Bidirectional controls show text in another order.
_CONTROLS = [*range(0x20), 0x7F, *range(0x80, 0xA0)]
_BIDI = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_ESCAPES = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in (*_CONTROLS, *_BIDI)
    if chr(code) not in "\n\t"
}
_JSON_ESCAPES = {code: f"\\u{code:04x}" for code in _ESCAPES}
# Variables whose values are secret, by the words of their names.
_SECRET_NAME = re.compile(
    r"(^|_)(TOKENS?|API_?KEYS?|KEYS?|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|PAT|CREDENTIALS?|AUTH|HEADERS)(_ID)?$",
    re.IGNORECASE,
)
_SHORTEST = 8  # characters of a value that is looked for; shorter ones occur by chance
_HIDDEN = "***"
_kept_secrets: set[str] = set()
_USER_INFO = re.compile(r"(?<=://)[^\s/@'\"<>]{1,512}@")
_AUTHORIZATION = re.compile(r"\b(Bearer|Basic)(\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
# A spreadsheet runs what begins with these; a number may begin with a sign.
_FORMULA = re.compile(r"^[\s'\"]*[=+\-@]|^[\t\r]")
_NUMBER = re.compile(r"\s*[-+]?[\d.,]+([eE][-+]?\d+)?(\s+[-+]?[\d.,]+)*\s*")


def printable(text: str) -> str:
    """Control characters and bidirectional controls as escapes such as \\x1b; line feeds and tabs stay."""
    return text if text.isprintable() and text.isascii() else text.translate(_ESCAPES)


def printable_json(text: str) -> str:
    """As `printable`, for JSON that keeps characters beyond ASCII: it stays JSON of the same value."""
    return text.translate(_JSON_ESCAPES)


def keep_secret(value: str) -> None:
    """Let `redact` hide this value from now on, in this process."""
    if len(value) >= _SHORTEST:
        _kept_secrets.add(value)


def redact(text: str) -> str:
    """Without secret values, those of `keep_secret`, and credentials in addresses and HTTP headers."""
    for value in (*_kept_secrets, *secrets_of(os.environ)):
        if value in text:
            text = text.replace(value, _HIDDEN)
    if "://" in text:
        text = _USER_INFO.sub(f"{_HIDDEN}@", text)
    return _AUTHORIZATION.sub(rf"\1\2{_HIDDEN}", text)


def excerpt(text: str, characters: int) -> str:
    """The beginning of a text from elsewhere, redacted before it is cut: half a secret would not be found any more."""
    return redact(text[: 16 * characters])[:characters]


def one_line(error: BaseException, characters: int = 160) -> str:
    """The first line of an exception's text, shortened; the name of its class where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:characters]


def safe(text: str) -> str:
    """Redacted and printable."""
    return printable(redact(text))


def secrets_of(environment: Mapping[str, str]) -> list[str]:
    """The secret values, the longest first, without the white space around them."""
    values = {value.strip() for name, value in environment.items() if _SECRET_NAME.search(name)}
    return sorted((value for value in values if len(value) >= _SHORTEST), key=len, reverse=True)


def child_environment(keep: Iterable[str] = (), **more: str) -> dict[str, str]:
    """The environment for a process that needs no secrets: without tokens and keys, except the variables in `keep`."""
    kept = set(keep)
    return {name: value for name, value in os.environ.items() if name in kept or not _SECRET_NAME.search(name)} | more


def csv_cell(text: str) -> str:
    """Text as a cell that no spreadsheet takes for a formula: such text gets an apostrophe in front."""
    text = printable(text)
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


_THOUGHT_BEGINS = re.compile(r"<think(?:ing)?>", re.IGNORECASE)
_THOUGHT_ENDS = re.compile(r"</think(?:ing)?>", re.IGNORECASE)


def without_thoughts(text: str) -> str:
    """What a model says beside its thoughts. Everything before a lone `</think>` is one: the prompt may open it."""
    *thoughts, rest = _THOUGHT_ENDS.split(text)
    said = ""
    for thought in thoughts:
        before, *opened = _THOUGHT_BEGINS.split(thought, 1)
        said = said + before if opened else ""
    return (said + _THOUGHT_BEGINS.split(rest, 1)[0]).strip()
