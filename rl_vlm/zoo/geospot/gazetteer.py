"""The places of the Earth by name: countries, regions and cities."""

from __future__ import annotations

import re
import sqlite3
import threading
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from rl_vlm.zoo.geospot.gazetteer_build import gazetteer_path
from rl_vlm.zoo.geospot.names import Kind, Position, haversine_km, name_key

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
    return Gazetteer(gazetteer_path())
