"""Names of countries, regions and cities are found offline, in the spellings that people use."""

from __future__ import annotations

import pytest
from tables import table

from rl_vlm.zoo.geospot.places import Gazetteer, haversine_km, open_gazetteer

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


@pytest.mark.parametrize(("name", "country", "expected"), TABLES["regions_lie_where_their_people_live"])
def test_regions_lie_where_their_people_live(
    gazetteer: Gazetteer, name: str, country: str | None, expected: tuple[float, float]
) -> None:
    place = gazetteer.region(name, country)
    assert place is not None
    assert haversine_km(place.position, expected) < 60


@pytest.mark.parametrize(("name", "country", "expected"), TABLES["cities_by_name_and_country"])
def test_cities_by_name_and_country(
    gazetteer: Gazetteer, name: str, country: str | None, expected: tuple[float, float]
) -> None:
    place = gazetteer.city(name, country)
    assert place is not None
    assert haversine_km(place.position, expected) < 5


def test_a_region_tells_cities_of_one_name_apart(gazetteer: Gazetteer) -> None:
    for state, expected in (("Illinois", (39.80, -89.64)), ("Massachusetts", (42.10, -72.59)), ("MO", (37.22, -93.30))):
        city = gazetteer.city("Springfield", "US", gazetteer.region(state, "US"))
        assert city is not None and haversine_km(city.position, expected) < 5


def test_a_name_that_is_not_in_the_country_is_looked_for_elsewhere(gazetteer: Gazetteer) -> None:
    assert gazetteer.city("Munich", "JP") == gazetteer.city("Munich", "DE")
    assert gazetteer.region("Bavaria", "FR") == gazetteer.region("Bavaria", "DE")
    assert gazetteer.city("Paris", "US") != gazetteer.city("Paris", "FR")
