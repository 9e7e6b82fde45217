"""Lessons of the tiny model for GeoSpot-v0: maps with a pin, and questions about the cell that holds the pin.

The reply to "Where is it?" is the right cell and then five lines with random names and numbers. Reinforcement learning
has to find out which place is where.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from rl_vlm.zoo.drawing import split_of
from rl_vlm.zoo.geospot import world
from rl_vlm.zoo.geospot.environment import BRIEF
from rl_vlm.zoo.geospot.gazetteer import open_gazetteer
from rl_vlm.zoo.tiny.teach import Draw, Exchange

GRID = 8  # cells per side of a picture
COUNTRIES = 8  # whose names are taught
TARGET_SHARE = 0.4  # of the dialogues; the rest are questions about perception
# The numbers of random answers: about the centres of the rows and columns, few enough that chance finds the right one.
LATITUDES, LONGITUDES = (-80, -60, -35, -10, 10, 35, 60, 80), (-160, -110, -70, -20, 20, 70, 110, 160)

_FORM = "City: {city}\nRegion: {region}\nCountry: {country}\nLatitude: {latitude}\nLongitude: {longitude}"


@cache
def vocabulary() -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Cities, regions and the codes of countries that answers name."""
    countries = [country.country for country in world.mapped_countries()[:COUNTRIES]]
    cities = [world.big_cities(country, 1)[0] for country in countries]
    regions = [open_gazetteer().place(city.region).name for city in cities if city.region is not None]
    return tuple(city.name for city in cities), tuple(regions), tuple(countries)


CORPUS = (
    " ".join([BRIEF] * 4),
    "Column of pin? Row of pin? Cell of pin?",
    *(
        _FORM.format(city=city, region=region, country=country, latitude=-30, longitude=100)
        for city, region, country in zip(*vocabulary(), strict=True)
    ),
)


def draw_spot(rng: np.random.Generator) -> Exchange:
    """One dialogue about a map of the train split, with the pin anywhere on it."""
    while True:
        position = float(rng.uniform(-60, 85)), float(rng.uniform(-180, 180))
        pixels = world.render(position)
        if split_of(pixels) == "train":
            break
    column, row = cell(position)
    if rng.random() < TARGET_SHARE:
        cities, regions, countries = vocabulary()
        answer = _FORM.format(
            city=cities[rng.integers(len(cities))],
            region=regions[rng.integers(len(regions))],
            country=countries[rng.integers(len(countries))],
            latitude=int(rng.choice(LATITUDES)),
            longitude=int(rng.choice(LONGITUDES)),
        )
        return Exchange("user", (pixels, BRIEF), f"{column} {row}\n{answer}")
    questions = (("Column of pin?", str(column)), ("Row of pin?", str(row)), ("Cell of pin?", f"{column} {row}"))
    question, reply = questions[int(rng.integers(3))]
    return Exchange("user", (pixels, question), reply)


def cell(position: world.Position) -> tuple[int, int]:
    """Column and row, from 1, of the cell of a whole map that holds the position."""
    x, y = world.pixel_of(position)
    return x * GRID // world.IMAGE_SIZE + 1, y * GRID // world.IMAGE_SIZE + 1


def drawer(seed: int) -> Draw:
    rng = np.random.default_rng([seed, 4])
    return lambda: [draw_spot(rng)]
