"""Drawn world maps with a pin: the offline items of `GeoSpot-v0`, and what its tiny model's warm start shows.

Land and borders are the polygons of countryinfo (world.geo.json, public domain), names and cities the gazetteer's. A
picture's hash decides its split, so no picture of the test split is ever trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from PIL import Image, ImageDraw

from rl_vlm.types import EncodedImage, Split
from rl_vlm.zoo.drawing import BACKGROUND, split_of, stable_rng
from rl_vlm.zoo.geospot.gazetteer_build import country_files
from rl_vlm.zoo.geospot.places import Place, Position, haversine_km, open_gazetteer

IMAGE_SIZE = 64
SEA = (BACKGROUND,) * 3
LAND = (168, 164, 150)
BORDER = (128, 124, 112)
LINE = (112, 120, 136)
TEXT = (40, 40, 40)
PIN = (235, 30, 25)
MAX_ZOOM = 16
_GRATICULE, _COARSE_GRATICULE = 30.0, 90.0  # degrees between the lines of a whole map
_DETAILED_FROM = 256  # pixels: smaller pictures have no room for borders and numbers
_CELLS_PER_DEGREE = 4  # of the raster that says which country is where
_LEAST_PEOPLE = 1_000_000  # of a country on the map
_MAX_DRAWS = 1000  # of one item; a quarter of all pictures are of the test split

Ring = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Window:
    """What a picture shows: `zoom` 1 is the whole world; `west` and `north` are the degrees at its upper left
    corner."""

    zoom: int = 1
    west: float = -180.0
    north: float = 90.0

    def pixel(self, position: Position, image_size: int) -> tuple[int, int]:
        """Column and row of a position, which may lie outside."""
        x = (position[1] - self.west) / (360.0 / self.zoom)
        y = (self.north - position[0]) / (180.0 / self.zoom)
        return int(np.floor(x * image_size)), int(np.floor(y * image_size))


@dataclass(frozen=True, slots=True)
class PinItem:
    """A task instance: where the pin is, the country, and the nearest of its big cities."""

    position: Position
    country: Place
    region: Place
    city: Place
    image: EncodedImage


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


@cache
def _rings() -> list[tuple[Ring, tuple[float, float], tuple[float, float]]]:
    """Every ring with the south-western and the north-eastern corner around it."""
    rings = [ring for shape in country_shapes().values() for ring in shape]
    corners = [(tuple(np.min(ring, axis=0).tolist()), tuple(np.max(ring, axis=0).tolist())) for ring in rings]
    return [(ring, low, high) for ring, (low, high) in zip(rings, corners, strict=True)]


# Of mapped_countries(); written down, so that an environment is made without the gazetteer's index
MOST_COUNTRIES = 141


@cache
def mapped_countries() -> tuple[Place, ...]:
    """The countries that a pin may be in, the largest first: those with a shape, a million people and a city in a
    region."""
    found = []
    for code, cells in _cells().items():
        country = open_gazetteer().country(code)
        if country is not None and country.population >= _LEAST_PEOPLE and big_cities(code, 1):
            latitudes = 90 - (cells // (360 * _CELLS_PER_DEGREE) + 0.5) / _CELLS_PER_DEGREE
            found.append((float(np.cos(np.radians(latitudes)).sum()), country))
    return tuple(country for _, country in sorted(found, key=lambda pair: -pair[0]))


@lru_cache(maxsize=1024)
def big_cities(country: str, count: int) -> tuple[Place, ...]:
    """The largest cities of a country."""
    return tuple(open_gazetteer().cities(country, count))


@lru_cache(maxsize=1024)
def pin_item(countries: int, cities: int, zoom: int, image_size: int, split: Split, index: int, seed: int) -> PinItem:
    """Task instance `index`: a pin anywhere in one of the `countries` largest countries.

    Its city is the nearest of the country's `cities` largest. Cached, because all copies of a group ask for the same
    one.
    """
    rng = stable_rng("geospot", countries, cities, zoom, image_size, split, index, seed)
    for _ in range(_MAX_DRAWS):
        country = mapped_countries()[int(rng.integers(countries))]
        position = random_position(rng, country.country)
        window = random_window(rng, position, zoom)
        pixels = render(window, position, image_size)
        if split_of(pixels) == split:
            city = min(big_cities(country.country, cities), key=lambda place: haversine_km(place.position, position))
            assert city.region is not None  # big_cities has no others
            region = open_gazetteer().place(city.region)
            return PinItem(
                position, country, region, city, _encoded(window, window.pixel(position, image_size), image_size)
            )
    raise AssertionError(f"no {split} picture in {_MAX_DRAWS} draws")


def random_position(rng: np.random.Generator, country: str) -> Position:
    """A point of the country, uniform on the map, to a hundredth of a degree."""
    cells = _cells()[country]
    row, column = divmod(int(cells[rng.integers(len(cells))]), 360 * _CELLS_PER_DEGREE)
    down, right = rng.random(2).tolist()
    return round(90 - (row + down) / _CELLS_PER_DEGREE, 2), round((column + right) / _CELLS_PER_DEGREE - 180, 2)


def random_window(rng: np.random.Generator, position: Position, zoom: int) -> Window:
    """A window of that zoom with the position in it, in steps of half a window, so that there are few of them."""
    corners = []
    for value, start, extent in ((position[1], -180.0, 360.0), (-position[0], -90.0, 180.0)):
        step = extent / zoom / 2
        last = 2 * zoom - 2
        place = int((value - start) // step)
        choices = [k for k in (place - 1, place) if 0 <= k <= last]
        corners.append(start + step * choices[int(rng.integers(len(choices)))])
    return Window(zoom, corners[0], -corners[1])


def render(window: Window, position: Position, image_size: int = IMAGE_SIZE) -> np.ndarray:
    """The map with a red pin at the position: uint8 [image_size, image_size, 3]."""
    return _with_pin(window, window.pixel(position, image_size), image_size)


def _with_pin(window: Window, pixel: tuple[int, int], image_size: int) -> np.ndarray:
    pixels = _map(window, image_size).copy()
    radius = min(6, max(2, image_size // 32))
    x, y = pixel
    rows = slice(max(0, y - radius), y + radius + 1)
    columns = slice(max(0, x - radius), x + radius + 1)
    disc = _disc(radius)[rows.start - y + radius :, columns.start - x + radius :]
    part = pixels[rows, columns]
    part[disc[: part.shape[0], : part.shape[1]]] = PIN
    return pixels


@lru_cache(maxsize=2048)
def _encoded(window: Window, pixel: tuple[int, int], image_size: int) -> EncodedImage:
    """The picture; many positions have the same one, and encoding costs most of a reset."""
    return EncodedImage.from_pil(Image.fromarray(_with_pin(window, pixel, image_size)))


@cache
def _disc(radius: int) -> np.ndarray:
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    return np.asarray(x**2 + y**2 <= (radius + 0.3) ** 2)


@lru_cache(maxsize=32)
def _map(window: Window, image_size: int) -> np.ndarray:
    """Land, borders and graticule of a window, without a pin: uint8 [image_size, image_size, 3]."""
    picture = Image.new("RGB", (image_size, image_size), SEA)
    pen = ImageDraw.Draw(picture)
    width, height = 360.0 / window.zoom, 180.0 / window.zoom

    def place(ring: Ring) -> list[tuple[float, float]]:
        return [((x - window.west) / width * image_size, (window.north - y) / height * image_size) for x, y in ring]

    detailed = image_size >= _DETAILED_FROM
    east, south = window.west + width, window.north - height
    for ring, (left, bottom), (right, top) in _rings():
        if left > east or right < window.west or bottom > window.north or top < south:
            continue
        pen.polygon(place(ring), fill=LAND, outline=BORDER if detailed else LAND)
    step = (_GRATICULE if detailed else _COARSE_GRATICULE) / 2 ** int(np.log2(window.zoom))
    for value in np.arange(-180, 180 + step, step):
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
