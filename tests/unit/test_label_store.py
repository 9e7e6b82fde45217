"""Labels on disk: nothing is lost, a kill leaves no half session, replay needs nobody."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from label_support import pair, random_pairs, segment

from rl_vlm.config import PreferenceSection, parse_config
from rl_vlm.labelling.labels import SKIPPED, Label, Segment, SegmentPair
from rl_vlm.labelling.query_log import COLUMNS, log_row, query_log
from rl_vlm.labelling.store import LabelStore, label_cache
from rl_vlm.preference.feedback import check_cache
from rl_vlm.runs.preference import inspect_preference_run
from rl_vlm.types import UserInputError

LABELS = [
    Label(0, (0.7, 0.2, 0.1), "[given] 0\n[swapped] 1", 0.5, answers=(0, 0)),
    Label(-1, error="HTTP 503"),
    Label(-1, (0.1, 0.1, 0.8), "tie", 0.1, answers=(-1, 1)),
    Label(1, text="lone surrogate \ud800"),
]


def same(a: Segment, b: Segment) -> bool:
    frames = (a.frames is None) == (b.frames is None) and (a.frames is None or bool((a.frames == b.frames).all()))
    arrays = ("observations", "actions", "true_rewards")
    return frames and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    pairs = [*random_pairs(3), SegmentPair(segment([1, 2, 3]), segment([4, 5, 6]))]
    store = LabelStore(tmp_path / "labels")
    assert len(store) == 0
    assert store.append(pairs, LABELS, step=2000, time=12.5) == 1
    assert store.append([], [], step=4000, time=13.0) == 2
    found_pairs, found_labels = LabelStore(tmp_path / "labels").read(1)
    for read, written in zip(found_pairs, pairs, strict=True):
        assert same(read.first, written.first) and same(read.second, written.second)
    for read_label, written_label in zip(found_labels, LABELS, strict=True):
        assert (read_label.value, read_label.error) == (written_label.value, written_label.error)
        assert read_label.answers == written_label.answers and read_label.seconds == written_label.seconds
        assert read_label.probabilities == (
            None if written_label.probabilities is None else pytest.approx(written_label.probabilities)
        )
    assert [label.text for label in found_labels] == [label.text.replace("\ud800", "?") for label in LABELS]
    assert LabelStore(tmp_path / "labels").read(2) == ([], [])


def test_equal_pictures_are_kept_once(tmp_path: Path) -> None:
    store = LabelStore(tmp_path)
    store.append([pair(1, 2), pair(2, 1)], [Label(0), Label(1)], step=0, time=0)
    assert len(list((tmp_path / "images").iterdir())) == 2


def test_a_resumed_run_goes_back_and_loses_nothing(tmp_path: Path) -> None:
    store = LabelStore(tmp_path)
    for number in range(3):
        store.append(random_pairs(1, seed=number), [Label(0)], step=number, time=0)
    store.rewind(1)
    assert len(store) == 1
    assert store.append(random_pairs(1, seed=9), [Label(1)], step=9, time=0) == 2
    store.rewind(1)
    assert len(list((tmp_path / "superseded").iterdir())) == 3


@pytest.mark.parametrize("value", [None, "None", "null", "", " none ", "NULL"])
def test_no_cache_has_many_names(value: str | None) -> None:
    assert label_cache(value) is None


def test_a_cache_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="elsewhere"):
        label_cache(tmp_path / "elsewhere")
    with pytest.raises(UserInputError, match="sessions"):
        label_cache(tmp_path)
    LabelStore(tmp_path).append([pair(1, 2)], [Label(0)], step=0, time=0)
    assert label_cache(str(tmp_path)) == tmp_path


def test_pickles_are_no_cache_and_their_converter_is_named(tmp_path: Path) -> None:
    (tmp_path / "2024.pkl").write_bytes(b"")
    for value in (tmp_path, tmp_path / "2024.pkl"):
        with pytest.raises(UserInputError, match="import-labels"):
            label_cache(value)
    labels = {"source": "scripted", "cache": str(tmp_path)}
    algorithm, env = {"name": "preference_sac"}, {"id": "Pendulum-v1"}
    run = parse_config({"algorithm": algorithm, "env": env, "preference": {"labels": labels}})
    with pytest.raises(UserInputError, match="import-labels"):
        inspect_preference_run(run)  # what --dry-run does


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 96}, r"does not fit this run: .* \(96, 96, 3\), not of \(64, 64, 3\)"),
        ({"segment_length": 3}, "does not fit this run: It has segments of 1 steps"),
        ({"reward_model": {"architecture": "mlp"}}, r"does not fit this run: .* \(4,\), not of \(5,\)"),
    ],
)
def test_a_cache_that_does_not_fit_the_run_is_refused_before_it_starts(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    """A session without pairs says nothing; the second one is looked at."""
    store = LabelStore(tmp_path)
    store.append([], [], step=0, time=0)
    store.append([pair(1, 2)], [Label(0)], step=0, time=0)
    preference = {"image_size": 64, "reward_model": {"architecture": "cnn"}, "labels": {"cache": str(tmp_path)}}
    preference["labels"]["source"] = "cache"  # type: ignore[index]
    sections = {"algorithm": {"name": "preference_sac"}, "env": {"id": "Pendulum-v1"}}  # 3 + 1 numbers
    inspect_preference_run(parse_config({**sections, "preference": preference}))
    with pytest.raises(UserInputError, match=message):
        inspect_preference_run(parse_config({**sections, "preference": {**preference, **changes}}))


def test_a_cache_without_pictures_cannot_teach_a_model_of_pictures(tmp_path: Path) -> None:
    plain = Segment(np.zeros((1, 3), np.float32), np.zeros((1, 1), np.float32), np.zeros(1, np.float32))
    LabelStore(tmp_path).append([SegmentPair(plain, plain)], [Label(0)], step=0, time=0)
    with pytest.raises(UserInputError, match="preference.reward_model.architecture"):
        check_cache(tmp_path, PreferenceSection(reward_model={"architecture": "cnn"}), (3, 1))  # type: ignore[arg-type]
    check_cache(tmp_path, PreferenceSection(reward_model={"architecture": "mlp"}), (3, 1))  # type: ignore[arg-type]


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from label_support import random_pairs
from pathlib import Path
from rl_vlm.labelling.labels import Label
from rl_vlm.labelling.query_log import log_row, query_log
from rl_vlm.labelling.store import LabelStore
store, log = LabelStore(sys.argv[1]), query_log(Path(sys.argv[1]) / "log.csv")
pairs = random_pairs(8)
for number in range(1, 100000):
    labels = [Label(number % 2, text="text " * 200)] * 8
    store.append(pairs, labels, step=number, time=0.0)
    log.add(*(log_row(pair, label, number, 0.0) for pair, label in zip(pairs, labels)))
    print(number, flush=True)
"""


