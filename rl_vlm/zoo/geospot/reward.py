"""GeoSpot's reward: how near the named places and the coordinates are, field by field, over a denominator that is fixed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

Position = tuple[float, float]  # latitude and longitude in degrees

EARTH_RADIUS_KM = 6371.0088  # the mean radius of the IUGG
FARTHEST_KM = math.pi * EARTH_RADIUS_KM  # to the other side of the Earth
FIELDS = ("country", "region", "city", "coords")
TAUS_KM: dict[str, float] = {"country": 2000.0, "region": 500.0, "city": 100.0, "coords": 25.0}
# (country, region, city) by stage.
STAGE_WEIGHTS = ((1.0, 0.0, 0.0), (0.5, 0.0, 0.0), (0.3, 0.4, 0.0), (0.2, 0.3, 0.3), (0.15, 0.25, 0.4))
LAST_STAGE = len(STAGE_WEIGHTS) - 1


def haversine_km(first: Position, second: Position) -> float:
    """The distance on a sphere of EARTH_RADIUS_KM (haversine formula: Sinnott, Sky and Telescope 68, 1984)."""
    (lat1, lon1), (lat2, lon2) = (tuple(map(math.radians, position)) for position in (first, second))
    chord = math.sin((lat2 - lat1) / 2) ** 2 + math.cos(lat1) * math.cos(lat2) * math.sin((lon2 - lon1) / 2) ** 2
    return 2 * EARTH_RADIUS_KM * math.asin(math.sqrt(min(1.0, chord)))


def kernel(distance_km: float | None, tau_km: float) -> float:
    """exp(-d / τ); 0 without a distance."""
    return 0.0 if distance_km is None else math.exp(-distance_km / tau_km)


def field_weights(country: float, region: float, city: float) -> dict[str, float]:
    """The weight of every field; the coordinates weigh max(city, region / 2)."""
    return {"country": country, "region": region, "city": city, "coords": max(city, region / 2)}


def stage_weights(stage: float) -> dict[str, float]:
    """The weights of a stage from 0 to LAST_STAGE; between two stages they are blended linearly."""
    lower = min(int(stage), LAST_STAGE - 1)
    share = stage - lower
    pairs = zip(STAGE_WEIGHTS[lower], STAGE_WEIGHTS[lower + 1], strict=True)
    return field_weights(*((1 - share) * before + share * after for before, after in pairs))


@dataclass(frozen=True, slots=True)
class GeoScore:
    """The reward in [0, 1] and the kernel of every field."""

    reward: float
    kernels: dict[str, float]


def score(
    distances_km: Mapping[str, float | None], weights: Mapping[str, float], taus_km: Mapping[str, float]
) -> GeoScore:
    """The weighted mean of the fields' kernels.

    The denominator is the sum of all weights: a field that is missing or names no known place (None) counts 0 and stays in it.
    """
    kernels = {field: kernel(distances_km.get(field), taus_km[field]) for field in FIELDS}
    total = sum(weights[field] for field in FIELDS)
    return GeoScore(sum(weights[field] * kernels[field] for field in FIELDS) / total, kernels)
