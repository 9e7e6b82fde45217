"""The actions of a turn, in words such as `click(40, 120)`: how they are read, and how a page gets them."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any, Literal

from rl_vlm.zoo.miniwob.browser import Page

Coordinates = Literal["pixels", "unit", "thousandths"]
FORMS = {
    "click": "(x, y)", "double_click": "(x, y)", "move": "(x, y)", "drag": "(x1, y1, x2, y2)",
    "scroll": "(x, y, up or down)", "type": '("text")', "key": "(Enter or ctrl+a)", "wait": "", "done": "",
}  # fmt: skip
MAX_TEXT = 500  # characters to type
SCROLLED = 60  # of the page's pixels
DRAG_STEPS = 8

_CALL = re.compile(rf"(?<![\w\"'])({'|'.join(FORMS)})\b\s*(?:\((.*)\))?[\s.`*]*$", re.IGNORECASE)
_NUMBER = re.compile(r"(?:\w+\s*=)?[\[(\s]*(-?\d+(?:\.\d+)?)[\])\s]*")
_STRING = re.compile(r"""(?:\w+\s*=\s*)?("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^"'()=,]+)""")
# Keys by name: DOM's `key`, its code, and what it writes. Other keys, such as F5, would be the browser's own.
_KEYS: dict[str, tuple[str, int, str]] = {
    "enter": ("Enter", 13, "\r"), "tab": ("Tab", 9, ""), "space": (" ", 32, " "), "backspace": ("Backspace", 8, ""),
    "delete": ("Delete", 46, ""), "escape": ("Escape", 27, ""), "home": ("Home", 36, ""), "end": ("End", 35, ""),
    "pageup": ("PageUp", 33, ""), "pagedown": ("PageDown", 34, ""), "left": ("ArrowLeft", 37, ""),
    "up": ("ArrowUp", 38, ""), "right": ("ArrowRight", 39, ""), "down": ("ArrowDown", 40, ""),
}  # fmt: skip
_CTRL, _SHIFT = 2, 8  # bits of the protocol
_HELD = {"ctrl": _CTRL, "control": _CTRL, "shift": _SHIFT}
_SHORTCUTS = {*"acvxz", *_KEYS}  # with ctrl; others would be the browser's own
_SELECTION = """(field => field && field.selectionStart != null
  ? field.value.slice(field.selectionStart, field.selectionEnd) : String(getSelection()))(document.activeElement)"""


class NoActionError(Exception):
    """An answer that names no action; the message says why."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The part of a page that is shown: its size in the page's pixels, its scale, and how answers name points of it."""

    width: int
    height: int
    scale: int
    coordinates: Coordinates

    @property
    def picture(self) -> tuple[int, int]:
        """Width and height of the picture in its own pixels."""
        return self.width * self.scale, self.height * self.scale

    @property
    def ends(self) -> tuple[int, int]:
        """The coordinates of the lower right corner."""
        return {"unit": (1, 1), "thousandths": (1000, 1000)}.get(self.coordinates, self.picture)

    def to_page(self, x: float, y: float) -> tuple[float, float]:
        """A point in the page's pixels. Raises NoActionError for one outside of the picture."""
        if not (0 <= x <= self.ends[0] and 0 <= y <= self.ends[1]):
            raise NoActionError(f"{x:g}, {y:g} is outside of the picture")
        page_x, page_y = x / self.ends[0] * self.width, y / self.ends[1] * self.height
        return min(page_x, self.width - 1.0), min(page_y, self.height - 1.0)  # the edges belong to the last pixels


@dataclass(frozen=True, slots=True)
class Action:
    """A word, its points in the page's pixels, and its text: what to type, a key, or "up" or "down"."""

    word: str
    points: tuple[tuple[float, float], ...] = ()
    text: str = ""


def parse_action(answer: str, frame: Frame) -> Action:
    """The action that the last line of an answer ends with. Raises NoActionError."""
    line = (answer.strip().splitlines() or [""])[-1]
    error, start = NoActionError("it does not end with an action"), 0
    while found := _CALL.search(line, start):
        try:
            return _read(found[1].lower(), found[2] or "", frame)
        except NoActionError as wrong:  # in `click(1, 2), then type("x")` the second is one
            error, start = wrong, found.start() + 1
    raise error


def _read(word: str, inside: str, frame: Frame) -> Action:
    if word in ("type", "key"):
        text = _text(inside)
        if len(text) > MAX_TEXT:
            raise NoActionError(f"it types more than {MAX_TEXT} characters")
        if word == "key":
            _key(text)
        return Action(word, text=text)
    parts = inside.split(",") if inside.strip() else []
    direction = _text(parts.pop()).lower() if word == "scroll" and parts else ""
    values = [float(found[1]) for part in parts if (found := _NUMBER.fullmatch(part))]
    wanted = len(re.findall("[xy]", FORMS[word]))
    if not len(values) == len(parts) == wanted or (word == "scroll") != (direction in ("up", "down")):
        raise NoActionError(f"write it as {word}{FORMS[word]}")
    points = zip(values[::2], values[1::2], strict=True)
    return Action(word, tuple(frame.to_page(x, y) for x, y in points), direction)


def _text(inside: str) -> str:
    found = _STRING.fullmatch(inside.strip())
    try:
        text = found[1] if found else ""
        return str(ast.literal_eval(text)) if text[0] in "\"'" else text.strip()
    except (SyntaxError, ValueError, IndexError) as error:
        raise NoActionError("its text cannot be read: put it in double quotes") from error


def _key(name: str) -> tuple[int, tuple[str, int, str]]:
    """What is held, in the bits of the protocol, and the key of a name such as Enter, ctrl+a or shift+Tab."""
    *held, key = re.split(r"[+ ]+(?=.)", name.lower())
    key = {"esc": "escape", "return": "enter", "del": "delete"}.get(key, key.removeprefix("arrow"))
    known = _KEYS.get(key) or (_key_of(key) if len(key) == 1 else None)
    bits = sum(_HELD.get(one, 0) for one in set(held))
    if known is None or not _HELD.keys() >= {*held} or (bits & _CTRL and key not in _SHORTCUTS):
        raise NoActionError(f"the key {name[:40]!r} is unknown")
    return bits, known


def _key_of(character: str) -> tuple[str, int, str]:
    if character in "\r\n\t":
        return _KEYS["tab" if character == "\t" else "enter"]
    # Letters and digits are their own codes; those of other characters differ with the keyboard.
    return character, ord(character.upper()) if character.isascii() and character.isalnum() else 0, character


def perform(page: Page, action: Action) -> None:
    """Carry out an action, while the clock of the page stands still. Raises PageLostError."""
    if action.points:
        _mouse(page, "mouseMoved", action.points[0])
    match action.word:
        case "click" | "double_click":
            for count in range(1, 2 if action.word == "click" else 3):
                _mouse(page, "mousePressed", action.points[0], button="left", buttons=1, clickCount=count)
                _mouse(page, "mouseReleased", action.points[0], button="left", clickCount=count)
        case "drag":
            (x1, y1), end = action.points
            _mouse(page, "mousePressed", (x1, y1), button="left", buttons=1, clickCount=1)
            for share in (step / DRAG_STEPS for step in range(1, DRAG_STEPS + 1)):
                point = x1 + share * (end[0] - x1), y1 + share * (end[1] - y1)
                _mouse(page, "mouseMoved", point, button="left", buttons=1)
            _mouse(page, "mouseReleased", end, button="left", clickCount=1)
        case "scroll":
            down = SCROLLED if action.text == "down" else -SCROLLED
            _mouse(page, "mouseWheel", action.points[0], deltaX=0, deltaY=down)
        case "type":
            for character in action.text:
                _press(page, 0, _key_of(character))
        case "key":
            _press(page, *_key(action.text))


def _mouse(page: Page, kind: str, point: tuple[float, float], **more: Any) -> None:
    page.call("Input.dispatchMouseEvent", type=kind, x=point[0], y=point[1], **more)


def _press(page: Page, held: int, key: tuple[str, int, str]) -> None:
    name, code, text = key
    if held & _CTRL:
        text = ""
        if name in ("c", "x"):
            page.clipboard = page.evaluate(_SELECTION)
        elif name == "v":
            return page.call("Input.insertText", text=page.clipboard)
    of_key = {"key": name, "windowsVirtualKeyCode": code, "modifiers": held}
    page.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **of_key)
    page.call("Input.dispatchKeyEvent", type="keyUp", **of_key)
