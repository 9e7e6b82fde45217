r"""Units and marks behind an answer: `5 cm^2`, `5\text{ square units}`, `45^\circ`, `50\%`, `3 million`."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAMES = {
    "cm": "cm centimeter centimeters centimetre centimetres",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "km": "km kilometer kilometers kilometre kilometres",
    "m": "m meter meters metre metres",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yds yard yards",
    "mi": "mi mile miles",
    "unit": "unit units",
    "degree": "deg degs degree degrees Degree Degrees",
    "rad": "rad rads radian radians",
    "g": "g gram grams",
    "kg": "kg kilogram kilograms",
    "lb": "lb lbs pound pounds",
    "s": "s sec secs second seconds",
    "min": "min mins minute minutes",
    "h": "h hr hrs hour hours",
    "day": "day days",
    "year": "yr yrs year years",
    "L": "L liter liters litre litres",
    "mL": "ml mL milliliter milliliters",
    "dollar": "dollar dollars",
    "cent": "cent cents",
    "N": "N newton newtons",
    "mi/h": "mph",
    "km/h": "kph kmh",
}
_CANONICAL = {name: unit for unit, names in _NAMES.items() for name in names.split()}
_WORDS = "|".join(sorted((name for name in _CANONICAL if len(name) > 1), key=len, reverse=True))
_LETTERS = "|".join(name for name in _CANONICAL if len(name) == 1)
_EXPONENT = r"(?: ?\^ ?\{? ?(?P<power>[1-9]) ?\}?)?"
_DIMENSION = r"(?:(?P<dimension>sq|square|cu|cubic)\.? )?"
_UNIT = re.compile(rf"{_DIMENSION}(?P<unit>{_WORDS}|{_LETTERS}){_EXPONENT}\.?")
# A single letter is a unit only after a space: 5 m, but not the expression 5m.
_BARE_UNIT = re.compile(
    rf"(?:(?<=[0-9}})])|(?<=\\pi))(?: ?(?={_DIMENSION.replace('?P<dimension>', '?:')}(?:{_WORDS})(?![A-Za-z]))"
    rf"| (?=(?:{_LETTERS})(?![A-Za-z]))){_DIMENSION}(?P<unit>{_WORDS}|{_LETTERS}){_EXPONENT}$"
)
_RATE = re.compile(rf"(?P<unit>{_WORDS}|{_LETTERS})(?: ?/ ?| per )(?P<per>{_WORDS}|{_LETTERS}){_EXPONENT}$")
_TEXT = re.compile(r" ?\\text\{ ?(?P<content>[^{}]*)\}" + _EXPONENT + "$")
_DEGREE = re.compile(r" ?\^\\circ ?(?:\\text\{(?P<text>[CF])\}|(?P<letter>[CF]))?$")
_PERCENT = re.compile(r" ?(?:\\?%|percent|\\text\{ ?(?:percent|\\?%) ?\})$")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(rf"(?<=[0-9]) ?(?:\\text\{{ ?(?P<text>{'|'.join(_SCALES)})\}}|(?P<bare>{'|'.join(_SCALES)}))$")
_ANY_WORDS = re.compile(r"[A-Za-z]{2}[A-Za-z ./]*")
# Words that change the value: removing them like a unit would grade another answer.
_NOT_A_UNIT = re.compile(
    r"\b(?:not?|none|never|or|and|plus|minus|times|over|dozens?|hal(?:f|ves)|thirds?|quarters?|than|except|pi|maybe|perhaps|possibly|probably|likely|if|unless|guess|wrong|"
    r"hundreds?|thousands?|millions?|billions?|trillions?)\b"
)
GENERIC = "unit"


@dataclass(frozen=True, slots=True)
class Quantity:
    """An answer without its unit, which is canonical (`cm^2`), or "" where this module knows none."""

    text: str
    unit: str = ""
    percent: bool = False


def detach_unit(text: str) -> Quantity:
    """Remove percent sign, degree sign, unit or counted noun from the end of an answer; a word alone stays."""
    text = text.strip()
    if (match := _PERCENT.search(text)) and match.start():
        return Quantity(text[: match.start()], "percent", percent=True)
    if (match := _DEGREE.search(text)) and match.start():
        return Quantity(text[: match.start()], "degree" + (match["text"] or match["letter"] or ""))
    if match := _SCALE.search(text):
        return Quantity(f"{text[: match.start()]}\\cdot 10^{{{_SCALES[match['text'] or match['bare']]}}}")
    if (match := _TEXT.search(text)) and match.start():
        content = match["content"].strip()
        if known := _RATE.fullmatch(content) or _UNIT.fullmatch(content):
            return Quantity(text[: match.start()], _canonical(known, match["power"]))
        if _ANY_WORDS.fullmatch(content) and not _NOT_A_UNIT.search(content.lower()):
            return Quantity(text[: match.start()])
        return Quantity(text)
    match = _RATE.search(text)
    if match is None or text[: match.start()].rstrip()[-1:] not in tuple("0123456789})"):
        match = _BARE_UNIT.search(text)
    return Quantity(text[: match.start()], _canonical(match)) if match else Quantity(text)


def units_clash(answer: str, truth: str) -> bool:
    """Whether both name a known unit and the units differ; plain "units" fit anything."""
    return bool(answer and truth) and answer != truth and not (answer.startswith(GENERIC) or truth.startswith(GENERIC))


def _canonical(match: re.Match[str], outer_power: str | None = None) -> str:
    """`cm^2` or `mi/h^2` of a match of _UNIT, _BARE_UNIT or _RATE."""
    groups = match.groupdict()
    unit = _CANONICAL[groups["unit"]] + (f"/{_CANONICAL[groups['per']]}" if "per" in groups else "")
    dimension = groups.get("dimension") or ""
    power = outer_power or groups["power"] or {"s": "2", "c": "3", "": "1"}[dimension[:1]]
    return unit if power == "1" else f"{unit}^{power}"
