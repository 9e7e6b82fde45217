"""Figures from our files and from those of RL-VLM-F and its fork."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t as student_t
from test_cli import output, run

from rl_vlm.labelling.query_log import StepCsv
from rl_vlm.plots.curves import combine, read_curve
from rl_vlm.plots.label_accuracy import histogram, read_labels, summarise
from rl_vlm.preference.evaluation import EpisodeResult, evaluation_metrics
from rl_vlm.runs.preference import EVAL_COLUMNS, evaluation_row
from rl_vlm.types import UserInputError


def eval_csv(
    path: Path, rows: str, header: str = "episode,episode_reward,step,success_rate,true_episode_reward"
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(header + "\n" + rows)
    return path


def test_files_of_the_originals_in_percent_in_fractions_and_without_success(tmp_path: Path) -> None:
    file = eval_csv(tmp_path / "eval.csv", "1,-3.5,10000,0.0,80\n2,-2,20000,5.0,90\n3,-1,30000,100.0,95\n")
    curve = read_curve(file)
    assert curve.to_dict() == {10000: 0, 20000: 0.05, 30000: 1}
    assert read_curve(tmp_path).name == "success_rate"
    assert read_curve(file, column="true_episode_reward").values.tolist() == [80, 90, 95]
    file = eval_csv(tmp_path / "eval.csv", "1,0,1,0.5,0\n2,0,2,1.0,0\n")
    assert read_curve(file).values.tolist() == [0.5, 1.0]  # fractions stay fractions
    file = eval_csv(tmp_path / "eval.csv", "1000,-50,-900\n2000,-10,-100\n", "step,episode_reward,true_episode_reward")
    assert read_curve(file).name == "true_episode_reward" and read_curve(file).tolist() == [-900, -100]


def test_rates_of_our_own_files_are_percent_even_where_all_are_small(tmp_path: Path) -> None:
    log = StepCsv(tmp_path / "eval.csv", EVAL_COLUMNS)
    results = [EpisodeResult(seed, -1.0, 5, float(seed == 7), 0.0) for seed in range(100)]
    log.add(evaluation_row(evaluation_metrics(results), step=10, episode=1))
    assert read_curve(tmp_path).values.tolist() == [0.01]  # one success of 100: 1.0 in the file


@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        ("a,b", "1,2\n", "needs the columns step"),
        ("step,success_rate", "x,y\n", "no line with a number"),
        ("", "", "Cannot read"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, header: str, rows: str, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        read_curve(eval_csv(tmp_path / "eval.csv", rows, header))
    with pytest.raises(UserInputError, match="Cannot read"):
        read_curve(tmp_path / "none.csv")


def test_runs_are_combined_with_students_interval() -> None:
    curves = [pd.Series({0: 0.0, 10: v, 20: 1}) for v in (0.2, 0.4, 0.9)]
    band = combine(curves)
    _, high = student_t.interval(0.95, 2, np.mean([0.2, 0.4, 0.9]), np.std([0.2, 0.4, 0.9], ddof=1) / np.sqrt(3))
    assert band.half is not None
    assert (band.mean[1], band.half[1]) == pytest.approx((0.5, high - 0.5))
    assert combine(curves[:1]).half is None


def test_runs_are_drawn_as_far_as_all_reach_and_interpolated_between() -> None:
    band = combine([pd.Series({0: 0.0, 10: 1.0, 30: 3.0}), pd.Series({5: 1.0, 15: 3.0})])
    assert band.steps.tolist() == [5, 10, 15] and band.mean.tolist() == [0.75, 1.5, 2.25]
    with pytest.raises(UserInputError):
        combine([pd.Series({0: 0.0}), pd.Series({5: 1.0})])


LOG = "ground_truth_score_1,ground_truth_score_2,vlm_predicted_label,timestamp,train_iter\n"


def log_csv(path: Path, *rows: tuple[object, object, object]) -> Path:
    path.write_text(LOG + "".join(f"{a},{b},{label},2026-01-01,1\n" for a, b, label in rows))
    return path


def test_labels_are_right_wrong_or_undecided_and_true_ties_are_ties(tmp_path: Path) -> None:
    file = log_csv(
        tmp_path / "vlm_query_log.csv",
        (2, 1, 0), (1, 2, 1.0), (1, 2, 0), (1, 2, -1), (3, 3, -1), (3, 3, 1), (1, 2, ""), ("", 2, 0), (1, 2, "nan"), (1, 2, 7),
    )  # fmt: skip
    labels = read_labels(tmp_path)
    expected = ["correct", "correct", "incorrect", "no preference", "correct", "incorrect"]
    assert labels.category.tolist() == expected
    found = summarise(labels)
    assert (found["labels"], found["true_ties"], found["no_preference"], found["decided"]) == (6, 2, 2, 3)
    assert found["accuracy"] == pytest.approx(2 / 3) and found["accuracy_low"] < 2 / 3 < found["accuracy_high"]
    file.write_text(LOG)
    with pytest.raises(UserInputError, match="two returns"):
        read_labels(file)
    file.write_text("a,b\n1,2\n")
    with pytest.raises(UserInputError, match="ground_truth_score_1"):
        read_labels(file)


def test_bins_are_linear_and_the_last_holds_the_largest_difference() -> None:
    differences = [0, 0.1, 0.99, 1.0, 5.5, 9.99, 10.0]
    labels = pd.DataFrame({"difference": differences, "category": ["incorrect"] + ["correct"] * 6})
    _, counts = histogram(labels, 10)
    np.testing.assert_array_equal(counts.sum(1), np.histogram(differences, bins=10, range=(0, 10))[0])
    assert counts[0].tolist() == [2, 1, 0]


def test_the_commands_write_the_originals_file_names(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    eval_csv(tmp_path / "run=1" / "eval.csv", "1,0,100,50,0\n2,0,200,100,0\n")
    log_csv(tmp_path / "run=1" / "vlm_query_log.csv", (1, 2, 1), (2, 1, 0))
    assert run("plot", "learning-curve", "run=1", "--smooth-window", 1) == 0
    assert "run=1: 1.000 at step 200, 1 run(s)" in output(capsys)
    assert run("plot", "learning-curve", "a=run=1", "a=run=1/eval.csv", "--output", "x.svg") == 0
    assert "a: 0.750 at step 200 (trailing mean of 5 evaluations), 2 run(s)" in output(capsys)
    assert run("plot", "label-accuracy", "run=1", "--num-bins", 4) == 0
    assert '"accuracy": 1.0' in output(capsys)
    log_csv(tmp_path / "run=1" / "vlm_query_log.csv", (1, 2, -1))
    assert run("plot", "label-accuracy", "run=1") == 0
    assert json.loads(output(capsys), parse_constant=pytest.fail)["accuracy"] is None
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"run=1", "figure4_learning_curve.png", "x.svg", "figure6_query_accuracy.png"}
    assert run("plot", "label-accuracy", "nowhere.csv") == 2