@pytest.mark.slow
def test_a_kill_in_the_middle_of_writing_leaves_whole_sessions(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(Path(__file__).parent)]
    for number in range(2):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()  # it is writing
        time.sleep(0.03 + 0.017 * number)
        process.send_signal(signal.SIGKILL)
        written = [int(line) for line in process.stdout.read().split()]
        process.wait(timeout=900)
        process.stdout.close()
        sessions = list(LabelStore(tmp_path).sessions())
        assert len(sessions) >= max(written, default=1)
        assert all(len(pairs) == len(labels) == 8 for pairs, labels in sessions)
        rows = list(csv.DictReader((tmp_path / "log.csv").open()))
        assert len(rows) >= 8 * max(written, default=1) - 8
        os.truncate(tmp_path / "log.csv", 0)
        LabelStore(tmp_path).rewind(0)


def test_the_log_has_the_originals_columns_first(tmp_path: Path) -> None:
    log = query_log(tmp_path / "vlm_query_log.csv")
    pairs = [SegmentPair(segment([1, 2]), segment([3, 4])), pair(5, 6), pair(7, 8), pair(1, 30)]
    log.add(*(log_row(pair, label, 3, 1.7e9 + 0.25) for pair, label in zip(pairs, LABELS, strict=True)))
    log.add(log_row(pairs[0], Label(-1, error=SKIPPED), 4, 1.7e9))
    text = (tmp_path / "vlm_query_log.csv").read_text()
    assert text.startswith("ground_truth_score_1,ground_truth_score_2,vlm_predicted_label,timestamp,train_iter,")
    rows = list(csv.DictReader(text.splitlines()))
    assert len(text.splitlines()) == 6 and tuple(rows[0]) == COLUMNS
    assert [row["vlm_predicted_label"] for row in rows] == ["0", "", "-1", "1", ""]
    assert (float(rows[0]["ground_truth_score_1"]), float(rows[0]["ground_truth_score_2"])) == (-3, -7)
    assert rows[0]["timestamp"] == "1700000000.25" and rows[0]["train_iter"] == "3"
    assert (
        rows[0]["raw_text"] == "[given] 0\\n[swapped] 1" and rows[0]["order"] == "both" and rows[2]["answers"] == "-1 1"
    )
    assert rows[1]["error"] == "HTTP 503" and float(rows[0]["probability_first"]) == 0.7


def test_a_session_cannot_name_a_picture_outside_of_the_store(tmp_path: Path) -> None:
    store = LabelStore(tmp_path / "labels")
    store.append(random_pairs(2), [Label(0)] * 2, step=0, time=0)
    pictures = sorted((tmp_path / "labels" / "images").iterdir())
    (tmp_path / "private").mkdir()
    shutil.copy(pictures[0], tmp_path / "private" / "passport.png")
    session = tmp_path / "labels" / "session-000001.parquet"
    rows = pq.ParquetFile(session).read().to_pylist()
    for name in ("../../private/passport", str(tmp_path / "private" / "passport")):
        rows[0]["first"]["frames"][0] = name
        pq.write_table(pa.Table.from_pylist(rows, schema=pq.ParquetFile(session).schema_arrow), session)
        with pytest.raises(UserInputError, match=r"Cannot read the labels in .* (leaves the folder|no such file)"):
            store.read(1)


def test_damage_is_named(tmp_path: Path) -> None:
    store = LabelStore(tmp_path)
    store.append([pair(1, 2)], [Label(0)], step=0, time=0)
    next(iter((tmp_path / "images").iterdir())).unlink()
    with pytest.raises(UserInputError, match="Cannot read the labels"):
        store.read(1)
    (tmp_path / "session-000001.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(UserInputError, match="Cannot read the labels"):
        store.read(1)
    os.replace(tmp_path / "session-000001.parquet", tmp_path / "session-000003.parquet")
    with pytest.raises(UserInputError, match="lacks sessions"):
        len(store)
