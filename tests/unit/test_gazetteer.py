"""Names of countries, regions and cities are found offline, in the spellings that people use."""

from __future__ import annotations

import pytest

from rl_vlm.zoo.geospot.places import Gazetteer, haversine_km, open_gazetteer


@pytest.fixture(scope="module")
def gazetteer() -> Gazetteer:
    return open_gazetteer()


@pytest.mark.parametrize(
    ("code", "names"),
    [
        (
            "US",
            ["US", "us", "USA", "U.S.A.", "United States", "United States of America", "the United States", "America"],
        ),
        ("GB", ["GB", "GBR", "UK", "United Kingdom", "Great Britain", "England", "Scotland"]),
        ("NL", ["NL", "Netherlands", "The Netherlands", "Holland", "Nederland"]),
        ("DE", ["Germany", "Deutschland", "DEU", "Federal Republic of Germany", "Germany (DE)"]),
        ("CI", ["Ivory Coast", "Côte d'Ivoire", "Cote d’Ivoire"]),
        ("KR", ["South Korea", "Republic of Korea", "KOR"]),
        ("CZ", ["Czechia", "Czech Republic"]),
        ("RU", ["Russia", "Russian Federation"]),
        ("TR", ["Turkey", "Türkiye"]),
        ("MM", ["Myanmar", "Burma"]),
        ("ES", ["Spain", "España"]),
        ("BR", ["Brazil", "Brasil"]),
    ],
)
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
    ("name", "country", "expected"),
    [
        ("Bavaria", "DE", (48.9, 11.4)),
        ("State of Bavaria", None, (48.9, 11.4)),
        ("Île-de-France", "FR", (48.85, 2.35)),
        ("ile de france", None, (48.85, 2.35)),
        ("TX", "US", (31.0, -97.5)),
        ("Hyogo Prefecture", "JP", (34.8, 135.1)),
        ("Georgia", "US", (33.4, -84.0)),
        ("Punjab", "IN", (31.0, 75.5)),
        ("Punjab", "PK", (31.5, 73.4)),
    ],
)
def test_regions_lie_where_their_people_live(
    gazetteer: Gazetteer, name: str, country: str | None, expected: tuple[float, float]
) -> None:
    place = gazetteer.region(name, country)
    assert place is not None
    assert haversine_km(place.position, expected) < 60


@pytest.mark.parametrize(
    ("name", "country", "expected"),
    [
        ("Munich", None, (48.137, 11.575)),
        ("München", "DE", (48.137, 11.575)),
        ("Muenchen", "DE", (48.137, 11.575)),
        ("Cologne", None, (50.933, 6.95)),
        ("Köln", "DE", (50.933, 6.95)),
        ("New York", "US", (40.714, -74.006)),
        ("New York City", None, (40.714, -74.006)),
        ("St. Petersburg", "RU", (59.939, 30.314)),
        ("Saint Petersburg", "US", (27.771, -82.679)),
        ("Paris", None, (48.853, 2.349)),
        ("Paris", "US", (33.661, -95.556)),
        ("São Paulo", None, (-23.548, -46.636)),
        ("Sao Paulo", "BR", (-23.548, -46.636)),
    ],
)
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
