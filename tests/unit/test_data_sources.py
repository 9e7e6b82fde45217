"""Where question sets come from: one file per split, mappings, and the hub."""

import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_vlm.config import load_config
from rl_vlm.envs.data import TableSet, open_table
from rl_vlm.envs.questions import QUESTIONS
from rl_vlm.types import UserInputError

GEO3K = Path(__file__).parents[1] / "fixtures" / "geo3k"


def test_a_single_file_serves_one_split_only():
    assert len(TableSet(QUESTIONS, str(GEO3K / "train.parquet")).split("train")) == 8
    assert len(TableSet(QUESTIONS, str(GEO3K / "test.parquet@[0:2]")).split("test")) == 2
    with pytest.raises(UserInputError, match="train"):
        TableSet(QUESTIONS, str(GEO3K / "train.parquet")).split("test")
    with pytest.raises(UserInputError, match="test"):
        TableSet(QUESTIONS, str(GEO3K / "test.parquet")).split("train")


@pytest.mark.parametrize(("first", "second"), [("train", "test"), ("test", "train")])
def test_splits_that_share_rows_are_refused(first, second, tmp_path):
    file = GEO3K / "train.parquet"
    for name in ("train", "test"):
        shutil.copy(file, tmp_path / f"{name}.parquet")
    overlapping = {"train": f"{file}@[0:6]", "test": f"{file}@[4:8]"}
    for shared in (overlapping, str(tmp_path), {"train": str(file), "test": str(tmp_path / "test.parquet")}):
        tables = TableSet(QUESTIONS, shared)
        assert len(tables.split(first))
        for _ in range(2):
            with pytest.raises(UserInputError, match="share rows"):
                tables.split(second)
    apart = TableSet(QUESTIONS, {"train": f"{file}@[0:6]", "test": f"{file}@[6:8]"})
    assert (len(apart.split("train")), len(apart.split("test"))) == (6, 2)
    with pytest.raises(UserInputError, match="test split"):
        TableSet(QUESTIONS, {"train": str(file)}).split("test")


@pytest.mark.parametrize("source", ["/no/such/place", "./nowhere", "missing.parquet", "a/b/c", ""])
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(source):
    with pytest.raises(UserInputError):
        open_table(QUESTIONS, source, "train")


def test_a_hub_set_that_is_not_cached_says_how_to_fetch_it(monkeypatch, tmp_path):
    import datasets

    def offline(name, split):
        raise ConnectionError(f"Couldn't reach {name!r} on the Hub (OfflineModeIsEnabled)")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserInputError, match="rl-vlm fetch"):
        open_table(QUESTIONS, "owner/name", "train")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-data").mkdir()
    with pytest.raises(UserInputError, match="Did you mean my-data?"):
        open_table(QUESTIONS, "my-dta", "train")


def test_a_hub_set_is_read_as_it_is_stored(monkeypatch, tmp_path):
    import datasets

    stored = datasets.Dataset.from_parquet(str(GEO3K / "test.parquet"), cache_dir=str(tmp_path))
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: stored)
    table = open_table(QUESTIONS, "owner/name@[1:3]", "test")
    local = open_table(QUESTIONS, str(GEO3K), "test")
    assert table.validate() == 2
    assert [table[i].images for i in range(2)] == [local[i].images for i in (1, 2)]
    assert table[0].where == "owner/name, row 1"


@pytest.mark.parametrize("kind", ["file", "folder", "mapping"])
def test_the_hint_for_a_missing_test_split_works_as_it_is_printed(tmp_path, kind):
    rows = {"problem": ["?"] * 150, "answer": ["5"] * 150, "images": [[]] * 150}
    file = tmp_path / "train.parquet"
    pq.write_table(pa.table(rows), file)
    source = {"file": str(file), "folder": str(tmp_path), "mapping": {"train": f"{file}@[0:9]"}}[kind]
    with pytest.raises(UserInputError) as refused:
        TableSet(QUESTIONS, source).split("test")
    (override,) = re.findall(r'"(env\.data=.*)"', str(refused.value))
    assert "evaluation.split=train" in str(refused.value)
    config = tmp_path / "run.yaml"
    config.write_text("env: {id: Geo3k-v0}\n")
    data = load_config(config, [override, "evaluation.split=train"]).env.data
    assert [len(TableSet(QUESTIONS, data).split(split)) for split in ("train", "test")] == [50, 100]


@pytest.mark.parametrize("data", ["{dev: a.parquet}", "{train: [a]}", "[a.parquet]"])
def test_a_data_setting_that_names_no_source_is_refused(tmp_path, data):
    (tmp_path / "run.yaml").write_text("env: {id: Geo3k-v0}\n")
    with pytest.raises(UserInputError, match=r"env\.data"):
        load_config(tmp_path / "run.yaml", [f"env.data={data}"])
