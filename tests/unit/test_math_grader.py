"""The math grader: what counts as equal, which box counts, and what hostile input costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table

from rl_vlm.rewards.boxes import extract_boxed
from rl_vlm.rewards.math import Grade, Reason, compare, grade_turns, is_equal
from rl_vlm.rewards.normalize import normalize_answer
from rl_vlm.rewards.truths import bare_truth, is_bare, is_value

contents = st.recursive(
    st.text("5x+ ,", min_size=1), lambda inner: inner.map(lambda text: f"5{{{text}}}"), max_leaves=4
)

TABLES = table("math_texts")

# Pairs of an answer and a truth, judged by what is mathematically right and not by what the code gives. "malformed" is no answer to
# anything; "hostile" was made to cost time or memory, or to run code.
TABLE = table("math")
CASES = {kind: [tuple(pair) for pairs in groups.values() for pair in pairs] for kind, groups in TABLE.items()}
CASES["hostile"] += [
    ("1" * 900, "5"),
    ("1" * 5000, "5"),
    ("9" * 400 + "^{" + "9" * 400 + "}", "5"),
    (r"\frac{" * 200 + "1", "5"),
    (r"\sqrt{" * 100 + "2" + "}" * 100, "5"),
    ("(" * 400 + "5" + ")" * 400, "5"),
    ("{" * 1000000, "5"),
    ("-" * 999 + "5", "5.5"),
    ("--" * 100000 + "5", "5"),
    ("1+" * 140 + "x", "x"),
    (",".join("x+1" for _ in range(200)), ",".join("1+y" for _ in range(200))),
    (r"\{" + ",".join(f"x+{i}" for i in range(60)) + r"\}", r"\{" + ",".join(f"y+{i}" for i in range(60)) + r"\}"),
    (" " * 500000 + "6", "5"),
]
MEGABYTE = 1_000_000
FAST = settings(max_examples=150, deadline=None)


@pytest.fixture(scope="module", autouse=True)
def running_child() -> None:
    """Start the child once, so that no test measures its imports."""
    assert is_equal("x+1", "1+x")


def cpu_seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


# --- the table ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "truth"), CASES["right"])
def test_equal_answers_are_correct(answer: str, truth: str) -> None:
    assert compare(answer, truth) is Reason.CORRECT


@pytest.mark.parametrize(("answer", "truth"), CASES["wrong"] + CASES["malformed"])
def test_different_and_malformed_answers_are_never_correct(answer: str, truth: str) -> None:
    assert compare(answer, truth) in {Reason.WRONG, Reason.UNPARSABLE}


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "truth"), CASES["hostile"])
def test_hostile_answers_are_cheap_and_never_correct(answer: str, truth: str) -> None:
    start = time.monotonic()
    assert compare(answer, truth) is not Reason.CORRECT
    assert time.monotonic() - start < 15.0  # the limit of 2 s, the start of a new child, and a busy machine


# --- plain numbers need no child ------------------------------------------------------------------------------------


def spellings(value: Fraction) -> list[str]:
    """Ways to write a rational number."""
    above, below = value.numerator, value.denominator
    sign, size = ("-" if above < 0 else ""), abs(above)
    texts = [f"{above}/{below}", rf"\frac{{{above}}}{{{below}}}", rf"{sign}\dfrac{{{3 * size}}}{{{3 * below}}}"]
    whole, rest = divmod(size, below)
    if whole and rest:
        texts.append(rf"{sign}{whole}\frac{{{rest}}}{{{below}}}")
    if 10**4 % below == 0:
        texts.append(f"{sign}{Fraction(size, 1) // below}.{10**4 * (size % below) // below:04d}")
    return texts


rationals = st.builds(Fraction, st.integers(-999, 999), st.sampled_from([1, 2, 3, 5, 7, 8, 10, 16, 25]))


@FAST
@given(rationals, rationals, st.data())
def test_rationals_are_equal_exactly_when_their_fractions_are(
    one: Fraction, other: Fraction, data: st.DataObject
) -> None:
    answer, truth = (data.draw(st.sampled_from(spellings(value))) for value in (one, other))
    assert is_equal(answer, truth) is (one == other)
    assert is_equal(answer, data.draw(st.sampled_from(spellings(one))))


@pytest.mark.parametrize(("text", "normal"), TABLES["normal_forms"])
def test_normal_forms(text: str, normal: str) -> None:
    assert normalize_answer(text) == normal


@pytest.mark.slow
@FAST
@given(st.text(alphabet="\\frac{}()[]^_,;=. 0123456789xycmsqrtpi%$°√²", max_size=60))
def test_any_text_is_graded_without_an_exception_and_equals_itself(text: str) -> None:
    normalize_answer(text)
    assert is_equal(text, text) is bool(text.strip())


@pytest.mark.parametrize(("text", "content"), TABLES["the_last_box_with_balanced_braces"])
def test_the_last_box_with_balanced_braces(text: str, content: str | None) -> None:
    assert extract_boxed(text) == content


@pytest.mark.parametrize(("stored", "value"), TABLES["truths_as_data_sets_store_them"])
def test_a_truth_is_read_without_its_wrapping(stored: str, value: str) -> None:
    assert bare_truth(stored) == value
    assert bare_truth(value) == value
    assert is_bare(value)
    assert is_value(value) is (value not in TABLES["truths_that_only_their_own_text_answers"])


@pytest.mark.parametrize("truth", TABLES["truths_that_no_answer_equals"])
def test_a_truth_that_no_answer_equals_is_no_bare_value(truth: str) -> None:
    assert not is_bare(bare_truth(truth))


@pytest.mark.parametrize("unit", ["answer: ", "<answer>", "#### ", "**", "'", "answer is\n", "\\boxed{"])
def test_a_long_truth_is_read_fast(unit: str) -> None:
    assert cpu_seconds(lambda: bare_truth(unit * 20_000)) < 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit",
    [r"\boxed{", "{", "}", "\\", r"\boxed", r"\boxed 5", r"\boxed{5}", r"\boxed{}", r"\fbox ", "\\\\boxed{{", " ", "5"],
)
def test_a_megabyte_is_searched_in_under_a_second(unit: str) -> None:
    text = r"\boxed" + unit * (MEGABYTE // len(unit))
    assert cpu_seconds(lambda: extract_boxed(text)) < 1.0
    assert cpu_seconds(lambda: extract_boxed(r"\boxed{" * 100_000 + text + "}" * 100_000)) < 2.0


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        (r"It is \boxed{1/2}.", "0.5", Grade(True, "1/2", Reason.CORRECT)),
        (r"It is \boxed{3}.", "0.5", Grade(False, "3", Reason.WRONG)),
        ("It is 0.5.", "0.5", Grade(False, None, Reason.NO_ANSWER)),
        (r"\boxed{\frac{}{}}", "0.5", Grade(False, r"\frac{}{}", Reason.UNPARSABLE)),
        (r"\boxed{" + "7" * 2000 + "}", "7", Grade(False, "7" * 1000, Reason.TOO_LONG)),
        (r"First \boxed{0.5}, no, \boxed{3}", "0.5", Grade(False, "3", Reason.WRONG)),
        (r"<think>\boxed{3}?</think> It is \boxed{0.5}.", "0.5", Grade(True, "0.5", Reason.CORRECT)),
        (r"<think>\boxed{0.5}</think> I do not know.", "0.5", Grade(False, None, Reason.NO_ANSWER)),
        (r"<think>maybe \boxed{0.5}, or", "0.5", Grade(False, None, Reason.NO_ANSWER)),
    ],
)
def test_grade_gives_the_reason(response: str, truth: str, expected: Grade) -> None:
    assert grade_turns([response], truth) == expected


def test_the_last_turn_with_a_box_counts() -> None:
    assert grade_turns([r"\boxed{4}", r"\boxed{5}", "Done."], "5").correct
    assert not grade_turns([r"\boxed{5}", r"\boxed{4}"], "5").correct
    assert grade_turns([], "5").reason is Reason.NO_ANSWER


def test_a_box_that_opens_in_one_turn_does_not_close_in_the_next() -> None:
    assert grade_turns([r"\boxed{5", "} done"], "5").reason is Reason.NO_ANSWER


@pytest.mark.parametrize(("answer", "truth"), [("x^2", "x*x"), ("12", "12.0"), ("(1,2)", "(1, 2.0)"), ("x=3", "3")])
def test_equality_is_symmetric_where_both_sides_are_plain(answer: str, truth: str) -> None:
    assert is_equal(answer, truth)
    assert is_equal(truth, answer)


@pytest.mark.slow
@FAST
@given(st.text(alphabet="ab {}\\5$\n", max_size=30), contents.filter(str.strip), st.text("ab 5$.", max_size=20))
def test_what_is_put_in_a_box_comes_out(before: str, content: str, after: str) -> None:
    assert extract_boxed(rf"{before}\boxed{{{content}}}{after}") == content.strip()
