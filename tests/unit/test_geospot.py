"""GeoSpot-v0: street views and drawn maps, what it shows, pays and reports, bad rows, splits that share nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_data import png

from rl_vlm.envs.errors import check_reset, check_step
from rl_vlm.envs.registry import make
from rl_vlm.envs.rows import BadRowError
from rl_vlm.types import EncodedImage
from rl_vlm.zoo.geospot import world
from rl_vlm.zoo.geospot.environment import GeoSpotEnv
from rl_vlm.zoo.geospot.names import FARTHEST_KM, haversine_km
from rl_vlm.zoo.geospot.world import PIN, big_cities, pin_item

PLACES = [
    (48.86, 2.35, "FR", "Île-de-France", "Paris"),
    (-33.87, 151.2, "AU", "New South Wales", "Sydney"),
    (35.69, 139.69, "JP", "Tokyo", "Tokyo"),
    (40.71, -74.0, "US", "New York", "New York City"),
]


def rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    found = []
    for number in range(start, start + count):
        latitude, longitude, country, region, city = PLACES[number % len(PLACES)]
        found.append(
            {
                "image": {"bytes": png((number * 20 % 256, 90, 120), (40, 30)), "path": None}, "latitude": latitude, "longitude": longitude,
                "country": country, "region": region, "city": city, "sequence": str(number),
            }
        )  # fmt: skip
    return found


def write(path: Path, values: list[dict[str, Any]]) -> Path:
    schema = pa.schema(
        [
            ("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("latitude", pa.float64()),
            ("longitude", pa.float64()), ("country", pa.string()), ("region", pa.string()), ("city", pa.string()),
        ]
    )  # fmt: skip
    pq.write_table(pa.Table.from_pylist(values, schema=schema), path, row_group_size=4)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "train.parquet", rows(8))
    write(tmp_path / "test.parquet", rows(4, 8))
    return tmp_path


def test_a_folder_of_parquet_files_is_played(folder: Path) -> None:
    env = GeoSpotEnv(str(folder))
    assert (env.num_items("train"), env.num_items("test")) == (8, 4)
    env.validate("train")
    for index in range(8):
        observation, _ = env.reset(options={"index": index, "split": "train"})
        picture, question = observation.messages[0].parts
        assert (picture.width, picture.height) == (40, 30)  # type: ignore[union-attr]
        assert "picture taken" in str(question)
        latitude, longitude, country, region, city = PLACES[index % 4]
        answer = f"City: {city}\nState: {region}\nCountry: {country}\nLatitude: {latitude}\nLongitude: {longitude}"
        _, reward, _, _, info = env.step(answer)
        assert reward == pytest.approx(1.0)
        assert info["ground_truth"]["country"] == country


BAD = {
    "no latitude": {"latitude": None},
    "latitude beyond the pole": {"latitude": 91.0},
    "no country": {"country": None},
    "blank country": {"country": "  "},
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_and_spares_the_others(folder: Path, name: str) -> None:
    values = rows(6)
    values[2] |= BAD[name]
    write(folder / "train.parquet", values)
    env = GeoSpotEnv(str(folder))
    with pytest.raises(BadRowError, match=r"train\.parquet, row 2"):
        env.reset(options={"index": 2, "split": "train"})
    env.reset(options={"index": 3, "split": "train"})


def test_a_region_and_a_city_may_be_missing(folder: Path) -> None:
    write(folder / "train.parquet", [{**rows(1)[0], "region": None, "city": None}])
    env = GeoSpotEnv(str(folder))
    env.reset(options={"index": 0, "split": "train"})
    _, reward, _, _, info = env.step(
        "City: Paris\nRegion: Île-de-France\nCountry: FR\nLatitude: 48.86\nLongitude: 2.35"
    )
    assert info["d_city"] < 1 and info["d_region"] < 3  # against the position
    assert 0.97 < reward < 1


def test_a_truth_that_lies_in_another_country_counts_as_unknown(folder: Path) -> None:
    """A village that the gazetteer does not have must not become a town of that name on another continent."""
    write(folder / "train.parquet", [{**rows(1)[0], "region": "Texas", "city": "Sydney"}])
    env = GeoSpotEnv(str(folder))
    env.reset(options={"index": 0, "split": "train"})
    info = env.step("City: Sydney\nRegion: Bavaria\nCountry: FR")[4]
    assert info["d_city"] == 0.0  # the truth's own name
    assert 500 < info["d_region"] < 900  # from Bavaria to the position


# --- What it shows, pays and reports, on drawn maps


RIGHT = "City: {city}\nRegion: {region}\nCountry: {country}\nLatitude: {latitude}\nLongitude: {longitude}"


def play(env: GeoSpotEnv, index: int, answer: str = RIGHT) -> tuple[float, dict[str, Any]]:
    """The reward and info of one episode, whose answer may name the truth."""
    env.reset(options={"index": index, "split": "train"})
    truth = env.step("")[4]["ground_truth"]
    env.reset(options={"index": index, "split": "train"})
    _, reward, terminated, truncated, info = check_step(env.step(answer.format(**truth)))
    assert terminated and not truncated
    return reward, info


def test_a_right_answer_pays_one_on_every_map() -> None:
    env = GeoSpotEnv()
    for index in range(200):
        reward, info = play(env, index)
        assert reward == pytest.approx(1.0), info
        assert info["correct"] and info["format_ok"] and info["within_25km"]


def test_what_it_reports() -> None:
    env = make("GeoSpot-v0", countries=8, cities=1, stage=3)
    observation, opening = check_reset(env.reset(seed=0, options={"index": 3, "split": "test"}))
    assert isinstance(observation.messages[0].parts[0], EncodedImage)
    assert "Latitude: <degrees" in str(observation.messages[0].parts[1])
    assert opening["distance_km"] == FARTHEST_KM and opening["format_ok"] is False
    answer = "City: Sydney\nRegion: New South Wales\nCountry: AU\nLatitude: -33.9\nLongitude: 151.2"
    reward, info = check_step(env.step(answer))[1], env.reset()[1]
    env.reset(options={"index": 3, "split": "test"})
    info = env.step(answer)[4]
    assert info["reward"] == reward
    assert info["response"] == answer
    assert info["stage"] == 3 and info["stage_weights"] == {"country": 0.2, "region": 0.3, "city": 0.3, "coords": 0.3}
    assert info["parsed"] == {
        "city": "Sydney", "region": "New South Wales", "country": "AU", "coords": (-33.9, 151.2), "format_valid": True,
    }  # fmt: skip
    truth = info["ground_truth"]
    assert info["d_coords"] == pytest.approx(haversine_km((-33.9, 151.2), (truth["latitude"], truth["longitude"])))
    assert info["distance_km"] == info["d_coords"]
    assert {f"{kind}_{field}" for kind in "dk" for field in ("country", "region", "city", "coords")} <= info.keys()


def test_without_coordinates_the_distance_is_the_farthest() -> None:
    reward, info = play(GeoSpotEnv(), 0, "I cannot tell.")
    assert reward == 0.0
    assert info["d_coords"] is None and info["distance_km"] == FARTHEST_KM
    assert not info["within_500km"]


@pytest.mark.parametrize(
    ("weights", "stage"), [((1, 0, 0), 0), ((0.5, 0, 0), 1), ((0.25, 0.35, 0.15), 2.5), ((1, 1, 1), None)]
)
def test_weights_of_a_stage_are_known_as_that_stage(weights: tuple[float, ...], stage: float | None) -> None:
    _, info = make("GeoSpot-v0", countries=8, cities=1, weights=weights).reset(options={"index": 0})
    assert info["stage_idx"] == (None if stage is None else pytest.approx(stage))


def test_stages_weights_and_kernels_change_the_reward() -> None:
    rewards = {}
    for name, kwargs in {
        "first": {"stage": 0}, "last": {}, "between": {"stage": 2.5}, "weights": {"weights": (1, 1, 0)}, "loose": {"taus": {"coords": 1e6}},
    }.items():  # fmt: skip
        answer = "Country: {country}" + "\nLatitude: 0\nLongitude: 0" * (name == "loose")
        rewards[name], _ = play(GeoSpotEnv(**kwargs), 1, answer)  # type: ignore[arg-type]
    assert rewards["first"] == pytest.approx(1.0)
    assert rewards["last"] == pytest.approx(0.15 / 1.2)
    assert rewards["between"] == pytest.approx(0.25 / 0.925)
    assert rewards["weights"] == pytest.approx(1 / 2.5)
    assert rewards["loose"] == pytest.approx((0.15 + 0.4) / 1.2, abs=0.01)


# --- Drawn maps: the pin is where it should be, pictures of the splits differ, and every process draws the same


def test_the_pin_is_red_and_in_its_place() -> None:
    for index in range(20):
        image, item = pin_item(60, 5, 96, "train", index, 1)
        red = (np.asarray(image.to_pil()) == PIN).all(2)
        assert 4 <= red.sum() <= 60
        rows, columns = np.nonzero(red)
        assert np.hypot(*np.subtract(world.pixel_of(item.position, 96), (columns.mean(), rows.mean()))) < 2.5


def test_the_city_is_the_nearest_of_the_big_ones() -> None:
    for index in range(30):
        _, item = pin_item(20, 7, 64, "train", index, 0)
        assert item.country and item.region
        near = min(big_cities(item.country.country, 7), key=lambda city: haversine_km(city.position, item.position))
        assert item.city == near
        assert item.city and item.city.country == item.country.country
        assert item.region.id == item.city.region


def test_positions_are_inside_their_country() -> None:
    boxes = {"AU": (-45, -9, 112, 155), "BR": (-34, 6, -75, -34), "IN": (6, 38, 67, 98), "CA": (41, 84, -142, -52)}
    rng = np.random.default_rng(1)
    for code, (south, north, west, east) in boxes.items():
        for _ in range(100):
            latitude, longitude = world.random_position(rng, code)
            assert south < latitude < north and west < longitude < east
