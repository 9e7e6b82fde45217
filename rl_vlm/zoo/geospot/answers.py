"""What an answer to GeoSpot says: city, region, country and coordinates, read from its text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Container, Mapping
from dataclasses import dataclass

from rl_vlm.safe_text import without_thoughts
from rl_vlm.zoo.geospot.names import MAX_NAME_CHARS, Position

MAX_CHARS = 8000  # what is longer, behind its author's thinking, is no answer
_MAX_LINE_CHARS = 500  # longer lines hold no field; it bounds the cost of the patterns

_LABELS = {
    "city": "city|town|village|municipality|locality",
    "region": "region|state|province|state/province|region/state|state or province|prefecture|county",
    "country": "country|nation|country code",
    "latitude": "latitude|lat",
    "longitude": "longitude|long|lng|lon",
    "coords": "coordinates|coordinate|coords|gps|gps coordinates|lat/lon|lat/long|latitude/longitude",
}
_FIELD_OF = {label: field for field, labels in _LABELS.items() for label in labels.split("|")}
_ANY_LABEL = "|".join(sorted(map(re.escape, _FIELD_OF), key=len, reverse=True))
_MARKS = r"[\s\"'*_`#>{\[|]*"  # of Markdown, quotation and JSON
_LINE = re.compile(
    rf"{_MARKS}(?:[-+•·–]\s+|\(?[0-9a-e][.)]\s*)?{_MARKS}(?P<label>{_ANY_LABEL}){_MARKS}(?:\((?:degrees?|deg|°)\))?{_MARKS}"
    rf"(?:[:=]|\s[-–—]\s|\s?\|)(?P<value>.*)",
    re.IGNORECASE,
)
_NEXT_FIELD = re.compile(rf"[,;|]\s*(?={_MARKS}(?:{_ANY_LABEL}){_MARKS}\s*[:=])", re.IGNORECASE)
_BULLET = re.compile(r"\s*(?:[-+*•·–]\s+|\(?[0-9][.)]\s+)?")
_UNKNOWN = re.compile(r"(?:unknown|n/?a|none|null|nil|unsure|not sure|cannot tell|[-–—?.]*)", re.IGNORECASE)
_DEGREES = re.compile(
    r"(?P<before>[NSEW])?\s*(?P<sign>[-+−])?\s*(?P<whole>[0-9]{1,3})(?:[.,](?P<part>[0-9]{1,15}))?\s*(?:°|degrees?|deg)?"
    r"(?:\s*(?P<minutes>[0-5]?[0-9](?:\.[0-9]{1,10})?)\s*['′’](?:\s*(?P<seconds>[0-5]?[0-9](?:\.[0-9]{1,10})?)\s*[\"”'′’]{0,2})?)?"
    r"\s*(?P<after>[NSEW]|north|south|east|west)?",
    re.IGNORECASE,
)
_COMMENT = re.compile(r"<!--.*?(?:-->|$)", re.DOTALL)  # which a reader does not see
_BREAK = re.compile(r"<br ?/?>", re.IGNORECASE)
_POINTS = re.compile(r"([-+]?[0-9]+\.[0-9]+),([-+]?[0-9]+\.[0-9]+)")  # 48.85,2.35: the points show what the comma is
_PAIR = re.compile(r"\s*[;/]\s*|,\s+|(?<=[0-9NSns])\s+(?=[-+0-9])")
_LIMITS = {"latitude": (90.0, "ns"), "longitude": (180.0, "ew")}


@dataclass(frozen=True, slots=True)
class GeoAnswer:
    """What an answer says.

    `format_valid`: it names all five fields, each once or always alike, and each can be read.
    """

    city: str | None = None
    region: str | None = None
    country: str | None = None
    coords: Position | None = None
    format_valid: bool = False


def parse_answer(text: str) -> GeoAnswer:
    """Read City, Region, Country, Latitude and Longitude, one a line; lines that hold no field are passed over.

    What can be read in two ways is not read: a field that comes twice with different values, or a number whose signs
    contradict each other, counts as missing.
    """
    lines = _lines(text)
    said: dict[str, list[str]] = {}
    for line in lines:
        match = _LINE.fullmatch(line)
        if match:
            value = _clean(match["value"])
            if value:
                said.setdefault(_FIELD_OF[match["label"].lower()], []).append(value)
    if not said:
        said = _listed(lines)
    clear = {field: values[0] for field, values in said.items() if len({v.casefold() for v in values}) == 1}
    fields = {field: clear.get(field) for field in ("city", "region", "country")}
    names = {field: name if name and len(name) <= MAX_NAME_CHARS else None for field, name in fields.items()}
    names["region"] = _without_outer(names["region"], names["country"])
    names["city"] = _without_outer(names["city"], names["region"], names["country"])
    coords = _coords(clear, said)
    complete = all(names.values()) and coords is not None and len(clear) == len(said)
    return GeoAnswer(names["city"], names["region"], names["country"], coords, complete)


def parse_degrees(text: str, axis: str) -> float | None:
    """Degrees north or east of `-33.9`, `33,9° S`, `33°51'30" S`; None if it is anything else. axis: "latitude", ..."""
    match = _DEGREES.fullmatch(text.strip())
    if match is None or (match["part"] and match["minutes"]):
        return None
    most, letters = _LIMITS[axis]
    given = [match[place][0].lower() for place in ("before", "after") if match[place]]
    if len(given) > 1 or any(letter not in letters for letter in given) or (given and match["sign"]):
        return None
    value = float(f"{match['whole']}.{match['part'] or 0}")
    value += float(match["minutes"] or 0) / 60 + float(match["seconds"] or 0) / 3600
    negative = match["sign"] in ("-", "−") or letters[1] in given
    return (-value if negative else value) if value <= most else None


def _lines(text: str) -> list[str]:
    said = without_thoughts(text)  # a thought may be far longer than an answer
    if len(said) > MAX_CHARS:
        return []
    visible = "".join(char for char in unicodedata.normalize("NFKC", said) if unicodedata.category(char) != "Cf")
    visible = without_thoughts(visible)  # also one whose marks were written with hidden characters
    lines = [" ".join(line.split()) for line in _BREAK.sub("\n", _COMMENT.sub("", visible)).splitlines()]
    return [part for line in lines if 0 < len(line) <= _MAX_LINE_CHARS for part in _NEXT_FIELD.split(line)]


def _clean(value: str) -> str:
    """A value without Markdown, quotation and closing punctuation; "" for a placeholder such as `<city name>`."""
    value = value.strip(" ,;'\"*_`|}]").removesuffix(".").strip()
    return "" if re.search(r"[<>\[\]{}]", value) or _UNKNOWN.fullmatch(value) else value


def _listed(lines: list[str]) -> dict[str, list[str]]:
    """Five values without labels, one a line or in one line with commas, the last two numbers, in order."""
    if len(lines) == 1:
        lines = re.split(r"\s*[;|]\s*|,\s+", lines[0])
    values = [_clean(_BULLET.sub("", line, count=1)) for line in lines]
    if len(values) != 5 or not all(values) or any(re.search("[0-9:]", value) for value in values[:3]):
        return {}
    found = dict(zip(("city", "region", "country", "latitude", "longitude"), values, strict=True))
    return {field: [value] for field, value in found.items()} if _coords(found, ()) else {}


def _without_outer(name: str | None, *outer: str | None) -> str | None:
    """`Paris, France` as `Paris` where the answer itself says that the country is France."""
    if name is None:
        return None
    first, *rest = re.split(r",\s+", name)
    known = {one.casefold() for one in outer if one}
    return first if all(part.casefold() in known for part in rest) else name


def _coords(clear: Mapping[str, str], said: Container[str]) -> Position | None:
    """Latitude and longitude, from a line each or from one line; None where both ways are used or one is unclear."""
    latitude, longitude = clear.get("latitude", ""), clear.get("longitude", "")
    if "coords" in said:
        pair = clear.get("coords", "").strip("() ")
        parts = _PAIR.split(_POINTS.sub(r"\1, \2", pair))
        if len(parts) != 2 or "latitude" in said or "longitude" in said:
            return None
        latitude, longitude = parts
    position = parse_degrees(latitude, "latitude"), parse_degrees(longitude, "longitude")
    return None if position[0] is None or position[1] is None else (position[0], position[1])
