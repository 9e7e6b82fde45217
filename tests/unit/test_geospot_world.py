"""Drawn maps: the pin is where it should be, pictures of the splits differ, and every process draws the same."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

from rl_vlm.zoo.geospot import world
from rl_vlm.zoo.geospot.places import haversine_km
from rl_vlm.zoo.geospot.world import (
    PIN,
    Window,
    big_cities,
    pin_item,
)

MARK = "import hashlib; from rl_vlm.zoo.geospot.world import pin_item; i = pin_item(8, 2, 2, 64, 'test', 5, 3); print(i.position, i.city.name, i.image.sha256)"


def test_no_picture_is_in_both_splits() -> None:
    pictures = {
        split: {pin_item(12, 1, 1, 64, split, index, 0).image.sha256 for index in range(400)}  # type: ignore[arg-type]
        for split in ("train", "test")
    }
    assert len(pictures["train"]) > 150 and len(pictures["test"]) > 50
    assert not pictures["train"] & pictures["test"]


@pytest.mark.parametrize("zoom", [1, 2, 5, 16])
def test_the_pin_is_red_and_in_its_place(zoom: int) -> None:
    for index in range(20):
        item = pin_item(60, 5, zoom, 96, "train", index, 1)
        pixels = np.asarray(item.image.to_pil()).astype(int)
        red = (pixels == PIN).all(2)
        assert 4 <= red.sum() <= 60
        rows, columns = np.nonzero(red)
        found = [  # every window of this zoom in which the pin would be just there
            Window(zoom, -180 + 180 / zoom * x, 90 - 90 / zoom * y)
            for x, y in itertools.product(range(2 * zoom - 1), repeat=2)
            if np.hypot(*(np.subtract(Window(zoom, -180 + 180 / zoom * x, 90 - 90 / zoom * y).pixel(item.position, 96), (columns.mean(), rows.mean())))) < 2.5
        ]  # fmt: skip
        assert found


def test_pixels_of_positions_by_hand() -> None:
    assert Window().pixel((0.0, 0.0), 64) == (32, 32)
    assert Window().pixel((89.9, -179.9), 64) == (0, 0)
    assert Window().pixel((-45.0, 90.0), 64) == (48, 48)
    assert Window(4, 0.0, 45.0).pixel((0.0, 45.0), 64) == (32, 64)


def test_the_city_is_the_nearest_of_the_big_ones() -> None:
    for index in range(30):
        item = pin_item(20, 7, 1, 64, "train", index, 0)
        near = min(big_cities(item.country.country, 7), key=lambda city: haversine_km(city.position, item.position))
        assert item.city == near
        assert item.city.country == item.country.country
        assert item.region.id == item.city.region


def test_positions_are_inside_their_country() -> None:
    boxes = {"AU": (-45, -9, 112, 155), "BR": (-34, 6, -75, -34), "IN": (6, 38, 67, 98), "CA": (41, 84, -142, -52)}
    rng = np.random.default_rng(1)
    for code, (south, north, west, east) in boxes.items():
        for _ in range(100):
            latitude, longitude = world.random_position(rng, code)
            assert south < latitude < north and west < longitude < east


def test_another_process_draws_the_same() -> None:
    item = pin_item(8, 2, 2, 64, "test", 5, 3)
    said = subprocess.run([sys.executable, "-c", MARK], capture_output=True, text=True, timeout=900, check=True).stdout
    assert said.strip() == f"{item.position} {item.city.name} {item.image.sha256}"
    assert pin_item(8, 2, 2, 64, "test", 5, 4).image.sha256 != item.image.sha256
