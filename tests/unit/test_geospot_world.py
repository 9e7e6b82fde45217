"""Drawn maps: the pin is where it should be, pictures of the splits differ, and every process draws the same."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from rl_vlm.zoo.geospot import world
from rl_vlm.zoo.geospot.places import haversine_km
from rl_vlm.zoo.geospot.world import PIN, big_cities, pin_item

MARK = "import hashlib; from rl_vlm.zoo.geospot.world import pin_item; p, i = pin_item(8, 2, 64, 'test', 5, 3); print(i.position, i.city.name, p.sha256)"


def test_no_picture_is_in_both_splits() -> None:
    pictures = {
        split: {pin_item(12, 1, 64, split, index, 0)[0].sha256 for index in range(400)}  # type: ignore[arg-type]
        for split in ("train", "test")
    }
    assert len(pictures["train"]) > 150 and len(pictures["test"]) > 50
    assert not pictures["train"] & pictures["test"]


def test_the_pin_is_red_and_in_its_place() -> None:
    for index in range(20):
        image, item = pin_item(60, 5, 96, "train", index, 1)
        red = (np.asarray(image.to_pil()) == PIN).all(2)
        assert 4 <= red.sum() <= 60
        rows, columns = np.nonzero(red)
        assert np.hypot(*np.subtract(world.pixel_of(item.position, 96), (columns.mean(), rows.mean()))) < 2.5


def test_pixels_of_positions_by_hand() -> None:
    assert world.pixel_of((0.0, 0.0)) == (32, 32)
    assert world.pixel_of((89.9, -179.9)) == (0, 0)
    assert world.pixel_of((-45.0, 90.0)) == (48, 48)


def test_the_city_is_the_nearest_of_the_big_ones() -> None:
    for index in range(30):
        _, item = pin_item(20, 7, 64, "train", index, 0)
        assert item.country and item.region
        near = min(big_cities(item.country.country, 7), key=lambda city: haversine_km(city.position, item.position))
        assert item.city == near
        assert item.city and item.city.country == item.country.country
        assert item.region.id == item.city.region


def test_positions_are_inside_their_country() -> None:
    boxes = {"AU": (-45, -9, 112, 155), "BR": (-34, 6, -75, -34), "IN": (6, 38, 67, 98), "CA": (41, 84, -142, -52)}
    rng = np.random.default_rng(1)
    for code, (south, north, west, east) in boxes.items():
        for _ in range(100):
            latitude, longitude = world.random_position(rng, code)
            assert south < latitude < north and west < longitude < east


def test_another_process_draws_the_same() -> None:
    image, item = pin_item(8, 2, 64, "test", 5, 3)
    assert item.city
    said = subprocess.run([sys.executable, "-c", MARK], capture_output=True, text=True, timeout=900, check=True).stdout
    assert said.strip() == f"{item.position} {item.city.name} {image.sha256}"
    assert pin_item(8, 2, 64, "test", 5, 4)[0].sha256 != image.sha256
