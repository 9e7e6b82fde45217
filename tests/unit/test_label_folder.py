"""`rl-vlm label`: which files are pairs, what is written, and how it ends."""

from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from label_support import segment
from PIL import Image
from ports import local_server
from test_cli import failure, output, run

from rl_vlm.labelling.folder import NamedPair, accuracy_by_gap, comparison, find_pairs, label_folder, summary
from rl_vlm.labelling.labeller import LabelStats
from rl_vlm.labelling.labels import Label
from rl_vlm.labelling.store import LabelStore
from rl_vlm.labelling.teachers import ScriptedTeacher
from rl_vlm.plots.label_accuracy import read_labels
from rl_vlm.types import UserInputError


def save(path: Path, angle: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(segment([angle]).frames[0]).save(path)  # type: ignore[index]


def save_pair(folder: Path, number: int = 1) -> None:
    save(folder / f"first_{number}.png", 3)
    save(folder / f"second_{number}.png", 20)


@pytest.mark.parametrize(
    ("first", "second"),
    [("first_000001.png", "second_000001.png"), ("image_6_1.png", "image_6_2.png"), ("First-a.PNG", "Second-a.PNG")],
)
def test_pictures_are_paired_by_their_names(tmp_path: Path, first: str, second: str) -> None:
    save(tmp_path / second, 20)
    save(tmp_path / first, 3)
    (tmp_path / "notes.txt").write_text("x")
    (found,) = find_pairs(tmp_path)
    assert found.names == (first, second)
    assert (found.load().first.frames == segment([3]).frames).all() and np.isnan(found.load().first.true_rewards).all()


def test_pairs_are_listed_with_their_returns(tmp_path: Path) -> None:
    save(tmp_path / "a" / "x.png", 3)
    save(tmp_path / "y.jpg", 20)
    (tmp_path / "pairs.csv").write_text(
        "first,second,ground_truth_score_1,ground_truth_score_2\na/x.png,y.jpg,-3,-20\ny.jpg,a/x.png,-20,-3\n"
    )
    summary = label_folder(tmp_path, ScriptedTeacher())
    assert summary["labels"] == {"0": 1, "1": 1, "-1": 0} and summary["accuracy"] == 1.0
    assert summary["accuracy_of_non_ties"] == 1.0 and summary["errors"] == 0
    rows = list(csv.DictReader((tmp_path / "vlm_query_log.csv").open()))
    assert [(row["first"], row["second"], row["vlm_predicted_label"]) for row in rows] == [
        ("a/x.png", "y.jpg", "0"),
        ("y.jpg", "a/x.png", "1"),
    ]
    assert read_labels(tmp_path).category.tolist() == ["correct", "correct"]


def test_accuracy_by_gap_and_the_table_of_kinds(tmp_path: Path) -> None:
    """By hand: of six pairs with gaps 1 to 6, and one tie, the two nearest are right and wrong, the others right but one
    that is undecided."""
    save(tmp_path / "x.png", 3)
    pairs = [NamedPair(tmp_path, ("x.png", "x.png"), (0.0, float(gap))) for gap in (6, 5, 4, 3, 2, 1, 0)]
    labels = [Label(1), Label(1), Label(-1), Label(1), Label(0), Label(1), Label(0)]
    assert accuracy_by_gap(pairs, labels) == [0.5, 1.0, 1.0]
    one = summary(pairs, labels, LabelStats(pairs=7, questions=14, prompt_tokens=690, sampled_tokens=10))
    table = comparison({"pairs": one, "ratings": {**one, "accuracy": None}}).splitlines()
    assert table[2] == "| pairs | 0.80 | 0.50 / 1.00 / 1.00 | +0.00 | 0.14 | 0 | 100 |" and table[3].startswith(
        "| ratings | – |"
    )


def test_what_is_no_pair_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="folder"):
        find_pairs(tmp_path / "none")
    with pytest.raises(UserInputError, match="holds no pairs"):
        find_pairs(tmp_path)
    save(tmp_path / "first_1.png", 3)
    with pytest.raises(UserInputError, match=r"first_1\.png"):
        find_pairs(tmp_path)
    save(tmp_path / "first_1.jpg", 3)
    with pytest.raises(UserInputError, match="same side"):
        find_pairs(tmp_path)
    (tmp_path / "first_1.jpg").unlink()
    (tmp_path / "second_1.png").write_bytes(b"no picture")
    with pytest.raises(UserInputError, match=r"second_1\.png"):
        find_pairs(tmp_path)
    (tmp_path / "pairs.csv").write_text("a,b\n")
    with pytest.raises(UserInputError, match="lacks the column"):
        find_pairs(tmp_path)
    (tmp_path / "pairs.csv").write_text("first,second,first\na,b,c\n")
    with pytest.raises(UserInputError, match="pairs.csv"):
        find_pairs(tmp_path)


