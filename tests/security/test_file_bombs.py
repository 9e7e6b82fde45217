"""Files that are small on the disk and large in memory are refused before the memory is gone."""

import resource
import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from file_corpus import memo_bomb, parquet_bomb, parquet_nulls
from image_corpus import png

from rl_vlm.envs import data
from rl_vlm.envs.data import BadRowError, QuestionTable, file_rows
from rl_vlm.labelling.import_labels import import_labels
from rl_vlm.labelling.store import Label, LabelStore, Segment, SegmentPair
from rl_vlm.limits import LimitExceededError, call_limited
from rl_vlm.types import RLVLMError, UserInputError


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


@pytest.mark.parametrize("bomb", [parquet_bomb, parquet_nulls])
def test_a_parquet_file_of_kilobytes_does_not_take_gigabytes(bomb, tmp_path):
    file = tmp_path / "train.parquet"
    file.write_bytes(bomb())
    assert file.stat().st_size < 2**20
    # In a process of its own, whose peak is that of the reader.
    program = f"""
        import resource
        from pathlib import Path
        from rl_vlm.envs.data import BadRowError, QuestionTable, file_rows
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            file_rows([Path({str(file)!r})], QuestionTable.COLUMNS).row(0)
        except BadRowError as error:
            print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10, error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    grown, message = done.stdout.split(" ", 1)
    assert int(grown) < 1024 and "row group 0 of the file takes more than 256 MiB in memory" in message


def test_ordinary_row_groups_are_read_whole(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    rows = [
        {"problem": f"p{number}", "answer": "a", "images": [{"bytes": rng.bytes(number % 7 * 100), "path": None}]}
        for number in range(1000)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet", row_group_size=300)
    monkeypatch.setattr(data, "_MOST_ROWS", 64)
    found = file_rows([tmp_path / "train.parquet"], QuestionTable.COLUMNS)
    assert [found.row(number) for number in range(len(found))] == rows


def test_the_budget_grows_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "FREE_BYTES", 1000)
    rows = [{"problem": np.random.default_rng(n).bytes(500).hex(), "answer": "a", "images": []} for n in range(50)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert file_rows([tmp_path / "a.parquet"], QuestionTable.COLUMNS).row(49)["answer"] == "a"
    same = [{"problem": "x" * 10_000, "answer": "a", "images": []} for _ in range(500)]
    pq.write_table(pa.Table.from_pylist(same), tmp_path / "b.parquet", compression="zstd")
    with pytest.raises(BadRowError, match="takes more than"):
        file_rows([tmp_path / "b.parquet"], QuestionTable.COLUMNS).row(0)


def test_a_pickle_of_nine_bytes_does_not_take_gigabytes(tmp_path):
    (tmp_path / "a.pkl").write_bytes(memo_bomb())
    assert (tmp_path / "a.pkl").stat().st_size == 9
    before = peak_mib()
    with pytest.raises(UserInputError, match=r"a\.pkl takes more memory than its size explains"):
        import_labels(tmp_path, tmp_path / "store", observation_size=3)
    assert peak_mib() - before < 300
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pkl"]


def test_a_session_of_pictures_that_are_larger_than_their_files_is_refused(tmp_path):
    empty = np.zeros((1, 0), np.float32)
    part = Segment(empty, empty, np.ones(1, np.float32), np.zeros((1, 8, 8, 3), np.uint8))
    store = LabelStore(tmp_path)
    store.append([SegmentPair(part, part)] * 10, [Label(0)] * 10, step=0, time=0.0)
    (picture,) = (tmp_path / "images").iterdir()
    picture.write_bytes(png(8000, 7900, bytes(8001 * 7900)))  # 190 MB each time that it is named
    assert picture.stat().st_size < 100_000
    before = peak_mib()
    with pytest.raises(UserInputError, match="much larger than its file"):
        store.read(1)
    assert peak_mib() - before < 300


def test_a_function_that_does_not_end_is_stopped():
    with pytest.raises(LimitExceededError, match="^This takes more than 1.5 s to read"):
        call_limited("time:sleep", [60], what="This", seconds=1.5, memory=2**30)


def test_results_and_errors_of_a_limited_function_come_back():
    assert call_limited("operator:add", [1, 2], what="This", seconds=60, memory=2**28) == 3
    with pytest.raises(RLVLMError, match="ZeroDivisionError"):
        call_limited("operator:truediv", [1, 0], what="This", seconds=60, memory=2**28)
    with pytest.raises(LimitExceededError, match="more than 256 MiB"):
        call_limited("operator:mul", [[0], 2**29], what="This", seconds=60, memory=2**28)
    with pytest.raises(LimitExceededError, match="exit code 7"):
        call_limited("os:_exit", [7], what="This", seconds=60, memory=2**28)
