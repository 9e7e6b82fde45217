"""Of a labeller's answers only the labels and scores that were asked for are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rl_vlm.labelling.labeller import read_label, read_score

TABLES = yaml.safe_load((Path(__file__).parents[1] / "fixtures" / "label_answers.yaml").read_text())


@pytest.mark.parametrize(("answer", "label"), TABLES["labels"])
def test_an_answer_is_its_label_or_is_not_understood(answer: str, label: int | None) -> None:
    assert read_label(answer) == label


@pytest.mark.parametrize(("answer", "score"), TABLES["scores"])
def test_an_answer_is_its_score_or_is_not_understood(answer: str, score: float | None) -> None:
    assert read_score(answer) == (None if score is None else pytest.approx(score))


@given(st.text(alphabet=st.sampled_from("01-. @\nimage12betrworsn'</>think"), max_size=80))
def test_a_label_stands_alone_in_the_last_line(text: str) -> None:
    label = read_label(text)
    if label is not None:
        assert text.strip().splitlines()[-1].rpartition(">")[2].partition("<")[0].strip(" '.") in ("", str(label))
    score = read_score(text)
    assert score is None or score == -1 or 0 <= score <= 1


@pytest.mark.parametrize("noise", ["so, ", "Image 1 ", "0, 1, ", "<think>", "( ", "1 ", "0\n"])
def test_long_answers_take_time_in_proportion_to_their_length(noise: str) -> None:
    long = noise * 200_000  # an expression that backtracks would not end
    assert read_label(f"{long}</think>1") == 1 and read_score(f"{long}</think>0.5") == 0.5
    assert read_label(long + "x") is None and read_score(long + "x") is None