def test_the_command_checks_before_it_works(tmp_path: Path, capsys) -> None:
    save_pair(tmp_path)
    for arguments, message in [
        (["--endpoint", "http://a"], "--goal"),
        (["--goal", "x"], "Say who labels"),
        (["--goal", "x", "--endpoint", "http://a", "--generate", "http://b"], "Say who labels"),
        (["--task", "drawr-open", "--endpoint", "http://a"], "Did you mean drawer-open"),
        (["--goal", "x", "--endpoint", "ftp://a"], "must be an http"),
    ]:
        assert run("label", tmp_path, *arguments) == 2
        assert message in failure(capsys)
    (tmp_path / "vlm_query_log.csv").write_text("x")
    assert run("label", tmp_path, "--goal", "x", "--endpoint", "http://a") == 2 and "exists already" in failure(capsys)


def test_a_labeller_that_is_down_is_told_after_the_first_pair(tmp_path: Path, capsys) -> None:
    for number in range(1, 4):
        save_pair(tmp_path, number)
    code = run("label", tmp_path, "--goal", "x", "--generate", "http://127.0.0.1:9/generate")
    assert code == 1 and "127.0.0.1:9" in failure(capsys)
    (row,) = csv.DictReader((tmp_path / "vlm_query_log.csv").open())
    assert row["vlm_predicted_label"] == "" and "127.0.0.1:9" in row["error"]


def test_an_endpoint_that_refuses_log_probabilities_is_asked_without(tmp_path: Path, capsys) -> None:
    save_pair(tmp_path)

    def reply(_path: str, _headers: object, body: bytes) -> tuple[int, object]:
        refused = "logprobs" in json.loads(body)
        return (400, "no logprobs") if refused else (200, {"choices": [{"message": {"content": "1"}}]})

    with local_server(reply) as url:
        command = ["label", tmp_path, "--goal", "x", "--steps", 1, "--endpoint", f"{url}/v1", "--overwrite"]
        assert run(*command) == 1 and "logprobs" in failure(capsys)
        assert run(*command, "--no-logprobs") == 0 and '"errors": 0' in output(capsys)
    (row,) = csv.DictReader((tmp_path / "vlm_query_log.csv").open())
    assert row["vlm_predicted_label"] == "-1"  # the same answer in both orders


def test_caches_are_imported_on_request(tmp_path: Path, capsys) -> None:
    rng = np.random.default_rng(0)
    data = [rng.integers(0, 256, (3, 16, 32, 3), dtype=np.uint8), np.zeros((3, 1)), np.ones((3, 1))]
    data += [rng.normal(size=(3, 1, 5)), rng.normal(size=(3, 1, 5)), np.zeros((3, 1, 1)), np.ones((3, 1, 1))]
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(data))
    assert run("import-labels", tmp_path, tmp_path / "store", "--observations", 4) == 0
    assert "Wrote 3 pairs of 1 sessions" in output(capsys)
    assert [label.value for label in LabelStore(tmp_path / "store").read(1)[1]] == [1, 1, 1]


@pytest.mark.parametrize("escape", ["../private/passport.jpg", "absolute", "link.jpg"])
def test_a_picture_outside_of_the_folder_is_not_read(tmp_path: Path, escape: str) -> None:
    folder, passport = tmp_path / "pairs", tmp_path / "private" / "passport.jpg"
    save(passport, 20)
    save(folder / "a.png", 3)
    (folder / "link.jpg").symlink_to(passport)
    name = str(passport) if escape == "absolute" else escape
    (folder / "pairs.csv").write_text(f"first,second\na.png,{name}\n")
    with pytest.raises(UserInputError, match="leaves the folder"):
        find_pairs(folder)


def test_postscript_is_not_read_under_any_name(tmp_path: Path) -> None:
    save(tmp_path / "first_1.png", 3)
    Image.new("RGB", (4, 4)).save(tmp_path / "second_1.png", format="EPS")
    with pytest.raises(UserInputError, match=r"Cannot read the picture .*second_1\.png: it is not a readable image"):
        find_pairs(tmp_path)
