"""Free-text answers become the labels and scores that they mean, and never the other image's label."""

from __future__ import annotations

import itertools

import label_answers
import label_answers_fresh
import label_answers_held_out
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_vlm.labelling.parsing import parse_label, parse_score

TABLES = (label_answers, label_answers_held_out, label_answers_fresh)
ORDINARY = [row for table in TABLES for row in table.ORDINARY]
AWKWARD = [row for table in TABLES for row in table.AWKWARD]
UNDECIDED = (-1, None)


@pytest.mark.parametrize(("answer", "label"), label_answers.LABELS)
def test_no_answer_gets_another_label_than_it_means(answer: str, label: int | None) -> None:
    found = parse_label(answer)
    if label in UNDECIDED:
        assert found in UNDECIDED
    else:
        assert found == label or found in UNDECIDED


@pytest.mark.parametrize(("answer", "label"), ORDINARY + AWKWARD)
def test_no_free_text_is_inverted(answer: str, label: int) -> None:
    assert parse_label(answer) in (label, *UNDECIDED)


def test_of_ordinary_answers_at_most_eight_percent_are_lost() -> None:
    lost = [answer for answer, label in ORDINARY if parse_label(answer) != label]
    assert len(lost) <= 0.08 * len(ORDINARY), lost


def test_the_tables_are_large_and_balanced() -> None:
    answers = [answer for answer, _ in ORDINARY + AWKWARD]
    assert len(set(answers)) == len(answers) >= 300
    labels = [label for _, label in ORDINARY]
    assert min(labels.count(0), labels.count(1)) >= 0.4 * len(labels)
    assert sum(label == -1 for _, label in AWKWARD) >= 140


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("There is no difference.", -1),
        ("I can't tell", -1),
        ("-1", -1),
        ("0\n1", -1),
        ("The images show a robot.", None),
        ("", None),
    ],
)
def test_doubt_and_contradiction_are_told_from_what_is_not_understood(answer: str, label: int | None) -> None:
    assert parse_label(answer) == label


NAMES = [
    ("Image 1", "Image 2"),
    ("image_1", "image_2"),
    ("Picture #1", "Picture #2"),
    ("IMAGE ONE", "IMAGE TWO"),
    ("the first image", "the second image"),
    ("the 1st picture", "the 2nd picture"),
    ("**Image 1**", "**Image 2**"),
    ("Image (1)", "Image (2)"),
    ("the left image", "the right image"),
    ("Image A", "Image B"),
]
VERDICTS = [
    "the goal is better achieved in {a} than in {b}",
    "{a} is closer to the goal than {b}",
    "compared to {b}, {a} shows more progress",
    "{a}, compared to {b}, is closer to the goal",
    "{b} is worse than {a}",
    "{b} is further from the goal than {a}",
    "I prefer {a} over {b}",
    "I would choose {a} rather than {b}",
    "in {b} the pole leans, whereas in {a} it is more upright",
    "both {b} and {a} show a cart, but {a} is better",
    "the answer is {a} rather than {b}",
    "the pole in {a} is more upright than in {b}",
    "the drawer in {b} is less open than in {a}",
    "{a}, not {b}",
    "while {b} shows a drawer, {a} achieves the goal better",
    "the better image is {a}",
    "{a} comes closer to the goal than {b} does",
]
BEFORE = [
    "",
    "Overall, ",
    "I think that ",
    "Yes, ",
    "It seems that ",
    "In my opinion, ",
    "Based on the text, ",
    "So ",
    "The images differ. ",
]
AFTER = [
    "",
    ".",
    " because the drawer is not closed there.",
    ", since the handle is out.",
    ".\n\nThe arm is grey in both images.",
]
# What turns a verdict, doubts it, or only speaks of it.
NO_VERDICTS = [
    "I don't think that {s}.",
    "I do not believe {s}",
    "It is false that {s}.",
    "It is not true that {s}.",
    "It is not the case that {s}.",
    "The claim that {s} is wrong.",
    "Is it true that {s}?",
    "Nobody would say that {s}.",
    "I can't say that {s}.",
    "I doubt that {s}.",
    "If the drawer were closed, {s}.",
    "Unless I am wrong about the goal, {s}.",
    "Perhaps {s}.",
    "Maybe {s}, maybe not.",
    "{s}? No.",
    "{s}. That is wrong.",
    "{s}. No, that is not right.",
    "{s}, or maybe it is the other way round.",
    "{s}, if anything can be said at all.",
    "{s}. I am not sure.",
    "Some would say that {s}.",
    "I was asked whether {s}.",
    "It remains unclear whether {s}.",
    "One might say that {s}.",
    "{s}, but it is impossible to tell.",
    "There is no reason to say that {s}.",
]


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
def test_whatever_the_images_are_called_a_verdict_is_never_inverted(names: tuple[str, str]) -> None:
    read = 0
    rows = list(itertools.product(VERDICTS, BEFORE, AFTER, (0, 1)))
    for verdict, before, after, side in rows:
        answer = before + verdict.format(a=names[side], b=names[1 - side]) + after
        found = parse_label(answer)
        assert found in (side, *UNDECIDED), answer
        read += found == side
    assert read >= 0.92 * len(rows)


