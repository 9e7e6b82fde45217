"""GeoSpot-v0: where was this picture taken? The answer is five lines, each rewarded by how near it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

from rl_vlm.envs.base import Info, MadeItemsEnv, StepResult
from rl_vlm.envs.data import DataSource
from rl_vlm.envs.images import fit
from rl_vlm.envs.one_shot import check_integers
from rl_vlm.types import EncodedImage, Observation, Split, UserInputError
from rl_vlm.zoo.geospot import world
from rl_vlm.zoo.geospot.answer import parse_answer
from rl_vlm.zoo.geospot.gazetteer import open_gazetteer
from rl_vlm.zoo.geospot.reward import FARTHEST_KM, LAST_STAGE, TAUS_KM, field_weights, score, stage_weights
from rl_vlm.zoo.geospot.rows import StreetViews
from rl_vlm.zoo.geospot.truth import GroundTruth

MIN_IMAGE_SIZE, MAX_IMAGE_SIZE = 64, 2048
NEAR_KM = (25, 100, 500)
PROMPTS = ("full", "brief")
BRIEF = "Where is it?"
_STREET = "Where was this picture taken? Look at signs, script, roads, buildings, plants and light, and reason briefly."
_MAP = "Where is the red pin on this map? Latitude and longitude can be read off the lines; name the nearest big city."
_FORM = (
    " End with five lines and nothing behind them:\nCity: <name>\nRegion: <state or province>\nCountry: <name or two-letter code>\n"
    "Latitude: <degrees, negative in the south>\nLongitude: <degrees, negative in the west>"
)
# An answer without coordinates counts as the largest distance, so that staying silent cannot improve the median.
_UNANSWERED: Info = {"distance_km": FARTHEST_KM, "format_ok": False, **{f"within_{km}km": False for km in NEAR_KM}}


class GeoSpotEnv(MadeItemsEnv):
    """Say where a street view was taken, or where a pin on a drawn map is: city, region, country, latitude and longitude.

    data: street views (see `rows.py`); without it, maps are drawn: a pin in one of the `countries` largest countries, whose
    city is the nearest of that country's `cities` largest. zoom: 1 shows the world, k a k-th of its width. seed, num_train, num_test:
    which set of maps and how many. image_size: pixels per side of a map, and the longest side of a street view.
    prompt: "full", or "brief" for the tiny model.

    stage: 0 to 4, the curriculum's weights of country, region, city and coordinates; 2.5 is half-way between two stages.
    weights: (country, region, city) instead of a stage's; coordinates weigh max(city, region / 2).
    taus: kernel widths in km by field (country, region, city, coords), in place of 2000, 500, 100 and 25.

    The reward is Σ weight · exp(-distance / τ) / Σ weight over the four fields, whatever the answer holds: what is missing, ambiguous
    or names no known place counts 0. `info` has the answer (`response`, `parsed`), `ground_truth`, `stage`, `stage_weights`, `reward`,
    `d_*` in km (None if missing), `k_*`, and the metrics; `distance_km` is `d_coords`, or half the Earth's circumference without one.
    """

    metrics: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "distance_km": (0.5, 0.9),
        "format_ok": (),
        "stage_idx": (),
        **{f"within_{km}km": () for km in NEAR_KM},
        **{f"k_{field}": () for field in TAUS_KM},
        "skipped_rows": (),
    }

    def __init__(
        self,
        data: DataSource | None = None,
        *,
        stage: float = LAST_STAGE,
        weights: Sequence[float] | None = None,
        taus: Mapping[str, float] | None = None,
        prompt: str = "full",
        countries: int = 60,
        cities: int = 10,
        zoom: int = 1,
        image_size: int | None = None,
        seed: int = 0,
        num_train: int = 4096,
        num_test: int = 512,
    ) -> None:
        super().__init__("GeoSpot-v0", num_train, num_test)
        if prompt not in PROMPTS:
            raise UserInputError(
                f"GeoSpot-v0: env.kwargs.prompt {prompt!r} is unknown; choose one of {', '.join(PROMPTS)}."
            )
        self._views = StreetViews(data) if data else None
        if self._views is None:
            image_size = world.IMAGE_SIZE if image_size is None else image_size
            check_integers(
                "GeoSpot-v0",
                countries=(countries, 2, world.MOST_COUNTRIES),
                cities=(cities, 1, 1000),
                zoom=(zoom, 1, world.MAX_ZOOM),
                num_train=(num_train, 1, 10**9),
                num_test=(num_test, 1, 10**9),
                seed=(seed, -(2**63), 2**63),
            )
        if image_size is not None:
            check_integers("GeoSpot-v0", image_size=(image_size, MIN_IMAGE_SIZE, MAX_IMAGE_SIZE))
        self.stage = _number("stage", stage, 0.0, LAST_STAGE)
        self.weights = stage_weights(self.stage) if weights is None else _checked_weights(weights)
        self.taus = {**TAUS_KM, **_checked_taus(taus or {})}
        self.prompt = prompt
        self._made = (countries, cities, zoom, image_size)
        self._image_size = image_size
        self._seed = seed
        self._truth: GroundTruth | None = None
        self._skipped = 0

    def num_items(self, split: Split) -> int:
        """How many pictures the split holds."""
        return super().num_items(split) if self._views is None else len(self._views.table(split))

    def validate(self, split: Split, limit: int = 32) -> None:
        """Read some rows of the split. Raises UserInputError if there are none or none of them can be read."""
        if self._views is not None:
            self._views.table(split).validate(limit)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Show picture `options["index"]` of `options["split"]`; a random one without an index."""
        super().reset(seed=seed)
        split, index = self.chosen_item(options)
        image, self._truth, question = self._map(split, index) if self._views is None else self._view(split, index)
        text = BRIEF if self.prompt == "brief" else question + _FORM
        info = {"index": index, "split": split, "stage_idx": self.stage, "skipped_rows": self._skipped, **_UNANSWERED}
        return Observation.user(image, text), info

    def step(self, action: str) -> StepResult:
        """Grade the answer; the episode ends."""
        if self._truth is None:
            raise UserInputError("GeoSpot-v0: call reset() before step(), and again after an episode has ended.")
        truth, self._truth = self._truth, None
        answer = parse_answer(action)
        distances = truth.distances_km(answer, open_gazetteer())
        scored = score(distances, self.weights, self.taus)
        off = distances["coords"]
        info: Info = {
            "response": action,
            "stage": self.stage,
            "stage_weights": self.weights,
            "parsed": {name: getattr(answer, name) for name in ("city", "region", "country", "coords", "format_valid")},
            "ground_truth": {**truth.names, "latitude": truth.position[0], "longitude": truth.position[1]},
            "reward": scored.reward,
            **{f"d_{field}": distance for field, distance in distances.items()},
            **{f"k_{field}": value for field, value in scored.kernels.items()},
            "distance_km": FARTHEST_KM if off is None else off,
            "format_ok": answer.format_valid,
            **{f"within_{km}km": off is not None and off <= km for km in NEAR_KM},
            # A right country is what a table of accuracies can hold: no answer is exactly right.
            "correct": distances["country"] == 0.0,
        }
        return Observation(), scored.reward, True, False, info

    def _map(self, split: Split, index: int) -> tuple[EncodedImage, GroundTruth, str]:
        countries, cities, zoom, image_size = self._made
        assert image_size is not None
        item = world.pin_item(countries, cities, zoom, image_size, split, index, self._seed)
        names: dict[str, str | None] = {
            "country": item.country.name,
            "region": item.region.name,
            "city": item.city.name,
        }
        return item.image, GroundTruth(item.position, names, item.country, item.region, item.city), _MAP

    def _view(self, split: Split, index: int) -> tuple[EncodedImage, GroundTruth, str]:
        assert self._views is not None
        table = self._views.table(split)
        view = table[index]
        self._skipped = len(table.skipped)
        image = view.image if self._image_size is None else _fit(view.image, self._image_size)
        truth = GroundTruth.from_names(open_gazetteer(), view.position, view.country, view.region, view.city)
        return image, truth, _STREET


