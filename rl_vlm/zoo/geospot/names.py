"""Names of places as keys by which they are compared, and the distance between two positions."""

from __future__ import annotations

import math
import re
import unicodedata
from functools import lru_cache
from typing import Literal

Kind = Literal["country", "region", "city"]
Position = tuple[float, float]  # latitude and longitude in degrees
EARTH_RADIUS_KM = 6371.0088  # the mean radius of the IUGG
FARTHEST_KM = math.pi * EARTH_RADIUS_KM  # to the other side of the Earth

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


def haversine_km(first: Position, second: Position) -> float:
    """The distance on a sphere of EARTH_RADIUS_KM (haversine formula: Sinnott, Sky and Telescope 68, 1984)."""
    (lat1, lon1), (lat2, lon2) = (tuple(map(math.radians, position)) for position in (first, second))
    chord = math.sin((lat2 - lat1) / 2) ** 2 + math.cos(lat1) * math.cos(lat2) * math.sin((lon2 - lon1) / 2) ** 2
    return 2 * EARTH_RADIUS_KM * math.asin(math.sqrt(min(1.0, chord)))
