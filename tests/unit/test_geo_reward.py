"""GeoSpot's reward: distances as an independent library has them, kernels and weights by hand, a denominator that stays."""

from __future__ import annotations

import math

import numpy as np
import pytest
from haversine import Unit, haversine

from rl_vlm.zoo.geospot.places import (
    EARTH_RADIUS_KM,
    FARTHEST_KM,
    FIELDS,
    TAUS_KM,
    haversine_km,
    kernel,
    score,
    stage_weights,
)

PLACES = [
    ((48.85341, 2.3488), (40.71427, -74.00597)),
    ((-33.86785, 151.20732), (64.13548, -21.89541)),
    ((0.0, 0.0), (0.0, 180.0)),
    ((90.0, 0.0), (-90.0, 77.0)),
    ((12.5, 179.99), (12.5, -179.99)),
    ((45.0, 45.0), (45.0, 45.0)),
    ((10.0, 20.0), (10.00001, 20.00001)),
]


@pytest.mark.parametrize(("one", "other"), PLACES)
def test_distances_equal_an_independent_library_to_a_metre(
    one: tuple[float, float], other: tuple[float, float]
) -> None:
    theirs = haversine(one, other, unit=Unit.RADIANS) * EARTH_RADIUS_KM
    assert haversine_km(one, other) == pytest.approx(theirs, abs=1e-3)
    assert haversine_km(one, other) == pytest.approx(haversine(one, other), abs=1e-3)  # their radius is 6371.0088 too


def test_kernels_by_hand() -> None:
    assert kernel(0.0, 2000) == 1.0
    assert kernel(2000.0, 2000) == pytest.approx(0.36787944)
    assert kernel(693.147, 1000) == pytest.approx(0.5, abs=1e-6)
    assert kernel(50.0, 25) == pytest.approx(0.13533528)
    assert kernel(None, 25) == 0.0
    assert TAUS_KM == {"country": 2000, "region": 500, "city": 100, "coords": 25}


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
    distances = {"country": 0.0, "region": 500.0, "city": None, "coords": 25.0}
    scored = score(distances, stage_weights(4), TAUS_KM)
    expected = (0.15 + 0.25 / math.e + 0 + 0.4 / math.e) / 1.2
    assert scored.reward == pytest.approx(expected)
    assert scored.kernels == pytest.approx({"country": 1, "region": 1 / math.e, "city": 0, "coords": 1 / math.e})


def test_a_missing_field_never_leaves_the_denominator() -> None:
    everything = dict.fromkeys(FIELDS, 0.0)
    assert score(everything, stage_weights(4), TAUS_KM).reward == pytest.approx(1.0)
    country = {**dict.fromkeys(FIELDS), "country": 0.0}
    assert score(country, stage_weights(4), TAUS_KM).reward == pytest.approx(0.15 / 1.2)
    assert score(dict.fromkeys(FIELDS), stage_weights(4), TAUS_KM).reward == 0.0
    for field in FIELDS:  # leaving a field out never pays more than naming anything at all
        without = {**everything, field: None}
        far = {**everything, field: FARTHEST_KM}
        weights = stage_weights(4)
        assert score(without, weights, TAUS_KM).reward <= score(far, weights, TAUS_KM).reward < 1.0


def test_random_distances_equal_an_independent_library_to_a_metre() -> None:
    rng = np.random.default_rng(0)
    for _ in range(500):
        (a, b), (c, d) = rng.uniform((-90, -180), (90, 180), (2, 2)).tolist()
        ours = haversine_km((a, b), (c, d))
        assert ours == pytest.approx(haversine((a, b), (c, d)), abs=1e-3)
        assert 0 <= ours <= FARTHEST_KM
