"""Random answers of a policy for every grader: a verdict within its limits, whatever is written, and no reward for nonsense."""

from __future__ import annotations

import pytest
from fuzzing import SECONDS, fuzz
from hypothesis import strategies as st

from rl_vlm.rewards.math import Reason, grade_turns, normalize_answer
from rl_vlm.rewards.text import judged_refusal, quoted
from rl_vlm.zoo.caption.environment import grade_caption
from rl_vlm.zoo.geospot.places import FIELDS, TAUS_KM, parse_answer, score, stage_weights
from rl_vlm.zoo.nlvr2.environment import read_verdict
from rl_vlm.zoo.zoom.environment import read_answer

pytestmark = pytest.mark.timeout(max(600, 3 * SECONDS))

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
        answer, truth = pair
        for response in (rf"so \boxed{{{answer}}}", answer, rf"\boxed{{{answer}"):
            found = grade_turns([response], truth)
            assert isinstance(found.reason, Reason)
        assert normalize_answer(answer) == normalize_answer(answer)

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
    def check(text: str) -> None:
        answer = parse_answer(text)
        if answer.coords is not None:
            assert -90 <= answer.coords[0] <= 90 and -180 <= answer.coords[1] <= 180
        assert 0 <= score(dict.fromkeys(FIELDS, 10.0), stage_weights(4), TAUS_KM).reward <= 1
        found = grade_caption(text, ["a red cube left of a sphere"])
        assert 0 <= found.f1 <= 1
        assert len(quoted(text, 100)) <= 700
        assert isinstance(judged_refusal(text, 100), str)
        read_answer(text)
        read_verdict(text)

    assert fuzz(ANSWERS | WORDS.map(" ".join) | st.text(max_size=300), check, 0.5) > 10
