"""Free-text answers become the labels and scores that they mean."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from label_answers import LABELS, SCORES

from rl_vlm.labelling.parsing import parse_label, parse_score


@pytest.mark.parametrize(("answer", "label"), LABELS)
def test_an_answer_means_its_label(answer: str, label: int | None) -> None:
    assert parse_label(answer) == label


def test_the_table_is_large_and_balanced() -> None:
    labels = [label for _, label in LABELS]
    assert len(labels) == len({answer for answer, _ in LABELS}) >= 100
    assert all(labels.count(value) >= 20 for value in (0, 1, -1)) and labels.count(None) >= 15


@pytest.mark.parametrize(("answer", "score"), SCORES)
def test_an_answer_means_its_score(answer: str, score: float | None) -> None:
    found = parse_score(answer)
    assert found == (None if score is None else pytest.approx(score))


@given(st.text(alphabet=st.sampled_from("01-. @\nimage12betrworsn'</>think"), max_size=80))
def test_any_text_gets_a_label_or_none(text: str) -> None:
    assert parse_label(text) in (0, 1, -1, None)
    score = parse_score(text)
    assert score is None or score == -1 or 0 <= score <= 1


NAMES = [
    ("Image 1", "Image 2"),
    ("image_1", "image_2"),
    ("Picture #1", "Picture #2"),
    ("IMAGE ONE", "IMAGE TWO"),
    ("the first image", "the second image"),
    ("Image (1)", "Image (2)"),
    ("the left image", "the right image"),
    ("Image 0", "Image 1"),
]
SENTENCES = [
    "The goal is better achieved in {a} than in {b}.",
    "{a} is closer to the goal than {b}.",
    "Compared to {b}, {a} shows more progress.",
    "{a}, compared to {b}, is closer to the goal",
    "{b} is worse than {a}.",
    "I prefer {a} over {b}.",
    "In {b} the pole leans, whereas in {a} it is more upright",
    "Both {b} and {a} show a cart, but {a} is better.",
    "The answer is {a} rather than {b}",
]


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
@pytest.mark.parametrize("sentence", SENTENCES)
def test_whatever_the_images_are_called_swapping_them_swaps_the_label(sentence: str, names: tuple[str, str]) -> None:
    first, second = names
    assert parse_label(sentence.format(a=first, b=second)) == 0
    assert parse_label(sentence.format(a=second, b=first)) == 1
