"""How far an answer is from the truth, and the reward for it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rl_vlm.zoo.geospot.answers import GeoAnswer
from rl_vlm.zoo.geospot.gazetteer import Gazetteer, Place
from rl_vlm.zoo.geospot.names import Kind, Position, haversine_km, name_key

FIELDS = ("country", "region", "city", "coords")
TAUS_KM: dict[str, float] = {"country": 2000.0, "region": 500.0, "city": 100.0, "coords": 25.0}
# (country, region, city) by stage.
STAGE_WEIGHTS = ((1.0, 0.0, 0.0), (0.5, 0.0, 0.0), (0.3, 0.4, 0.0), (0.2, 0.3, 0.3), (0.15, 0.25, 0.4))
LAST_STAGE = len(STAGE_WEIGHTS) - 1


@dataclass(frozen=True, slots=True)
class GroundTruth:
    """The position, the names of country, region and city, and their places; None for what is not known."""

    position: Position
    names: dict[str, str | None]
    country: Place | None
    region: Place | None
    city: Place | None

    @classmethod
    def from_names(
        cls, gazetteer: Gazetteer, position: Position, country: str | None, region: str | None, city: str | None
    ) -> GroundTruth:
        """Look the names up, region and city in the country; of several cities of that name the nearest is meant."""
        land = gazetteer.country(country) if country else None
        code = land.country if land else None
        area = gazetteer.region(region, code) if region else None
        town = gazetteer.city(city, code, near=position) if city else None
        inside = [place if place and place.country == code else None for place in (area, town)]
        return cls(position, {"country": country, "region": region, "city": city}, land, *inside)

    def distances_km(self, answer: GeoAnswer, gazetteer: Gazetteer) -> dict[str, float | None]:
        """Per field the distance to the truth; None for a field that is missing or names no known place.

        Of several places of a name the one in the country and the region that the answer names is meant. Where the
        truth's place is not known, its position counts.
        """
        country = gazetteer.country(answer.country) if answer.country else None
        code = country.country if country else None
        region = gazetteer.region(answer.region, code) if answer.region else None
        city = gazetteer.city(answer.city, code, region) if answer.city else None
        agrees = code is None or self.country is None or code == self.country.country
        return {
            "country": self._distance(country, self.country),
            "region": self._named("region", answer.region, region, agrees),
            "city": self._named("city", answer.city, city, agrees),
            "coords": haversine_km(answer.coords, self.position) if answer.coords else None,
        }

    def _named(self, field: Kind, said: str | None, found: Place | None, agrees: bool) -> float | None:
        """As `_distance`; 0 for the truth's own name, which the gazetteer may lack or give to a larger place."""
        true_name = self.names[field]
        if said and true_name and agrees and name_key(said, field) == name_key(true_name, field) != "":
            return 0.0
        return self._distance(found, self.region if field == "region" else self.city)

    def _distance(self, found: Place | None, true: Place | None) -> float | None:
        if found is None:
            return None
        if true is not None and found.id == true.id:
            return 0.0
        return haversine_km(found.position, true.position if true else self.position)


def field_weights(country: float, region: float, city: float) -> dict[str, float]:
    """The weight of every field, from those of three."""
    return {"country": country, "region": region, "city": city, "coords": max(city, region / 2)}


def stage_weights(stage: float) -> dict[str, float]:
    """The weights of a stage from 0 to LAST_STAGE; between two stages they are blended linearly."""
    lower = min(int(stage), LAST_STAGE - 1)
    share = stage - lower
    pairs = zip(STAGE_WEIGHTS[lower], STAGE_WEIGHTS[lower + 1], strict=True)
    return field_weights(*((1 - share) * before + share * after for before, after in pairs))


def stage_of(weights: Sequence[float]) -> float | None:
    """The stage whose (country, region, city) these are; None if no stage has them."""
    for lower, (before, after) in enumerate(itertools.pairwise(np.array(STAGE_WEIGHTS))):
        step = after - before
        share = float((weights - before) @ step / (step @ step))
        if -1e-9 <= share <= 1 + 1e-9 and np.allclose(before + share * step, weights, atol=1e-9):
            return lower + share
    return None


def score(
    distances_km: Mapping[str, float | None], weights: Mapping[str, float], taus_km: Mapping[str, float]
) -> tuple[float, dict[str, float]]:
    """The reward in [0, 1], and the kernel exp(-d / τ) of every field, whose weighted mean it is.

    A field without a known place (None) counts 0 and keeps its weight.
    """
    kernels = dict.fromkeys(FIELDS, 0.0)
    for field, distance in distances_km.items():
        if distance is not None:
            kernels[field] = math.exp(-distance / taus_km[field])
    return sum(weights[field] * kernels[field] for field in FIELDS) / sum(weights[field] for field in FIELDS), kernels
