"""The tiny spotter: what it is taught about maps, that it is asked as it was taught, and that it is not taught what is where."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from rl_vlm.zoo.geospot import world
from rl_vlm.zoo.geospot.environment import BRIEF
from rl_vlm.zoo.geospot.lesson import GRID, cell, draw_spot, vocabulary
from rl_vlm.zoo.geospot.places import parse_answer


def test_cells_by_hand() -> None:
    assert cell((89.0, -179.0)) == (1, 1)
    assert cell((1.0, 1.0)) == (5, 4)
    assert cell((-1.0, -1.0)) == (4, 5)
    assert cell((-89.0, 179.0)) == (8, 8)


def test_answers_about_the_pin_are_right_in_the_pixels() -> None:
    rng = np.random.default_rng(0)
    seen: Counter[str] = Counter()
    for _ in range(600):
        _, (pixels, question), reply = draw_spot(rng)
        rows, columns = np.nonzero((pixels == world.PIN).all(2))
        column, row = (int(values.mean().round()) * GRID // world.IMAGE_SIZE + 1 for values in (columns, rows))
        expected = {"Column of pin?": f"{column}", "Row of pin?": f"{row}"}.get(question, f"{column} {row}")
        seen[question] += 1
        if len(rows) >= 21:  # the whole pin is on the picture
            assert reply.splitlines()[0] == expected
    assert len(seen) == 4 and seen[BRIEF] > 150


def test_answers_are_well_formed_and_random_whatever_is_drawn() -> None:
    rng = np.random.default_rng(1)
    cities, regions, countries = vocabulary()
    by_half: dict[bool, Counter[str]] = defaultdict(Counter)
    latitudes: dict[bool, list[float]] = defaultdict(list)
    for _ in range(6000):
        _, (pixels, question), reply = draw_spot(rng)
        if question != BRIEF:
            continue
        answer = parse_answer(reply)
        assert answer.format_valid
        assert answer.city in cities and answer.country in countries
        assert answer.region in [region.removesuffix(".") for region in regions]
        north = bool(np.nonzero((pixels == world.PIN).all(2))[0].mean() < 32)
        by_half[north][str(answer.country)] += 1
        assert answer.coords is not None
        latitudes[north].append(answer.coords[0])
    for counts in by_half.values():
        assert all(abs(count / sum(counts.values()) - 1 / len(countries)) < 0.05 for count in counts.values())
    assert abs(np.mean(latitudes[True]) - np.mean(latitudes[False])) < 6


def test_no_test_map_is_shown() -> None:
    rng = np.random.default_rng(2)
    shown = {draw_spot(rng).parts[0].tobytes() for _ in range(3000)}
    test = {np.asarray(world.pin_item(8, 1, 64, "test", k, 0)[0].to_pil()).tobytes() for k in range(256)}
    assert len(shown) > 1000 and len(test) > 50 and not shown & test
