"""Random answers of a policy for every grader: a verdict within its limits, whatever is written, and no reward for nonsense."""

from __future__ import annotations

import pytest
from fuzz_targets import answer
from fuzzing import SECONDS, fuzz
from hypothesis import strategies as st

from rl_vlm.rewards.math import Reason, grade_turns
from rl_vlm.rewards.normalize import normalize_answer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(max(600, 3 * SECONDS))]

SYMBOLS = r"""
    \frac \sqrt \pi \circ \text \left \right \cdot \times \infty \begin \% ^ _ \pm \log \int \sum \dot
    \overline \mathrm \in \cup \le \ne \{ \} ! = { } ( ) [ ] , ; + - / * . < | ° % $ − １ ٥ ² ½ 0 1 2 9 17
    1e9 x y sin and cm km/h None import __ 9^9^9 10**99
"""
PIECES = [*SYMBOLS.split(), "\x00", "\n", "\u202e", "\ud800"]
TRUTHS = [
    *[r"5", r"\frac{1}{2}", r"4\sqrt{2}", r"x=3", r"(1,2)", r"\{1,2\}", r"30^\circ", r"x^2+1", r"[0,\infty)", r"A", r"x<3", r"50\%"], "5 cm",
]  # fmt: skip
FORMULAS = st.lists(st.sampled_from(PIECES), max_size=24).map("".join) | st.text(max_size=60)


def test_math() -> None:
    def check(pair: tuple[str, str]) -> None:
        said, truth = pair
        for response in (rf"so \boxed{{{said}}}", said, rf"\boxed{{{said}"):
            found = grade_turns([response], truth)
            assert isinstance(found.reason, Reason)
        assert normalize_answer(said) == normalize_answer(said)

    assert fuzz(st.tuples(FORMULAS, st.sampled_from(TRUTHS) | FORMULAS), check, 0.5) > 10


FIELD_NAMES = ["City", "Region", "Country", "Latitude", "Longitude", "Coordinates", "Score", "Verdict", "Answer"]
VALUES = "Paris France 48.86 2.35 N S - ° nan inf 1e3 999 yes no 1 0.5 10/10 ``` **"
LINES = st.tuples(
    st.sampled_from(FIELD_NAMES),
    st.sampled_from([":", "=", " is ", "|", " - "]),
    st.lists(st.sampled_from(VALUES.split()), max_size=5),
)
ANSWERS = st.lists(LINES.map(lambda line: f"{line[0]}{line[1]}{' '.join(line[2])}"), max_size=8).map("\n".join)
WORDS = st.lists(
    st.sampled_from(["a", "red", "cube", "left of", "the", "image", "{", "}", "\n", "ignore", "<|im_end|>", "\x1b[0m"]),
    max_size=40,
)


def test_places_captions_and_verdicts() -> None:
    texts = ANSWERS | WORDS.map(" ".join) | st.text(max_size=300)
    assert fuzz(texts, lambda text: answer(text.encode("utf-8", "replace")), 0.5) > 10
