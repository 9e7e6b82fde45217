"""GeoSpot-v0: where was this picture taken? The answer is five lines, each rewarded by how near it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rl_vlm.envs.base import Count, EpisodeEnv, Info, Item, Reply
from rl_vlm.envs.data import Row, Schema, TableSet, cell_text
from rl_vlm.envs.images import fit
from rl_vlm.envs.rows import BadRowError
from rl_vlm.envs.sources import DataSource
from rl_vlm.types import EncodedImage, Observation, Split, UserInputError
from rl_vlm.zoo.geospot import world
from rl_vlm.zoo.geospot.answers import parse_answer
from rl_vlm.zoo.geospot.gazetteer import open_gazetteer
from rl_vlm.zoo.geospot.names import FARTHEST_KM
from rl_vlm.zoo.geospot.scoring import LAST_STAGE, TAUS_KM, GroundTruth, field_weights, score, stage_of, stage_weights

MIN_IMAGE_SIZE, MAX_IMAGE_SIZE = 64, 2048
NEAR_KM = (25, 100, 500)
_Weight = Annotated[float, Field(ge=0)]
BRIEF = "Where is it?"
_STREET = "Where was this picture taken? Look at signs, script, roads, buildings, plants and light, and reason briefly."
_MAP = "Where is the red pin on this map? Latitude and longitude can be read off the lines; name the nearest big city."
_FORM = (
    " End with five lines and nothing behind them:\nCity: <name>\nRegion: <state or province>\nCountry: <name or "
    "two-letter code>\nLatitude: <degrees, negative in the south>\nLongitude: <degrees, negative in the west>"
)
# An answer without coordinates counts as the largest distance, so that staying silent cannot improve the median.
_NOT_NEAR = {f"within_{km}km": False for km in NEAR_KM}
_UNANSWERED: Info = {"distance_km": FARTHEST_KM, "format_ok": False, **_NOT_NEAR}


def read_view(row: Row) -> tuple[EncodedImage, GroundTruth]:
    """A street view and where it was taken; the row may lack region and city."""
    try:
        latitude, longitude = float(row.cells["latitude"]), float(row.cells["longitude"])
    except (TypeError, ValueError):
        latitude = longitude = math.nan
    if not (abs(latitude) <= 90 and abs(longitude) <= 180):  # NaN fails as well
        raise BadRowError("latitude and longitude are no position.")
    region, city = (cell_text(row.cells.get(name)).strip() or None for name in ("region", "city"))
    names = (row.text("country").strip(), region, city)
    truth = GroundTruth.from_names(open_gazetteer(), (latitude, longitude), *names)
    return row.image(row.cells["image"]), truth


# In the layout of OpenStreetView-5M.
STREET_VIEWS = Schema(read_view, ("image", "latitude", "longitude", "country"), ("region", "city"))


class GeoSpotEnv(EpisodeEnv):
    """Say where a street view was taken, or where a pin on a map is: city, region, country, latitude, longitude.

    data: street views (see `STREET_VIEWS`); without it maps are drawn: a pin in one of the `countries` largest
    countries, whose city is the nearest of that country's `cities` largest. docs/geospot.md lists the other arguments.

    stage: 0 to 4, the curriculum's weights of country, region, city and coordinates; 2.5 is half-way between two
    stages. weights: (country, region, city) instead of a stage's; coordinates weigh max(city, region / 2). taus: kernel
    widths in km by field, in place of `TAUS_KM`.

    The reward is Σ weight · exp(-distance / τ) / Σ weight over the four fields, whatever the answer holds: what is
    missing, ambiguous or names no known place counts 0. `info` has the answer (`response`, `parsed`), `ground_truth`,
    `stage` (None for weights of no stage), `stage_weights`, `reward`, `d_*` in km (None if missing), `k_*`, and the
    metrics; `distance_km` is `d_coords`, or half the Earth's circumference without one.
    """

    name = "GeoSpot-v0"
    metrics: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "distance_km": (0.5, 0.9),
        "format_ok": (),
        "stage_idx": (),
        **{f"within_{km}km": () for km in NEAR_KM},
        **{f"k_{field}": () for field in TAUS_KM},
    }

    def __init__(
        self,
        data: DataSource | None = None,
        *,
        stage: Annotated[float, Field(ge=0, le=LAST_STAGE)] = LAST_STAGE,
        weights: Annotated[Sequence[_Weight], Field(min_length=3, max_length=3)] | None = None,
        taus: Mapping[Literal["country", "region", "city", "coords"], Annotated[float, Field(ge=1e-3)]] | None = None,
        prompt: Literal["full", "brief"] = "full",
        countries: Annotated[int, Field(ge=2, le=world.MOST_COUNTRIES)] = 60,
        cities: Annotated[int, Field(ge=1, le=1000)] = 10,
        image_size: Annotated[int, Field(ge=MIN_IMAGE_SIZE, le=MAX_IMAGE_SIZE)] | None = None,
        seed: int = 0,
        num_train: Count = 4096,
        num_test: Count = 512,
    ) -> None:
        super().__init__(num_train=num_train, num_test=num_test, rows=TableSet(STREET_VIEWS, data) if data else None)
        if weights is not None and not any(weights):
            raise UserInputError("GeoSpot-v0: env.kwargs.weights are all 0: one must be above 0.")
        self.stage = float(stage) if weights is None else stage_of(weights)
        self.weights = stage_weights(stage) if weights is None else field_weights(*weights)
        self.taus = TAUS_KM | {str(field): width for field, width in (taus or {}).items()}
        self.prompt = prompt
        self._drawn = (countries, cities, world.IMAGE_SIZE if image_size is None else image_size)
        self._image_size = image_size
        self._seed = seed

    def validate(self, split: Split, limit: int | None = 32) -> int:
        return super().validate(split, limit)

    def open(self, item: Item) -> tuple[Observation, Info]:
        view = self.row(item)
        shown: tuple[EncodedImage, GroundTruth] = view or world.pin_item(
            *self._drawn, item.split, item.index, self._seed
        )
        image, self._truth = shown
        if view is not None and self._image_size is not None:
            image = fit(image, self._image_size)
        text = BRIEF if self.prompt == "brief" else (_MAP if view is None else _STREET) + _FORM
        return Observation.user(image, text), {"stage_idx": self.stage, **_UNANSWERED}

    def reply(self, text: str) -> Reply:
        truth, answer = self._truth, parse_answer(text)
        distances = truth.distances_km(answer, open_gazetteer())
        reward, kernels = score(distances, self.weights, self.taus)
        off = distances["coords"]
        info: Info = {
            "response": text,
            "stage": self.stage,
            "stage_weights": self.weights,
            "parsed": {name: getattr(answer, name) for name in ("city", "region", "country", "coords", "format_valid")},
            "ground_truth": {**truth.names, "latitude": truth.position[0], "longitude": truth.position[1]},
            "reward": reward,
            **{f"d_{field}": distance for field, distance in distances.items()},
            **{f"k_{field}": value for field, value in kernels.items()},
            "distance_km": FARTHEST_KM if off is None else off,
            "format_ok": answer.format_valid,
            **{f"within_{km}km": off is not None and off <= km for km in NEAR_KM},
            # A right country is what a table of accuracies can hold: no answer is exactly right.
            "correct": distances["country"] == 0.0,
        }
        return Reply(reward, None, info)