@pytest.mark.parametrize("wrapped", NO_VERDICTS)
def test_what_speaks_of_a_verdict_is_none(wrapped: str) -> None:
    for verdict, (first, second) in itertools.product(VERDICTS, NAMES[:6]):
        for a, b in ((first, second), (second, first)):
            answer = wrapped.format(s=verdict.format(a=a, b=b))
            assert parse_label(answer) in UNDECIDED, answer


@given(
    st.lists(
        st.sampled_from(
            [
                "Image 1",
                "Image 2",
                "is",
                "not",
                "better",
                "than",
                "the",
                "goal",
                "closer",
                "to",
                "in",
                ",",
                ".",
                "0",
                "1",
            ]
        ),
        max_size=14,
    )
)
def test_a_negation_never_gives_the_label_of_the_negated_words(words: list[str]) -> None:
    text = " ".join(words)
    assert parse_label(text) in (0, 1, -1, None)
    assert parse_label(f"It is not true that {text}".replace(".", "").replace(",", "")) in UNDECIDED


@pytest.mark.parametrize(
    ("answer", "goal", "label"),
    [
        ("The box in Image 2 is more open.", "to open the box", 1),
        ("The box in Image 2 is more open.", "to close the box", None),
        ("The box in Image 2 is more closed.", "to close the box", 1),
        ("The box in Image 2 is more closed.", "to open the box", None),
        ("The cup in Image 1 is closer to the red circle.", "to bring the cup to the red circle", 0),
        ("The cup in Image 1 is closer to the camera.", "to bring the cup to the red circle", None),
        ("The cup in Image 1 is more red.", "to bring the cup to the red circle", None),
    ],
)
def test_the_goal_tells_which_qualities_are_good(answer: str, goal: str, label: int | None) -> None:
    assert parse_label(answer, goal) == label


@pytest.mark.parametrize(
    "text",
    [
        "closer to the goal in the goal of the goal to the goal in " * 400,
        "while a, " * 44 + "b",
        "since a, while b, so yes, " * 14 + "c",
        "of Image 1, than the goal, " * 14,
        "Image 1 than " * 30,
        "of the goal of the " * 21,
        "Image 1, " * 2000,
        "0, 1, " * 2000,
    ],
)
def test_no_text_takes_exponential_time(text: str) -> None:
    assert parse_label(text) in UNDECIDED  # with a pattern that backtracks without bound this does not end


@pytest.mark.parametrize(("answer", "score"), label_answers.SCORES)
def test_an_answer_means_its_score(answer: str, score: float | None) -> None:
    found = parse_score(answer)
    assert found == (None if score is None else pytest.approx(score))


@given(st.text(alphabet=st.sampled_from("01-. @\nimage12betrworsn'</>think"), max_size=80))
def test_any_text_gets_a_label_or_none(text: str) -> None:
    assert parse_label(text) in (0, 1, -1, None)
    score = parse_score(text)
    assert score is None or score == -1 or 0 <= score <= 1
