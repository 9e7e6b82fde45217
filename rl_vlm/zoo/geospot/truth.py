"""Where a GeoSpot picture was taken, and how far from there an answer is, field by field."""

from __future__ import annotations

from dataclasses import dataclass

from rl_vlm.zoo.geospot.answer import GeoAnswer
from rl_vlm.zoo.geospot.gazetteer import Gazetteer, Place
from rl_vlm.zoo.geospot.place_names import Kind, name_key
from rl_vlm.zoo.geospot.reward import Position, haversine_km


@dataclass(frozen=True, slots=True)
class GroundTruth:
    """The position, and the names of country, region and city with their places; None where there is none or it is unknown."""

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

        Of several places of a name the one in the country and the region that the answer names is meant. Where the truth's place is
        not known, its position counts.
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
        """As `_distance`; 0 for the truth's own name, which the gazetteer may not have or may give to a larger place."""
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
