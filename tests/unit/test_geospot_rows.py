"""Street views: read lazily from parquet, bad rows named, splits that share nothing."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rl_vlm.envs.data import BadRowError
from rl_vlm.types import UserInputError
from rl_vlm.zoo.geospot.environment import GeoSpotEnv

PLACES = [
    (48.86, 2.35, "FR", "Île-de-France", "Paris"),
    (-33.87, 151.2, "AU", "New South Wales", "Sydney"),
    (35.69, 139.69, "JP", "Tokyo", "Tokyo"),
    (40.71, -74.0, "US", "New York", "New York City"),
]


def png(number: int, size: tuple[int, int] = (40, 30)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (number * 20 % 256, 90, 120)).save(buffer, format="PNG")
    return buffer.getvalue()


def rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    found = []
    for number in range(start, start + count):
        latitude, longitude, country, region, city = PLACES[number % len(PLACES)]
        found.append(
            {
                "image": {"bytes": png(number), "path": None}, "latitude": latitude, "longitude": longitude,
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
    "no image": {"image": None},
    "not an image": {"image": {"bytes": b"hello", "path": None}},
    "a cut image": {"image": {"bytes": png(0, (400, 400))[:200], "path": None}},
    "no latitude": {"latitude": None},
    "latitude beyond the pole": {"latitude": 91.0},
    "NaN": {"longitude": float("nan")},
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


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("{0}/train.parquet@[8:]", "selects none of the 8 rows"),
        ({"train": "{0}/train.parquet@[:5]", "test": "{0}/train.parquet@[4:]"}, "share rows"),
        ({"train": "{0}/train.parquet", "test": "{0}/train.parquet"}, "share rows"),
        ({"train": "{0}/train.parquet", "test": "{0}/../{1}/train.parquet@[:1]"}, "share rows"),
        ("{0}/nothing", "no file or folder"),
        ("{0}/empty", "neither train.parquet"),
    ],
)
def test_empty_and_overlapping_splits_are_refused(folder: Path, data: Any, says: str) -> None:
    (folder / "empty").mkdir()
    names = (folder, folder.name)
    if isinstance(data, dict):
        source: Any = {split: text.format(*names) for split, text in data.items()}
    else:
        source = data.format(*names)
    with pytest.raises(UserInputError, match=says):
        GeoSpotEnv(source).num_items("train")


def test_a_file_without_the_columns_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": ["a"], "latitude": [1.0]}), tmp_path / "train.parquet")
    with pytest.raises(UserInputError, match="longitude, country"):
        GeoSpotEnv(str(tmp_path)).num_items("train")


@pytest.mark.parametrize("column", ["latitude", "city"])
def test_a_column_that_is_there_twice_is_refused(tmp_path: Path, column: str) -> None:
    names = ["image", "latitude", "longitude", "country", "city", column]
    pq.write_table(pa.table([pa.array(["1"])] * 6, names=names), tmp_path / "train.parquet")
    with pytest.raises(UserInputError, match=f"train.parquet has the column {column} more than once"):
        GeoSpotEnv(str(tmp_path)).num_items("train")
