"""Drawn world maps with a pin: the offline items of `GeoSpot-v0`, and what its tiny model's warm start shows.

Land and borders are the polygons of countryinfo (world.geo.json, public domain), names and cities the gazetteer's. A
picture's hash decides its split, so no picture of the test split is ever trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
from PIL import Image, ImageDraw

from rl_vlm.types import EncodedImage, Split
from rl_vlm.zoo.drawing import BACKGROUND, split_of, stable_rng
from rl_vlm.zoo.geospot.gazetteer import Place, open_gazetteer
from rl_vlm.zoo.geospot.gazetteer_build import country_files
from rl_vlm.zoo.geospot.names import Position, haversine_km
from rl_vlm.zoo.geospot.scoring import GroundTruth

IMAGE_SIZE = 64
SEA = (BACKGROUND,) * 3
LAND = (168, 164, 150)
BORDER = (128, 124, 112)
LINE = (112, 120, 136)
TEXT = (40, 40, 40)
PIN = (235, 30, 25)
_GRATICULE, _COARSE_GRATICULE = 30.0, 90.0  # degrees between the lines of a whole map
_DETAILED_FROM = 256  # pixels: smaller pictures have no room for borders and numbers
_CELLS_PER_DEGREE = 4  # of the raster that says which country is where
_LEAST_PEOPLE = 1_000_000  # of a country on the map
_MAX_DRAWS = 1000  # of one item; a quarter of all pictures are of the test split

Ring = list[tuple[float, float]]


def pixel_of(position: Position, image_size: int = IMAGE_SIZE) -> tuple[int, int]:
    """Column and row of a position on a map of the whole world."""
    x, y = (position[1] + 180.0) / 360.0, (90.0 - position[0]) / 180.0
    return int(np.floor(x * image_size)), int(np.floor(y * image_size))


@cache
def country_shapes() -> dict[str, list[Ring]]:
    """The outer rings [(longitude, latitude), ...] of every country that has a shape, by ISO-2 code."""
    shapes: dict[str, list[Ring]] = {}
    for country in country_files():
        for feature in (country.get("geoJSON") or {}).get("features", ()):
            geometry = feature["geometry"]
            polygons = geometry["coordinates"] if geometry["type"] == "MultiPolygon" else [geometry["coordinates"]]
            rings = [[(float(point[0]), float(point[1])) for point in polygon[0]] for polygon in polygons]
            shapes.setdefault(country["ISO"]["alpha2"].upper(), rings)
    return shapes


# Of mapped_countries(); written down, so that an environment is made without the gazetteer's index
MOST_COUNTRIES = 141


@cache
def mapped_countries() -> tuple[Place, ...]:
    """The countries that a pin may be in, the largest first."""
    found = []
    for code, cells in _cells().items():
        country = open_gazetteer().country(code)
        if country is not None and country.population >= _LEAST_PEOPLE and big_cities(code, 1):
            latitudes = 90 - (cells // (360 * _CELLS_PER_DEGREE) + 0.5) / _CELLS_PER_DEGREE
            found.append((float(np.cos(np.radians(latitudes)).sum()), country))
    return tuple(country for _, country in sorted(found, key=lambda pair: -pair[0]))


@lru_cache(maxsize=1024)
def big_cities(country: str, count: int) -> tuple[Place, ...]:
    return tuple(open_gazetteer().cities(country, count))


@lru_cache(maxsize=1024)
def pin_item(
    countries: int, cities: int, image_size: int, split: Split, index: int, seed: int
) -> tuple[EncodedImage, GroundTruth]:
    """Task instance `index`: a map with a pin in one of the `countries` largest countries, and where that is.

    Its city is the nearest of the country's `cities` largest. Cached for the copies of a group.
    """
    rng = stable_rng("geospot", countries, cities, 1, image_size, split, index, seed)
    for _ in range(_MAX_DRAWS):
        country = mapped_countries()[int(rng.integers(countries))]
        position = random_position(rng, country.country)
        if split_of(render(position, image_size)) == split:
            city = min(big_cities(country.country, cities), key=lambda place: haversine_km(place.position, position))
            assert city.region is not None  # big_cities has no others
            region = open_gazetteer().place(city.region)
            names: dict[str, str | None] = {"country": country.name, "region": region.name, "city": city.name}
            truth = GroundTruth(position, names, country, region, city)
            return _encoded(pixel_of(position, image_size), image_size), truth
    raise AssertionError(f"no {split} picture in {_MAX_DRAWS} draws")


def random_position(rng: np.random.Generator, country: str) -> Position:
    """A point of the country, uniform on the map, to a hundredth of a degree."""
    cells = _cells()[country]
    row, column = divmod(int(cells[rng.integers(len(cells))]), 360 * _CELLS_PER_DEGREE)
    down, right = rng.random(2).tolist()
    return round(90 - (row + down) / _CELLS_PER_DEGREE, 2), round((column + right) / _CELLS_PER_DEGREE - 180, 2)


def render(position: Position, image_size: int = IMAGE_SIZE) -> np.ndarray:
    """The map with a red pin at the position: uint8 [image_size, image_size, 3]."""
    return _with_pin(pixel_of(position, image_size), image_size)


def _with_pin(pixel: tuple[int, int], image_size: int) -> np.ndarray:
    pixels = _map(image_size).copy()
    radius = min(6, max(2, image_size // 32))
    left, top = (max(0, place - radius) for place in pixel)
    part = pixels[top : pixel[1] + radius + 1, left : pixel[0] + radius + 1]
    y, x = np.ogrid[top : top + part.shape[0], left : left + part.shape[1]]
    part[(x - pixel[0]) ** 2 + (y - pixel[1]) ** 2 <= (radius + 0.3) ** 2] = PIN
    return pixels


@lru_cache(maxsize=2048)
def _encoded(pixel: tuple[int, int], image_size: int) -> EncodedImage:
    """The picture; many positions have the same one, and encoding costs most of a reset."""
    return EncodedImage.from_pil(Image.fromarray(_with_pin(pixel, image_size)))


@lru_cache(maxsize=32)
def _map(image_size: int) -> np.ndarray:
    """Land, borders and graticule of the world, without a pin: uint8 [image_size, image_size, 3]."""
    picture = Image.new("RGB", (image_size, image_size), SEA)
    pen = ImageDraw.Draw(picture)

    def place(ring: Ring) -> list[tuple[float, float]]:
        return [((x + 180.0) / 360.0 * image_size, (90.0 - y) / 180.0 * image_size) for x, y in ring]

    detailed = image_size >= _DETAILED_FROM
    for ring in (ring for shape in country_shapes().values() for ring in shape):
        pen.polygon(place(ring), fill=LAND, outline=BORDER if detailed else LAND)
    step = _GRATICULE if detailed else _COARSE_GRATICULE
    for value in np.arange(-180, 180 + step, step).tolist():
        for line in ([(value, -90.0), (value, 90.0)], [(-180.0, value), (180.0, value)]):
            pen.line(place(line), fill=LINE)
        if detailed:
            column, row = place([(value, value)])[0]
            pen.text((column + 2, image_size - 12), f"{value:g}", fill=TEXT)
            pen.text((2, row + 1), f"{value:g}", fill=TEXT)
    return np.asarray(picture)


@cache
def _cells() -> dict[str, np.ndarray]:
    """int64 [N] by ISO-2 code: the cells of each country in a raster of the world, row by row from the north-west."""
    size = (360 * _CELLS_PER_DEGREE, 180 * _CELLS_PER_DEGREE)
    raster = Image.new("I", size, 0)
    pen = ImageDraw.Draw(raster)
    shapes: Sequence[tuple[str, list[Ring]]] = sorted(country_shapes().items())
    for number, (_, rings) in enumerate(shapes, 1):
        for ring in rings:
            pen.polygon([((x + 180) * _CELLS_PER_DEGREE, (90 - y) * _CELLS_PER_DEGREE) for x, y in ring], fill=number)
    flat = np.asarray(raster).ravel()
    order = np.argsort(flat, kind="stable")
    ends = np.searchsorted(flat[order], np.arange(1, len(shapes) + 2))
    return {code: order[ends[k] : ends[k + 1]] for k, (code, _) in enumerate(shapes) if ends[k] < ends[k + 1]}
