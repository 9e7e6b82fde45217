"""Answers about places are read as a careful reader would, and names that mean the same place have one key."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tables import table

from rl_vlm.zoo.geospot.places import MAX_CHARS, GeoAnswer, Kind, name_key, parse_answer

TABLES = table("place_names")

# Written by hand: text, city, region, country, coords, valid. None stands for what is missing or can be read in two ways.
CASES = table("places")


@pytest.mark.parametrize("case", CASES, ids=[repr(case[0][:40]) for case in CASES])
def test_an_answer_is_read_as_a_person_reads_it(case: list[Any]) -> None:
    text, city, region, country, coords, valid = case
    answer = parse_answer(text)
    assert (answer.city, answer.region, answer.country, answer.format_valid) == (city, region, country, valid)
    assert answer.coords == (None if coords is None else pytest.approx(coords))


@pytest.mark.parametrize(
    "text",
    ["|" * MAX_CHARS, " " * MAX_CHARS, "*" * MAX_CHARS, "City" * 2000, "City:" * 1600, ", " * 4000, "0" * MAX_CHARS, "(" * 8000,
     "Latitude: " + "1" * 7000, "Coordinates: " + "1 " * 3000, "- " * 4000, "\n" * MAX_CHARS],
)  # fmt: skip
def test_hostile_text_takes_milliseconds_and_says_nothing(text: str) -> None:
    started = time.process_time()
    answer = parse_answer(text)
    assert time.process_time() - started < 0.5
    assert (answer.region, answer.country, answer.coords, answer.format_valid) == (None, None, None, False)


def test_a_long_thought_does_not_make_the_answer_behind_it_too_long() -> None:
    answer = "City: Paris\nRegion: Île-de-France\nCountry: France\nLatitude: 48.85\nLongitude: 2.35"
    expected = parse_answer(answer)
    assert expected.format_valid
    for opening in ("<think>", ""):
        assert parse_answer(f"{opening}{'Country: Spain? No. ' * 2000}</think>\n{answer}") == expected
    assert parse_answer(f"<think>Hm.</think>{'x' * MAX_CHARS}\n{answer}") == GeoAnswer()


@pytest.mark.parametrize(("kind", "names"), TABLES["spellings_of_one_name_share_a_key"])
def test_spellings_of_one_name_share_a_key(kind: Kind, names: list[str]) -> None:
    assert len({name_key(name, kind) for name in names}) == 1


@pytest.mark.parametrize(
    ("one", "other"), [("Paris", "Раris"), ("Georgia", "Georgian"), ("Niger", "Nigeria"), ("Rome", "Rome, Milan")]
)
def test_different_names_have_different_keys(one: str, other: str) -> None:
    assert name_key(one, "country") != name_key(other, "country")
