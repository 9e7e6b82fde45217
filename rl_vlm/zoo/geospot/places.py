"""The places that GeoSpot asks about: their names, what a text says about one, and what it is worth."""

from __future__ import annotations

import math
import re
import sqlite3
import threading
import unicodedata
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from rl_vlm.safe_text import without_thoughts

Kind = Literal["country", "region", "city"]

MAX_NAME_CHARS = 100  # the longest real name has 85 letters

# Letters that Unicode does not decompose into a base letter and marks.
_LETTERS = str.maketrans(
    {"ß": "ss", "æ": "ae", "œ": "oe", "ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "ı": "i", "&": " and "}
)
_APOSTROPHES = re.compile(r"['’‘ʼʻ`´.]")  # they are left out: L'Aquila, St. Louis, U.S.A.
_SAINT = {"st": "saint", "ste": "sainte"}
_LEVELS = "state|province|region|prefecture|county|department|oblast|governorate|district|canton|territory"
# What is left out of names, so that they match with and without it. Each must leave something over.
_AFFIXES: dict[str, re.Pattern[str]] = {
    "country": re.compile(r"^(?:the )(?=.)"),
    "region": re.compile(
        rf"^(?:the )?(?:(?:free |federal |autonomous )?(?:{_LEVELS}|city|land) of |(?:city state|land|provincia "
        rf"de|estado de) )(?=.)|^the (?=.)|(?<=.) (?:autonomous )?(?:{_LEVELS})$"
    ),
    "city": re.compile(r"^(?:the )?(?:city|town|village|municipality) of (?=.)|(?<=.) city$"),
}


@lru_cache(maxsize=65_536)
def name_key(name: str, kind: Kind) -> str:
    """The key of a name: lower case, without accents, punctuation and words such as "state of"; "" for what is no name.

    Letters of other scripts stay, so that a look-alike has a key of its own.
    """
    if len(name) > MAX_NAME_CHARS:
        return ""
    folded = unicodedata.normalize("NFKD", name.casefold().translate(_LETTERS))
    bare = _APOSTROPHES.sub("", "".join(char for char in folded if not unicodedata.combining(char)))
    words = "".join(char if char.isalnum() else " " for char in bare).split()
    text = " ".join(_SAINT.get(word, word) for word in words)
    return _AFFIXES[kind].sub("", text)


# "France (FR)": a name and its code, which must mean the same.
_WITH_CODE = re.compile(r"(?P<name>.+?)\s*\((?P<code>[A-Za-z]{2,3})\)")
# Another spelling counts less than a place's own name: Cologne is in Germany, Pali in India (and Paris in Kinaray-a).
_SPELLING_WEIGHT = 0.1


class Place(NamedTuple):
    """A country, region or city. `country` is its ISO-2 code; `region` the id of a city's region, if it is known.

    Countries and regions lie where their people live: at the mean of their cities, weighted by population.
    """

    id: int
    name: str
    country: str
    region: int | None
    position: Position
    population: int


Weighted = tuple[tuple[Place, float], ...]


class Gazetteer:
    """Looks up places by name. Threads may share it."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True, check_same_thread=False
        )
        self._lock = threading.Lock()
        self._found = lru_cache(maxsize=65_536)(self._look_up)

    def country(self, name: str) -> Place | None:
        """By name, former name, ISO-2 or ISO-3 code, or a name with its code in brackets."""
        both = _WITH_CODE.fullmatch(name)
        if both:
            places = {self.country(both[part]) for part in ("name", "code")}
            return places.pop() if len(places) == 1 else None
        return _heaviest(self._named("country", name, None))

    def region(self, name: str, country: str | None = None) -> Place | None:
        """By name; of several one in the country, else the most populous."""
        return _heaviest(self._named("region", name, country))

    def city(
        self, name: str, country: str | None = None, region: Place | None = None, near: Position | None = None
    ) -> Place | None:
        """By name; of several those in the country, of these the nearest to `near`, or the largest in the region."""
        found = self._named("city", name, country)
        if near is not None:
            places = [place for place, _ in found]
            return min(places, key=lambda place: haversine_km(place.position, near), default=None)
        inside = tuple(pair for pair in found if region is not None and pair[0].region == region.id)
        return _heaviest(inside or found)

    def cities(self, country: str, count: int) -> list[Place]:
        """The largest cities of a country whose region is known, the most populous first."""
        largest = (
            "place WHERE kind = 'city' AND country = ? AND region IS NOT NULL ORDER BY population DESC, id LIMIT ?"
        )
        return [place for place, _ in self._select(largest, country, count)]

    def place(self, number: int) -> Place:
        return self._select("place WHERE id = ?", number)[0][0]

    def _named(self, kind: Kind, name: str, country: str | None) -> Weighted:
        """The places of that name with their weights: those in the country, if there are any."""
        key = name_key(name, kind)
        found = self._found(kind, key) if key else ()
        return tuple(pair for pair in found if pair[0].country == country) or found

    def _look_up(self, kind: Kind, key: str) -> Weighted:
        spelt = "spelling JOIN place ON place = id WHERE spelling.kind = ? AND key = ? ORDER BY id"
        found = self._select(spelt, kind, key, own="own")
        return tuple((place, (place.population + 1) * (1.0 if own else _SPELLING_WEIGHT)) for place, own in found)

    def _select(self, source: str, *values: object, own: str = "1") -> list[tuple[Place, bool]]:
        """The places, and whether the spelling that was asked for is their own name."""
        columns = f"id, name, country, region, latitude, longitude, population, {own}"
        with self._lock:
            rows = self._database.execute(f"SELECT {columns} FROM {source}", values).fetchall()
        return [(Place(row[0], row[1], row[2], row[3], (row[4], row[5]), row[6]), bool(row[7])) for row in rows]


def _heaviest(found: Weighted) -> Place | None:
    return max(found, key=lambda pair: pair[1])[0] if found else None


@cache
def open_gazetteer() -> Gazetteer:
    """The gazetteer of this process; built on first use on this machine (seconds)."""
    from rl_vlm.zoo.geospot.gazetteer_build import gazetteer_path  # the sources are read only to build it

    return Gazetteer(gazetteer_path())


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


@dataclass(frozen=True, slots=True)
class GroundTruth:
    """The position, the names of country, region and city, and their places; None for what is not known."""

    position: Position
    names: dict[str, str | None]
    country: Place | None
    region: Place | None
    city: Place | None

    @classmethod
    def from_names(
        cls, gazetteer: Gazetteer, position: Position, country: str | None, region: str | None, city: str | None
    ) -> GroundTruth:
        """Look the names up, region and city in the country; of several cities of that name the nearest is meant."""
        land = gazetteer.country(country) if country else None
        code = land.country if land else None
        area = gazetteer.region(region, code) if region else None
        town = gazetteer.city(city, code, near=position) if city else None
        inside = [place if place and place.country == code else None for place in (area, town)]
        return cls(position, {"country": country, "region": region, "city": city}, land, *inside)

    def distances_km(self, answer: GeoAnswer, gazetteer: Gazetteer) -> dict[str, float | None]:
        """Per field the distance to the truth; None for a field that is missing or names no known place.

        Of several places of a name the one in the country and the region that the answer names is meant. Where the
        truth's place is not known, its position counts.
        """
        country = gazetteer.country(answer.country) if answer.country else None
        code = country.country if country else None
        region = gazetteer.region(answer.region, code) if answer.region else None
        city = gazetteer.city(answer.city, code, region) if answer.city else None
        agrees = code is None or self.country is None or code == self.country.country
        return {
            "country": self._distance(country, self.country),
            "region": self._named("region", answer.region, region, agrees),
            "city": self._named("city", answer.city, city, agrees),
            "coords": haversine_km(answer.coords, self.position) if answer.coords else None,
        }

    def _named(self, field: Kind, said: str | None, found: Place | None, agrees: bool) -> float | None:
        """As `_distance`; 0 for the truth's own name, which the gazetteer may lack or give to a larger place."""
        true_name = self.names[field]
        if said and true_name and agrees and name_key(said, field) == name_key(true_name, field) != "":
            return 0.0
        return self._distance(found, self.region if field == "region" else self.city)

    def _distance(self, found: Place | None, true: Place | None) -> float | None:
        if found is None:
            return None
        if true is not None and found.id == true.id:
            return 0.0
        return haversine_km(found.position, true.position if true else self.position)


Position = tuple[float, float]  # latitude and longitude in degrees

EARTH_RADIUS_KM = 6371.0088  # the mean radius of the IUGG
FARTHEST_KM = math.pi * EARTH_RADIUS_KM  # to the other side of the Earth
FIELDS = ("country", "region", "city", "coords")
TAUS_KM: dict[str, float] = {"country": 2000.0, "region": 500.0, "city": 100.0, "coords": 25.0}
# (country, region, city) by stage.
STAGE_WEIGHTS = ((1.0, 0.0, 0.0), (0.5, 0.0, 0.0), (0.3, 0.4, 0.0), (0.2, 0.3, 0.3), (0.15, 0.25, 0.4))
LAST_STAGE = len(STAGE_WEIGHTS) - 1


def haversine_km(first: Position, second: Position) -> float:
    """The distance on a sphere of EARTH_RADIUS_KM (haversine formula: Sinnott, Sky and Telescope 68, 1984)."""
    (lat1, lon1), (lat2, lon2) = (tuple(map(math.radians, position)) for position in (first, second))
    chord = math.sin((lat2 - lat1) / 2) ** 2 + math.cos(lat1) * math.cos(lat2) * math.sin((lon2 - lon1) / 2) ** 2
    return 2 * EARTH_RADIUS_KM * math.asin(math.sqrt(min(1.0, chord)))


def field_weights(country: float, region: float, city: float) -> dict[str, float]:
    """The weight of every field, from those of three."""
    return {"country": country, "region": region, "city": city, "coords": max(city, region / 2)}


def stage_weights(stage: float) -> dict[str, float]:
    """The weights of a stage from 0 to LAST_STAGE; between two stages they are blended linearly."""
    lower = min(int(stage), LAST_STAGE - 1)
    share = stage - lower
    pairs = zip(STAGE_WEIGHTS[lower], STAGE_WEIGHTS[lower + 1], strict=True)
    return field_weights(*((1 - share) * before + share * after for before, after in pairs))


def score(
    distances_km: Mapping[str, float | None], weights: Mapping[str, float], taus_km: Mapping[str, float]
) -> tuple[float, dict[str, float]]:
    """The reward in [0, 1], and the kernel exp(-d / τ) of every field, whose weighted mean it is.

    A field without a known place (None) counts 0 and keeps its weight.
    """
    kernels = dict.fromkeys(FIELDS, 0.0)
    for field, distance in distances_km.items():
        if distance is not None:
            kernels[field] = math.exp(-distance / taus_km[field])
    return sum(weights[field] * kernels[field] for field in FIELDS) / sum(weights[field] for field in FIELDS), kernels