_fit = lru_cache(maxsize=64)(fit)  # the copies of a group show the same image


def _checked_weights(weights: Sequence[float]) -> dict[str, float]:
    if not isinstance(weights, Sequence) or len(weights) != 3:
        raise UserInputError(
            f"GeoSpot-v0: env.kwargs.weights are three numbers for country, region and city, not {weights!r}."
        )
    country, region, city = (_number("weights", weight, 0.0, math.inf) for weight in weights)
    if country + region + city == 0:
        raise UserInputError("GeoSpot-v0: env.kwargs.weights are all 0: one must be above 0.")
    return field_weights(country, region, city)


def _checked_taus(taus: Mapping[str, float]) -> dict[str, float]:
    unknown = [field for field in taus if field not in TAUS_KM]
    if unknown:
        raise UserInputError(f"GeoSpot-v0: env.kwargs.taus has no field {unknown[0]!r}; it has {', '.join(TAUS_KM)}.")
    return {field: _number(f"taus.{field}", tau, 1e-3, math.inf) for field, tau in taus.items()}


def _number(name: str, value: float, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most or math.isinf(value):
        limits = f"of at least {least:g}" if math.isinf(most) else f"from {least:g} to {most:g}"
        raise UserInputError(f"GeoSpot-v0: env.kwargs.{name} must be a number {limits}, not {value!r}.")
    return float(value)
