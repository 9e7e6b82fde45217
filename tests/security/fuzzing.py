"""How long the fuzzers run: RL_VLM_FUZZ_SECONDS for each target, by default a second or two, whatever the machine's speed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

SECONDS = float(os.environ.get("RL_VLM_FUZZ_SECONDS", "0"))
FEW, MANY = 60, 500  # examples in CI, and of a round of a long run

# Examples are drawn and checked on busy machines: neither takes too long. Hypothesis draws the same ones each time where it finds
# a variable CI: rounds of a long run must not repeat each other.
patient = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    max_examples=MANY if SECONDS else FEW,
    database=None,
    derandomize=not SECONDS,
)


def fuzz(strategy: SearchStrategy, check: Callable[[object], None], share: float = 1.0, few: int = FEW) -> int:
    """Check examples: `few`, or with RL_VLM_FUZZ_SECONDS as many as that `share` of the time allows; returns how many there were."""
    count, end = 0, time.monotonic() + SECONDS * share

    def one(example: object) -> None:
        nonlocal count
        if count and SECONDS and time.monotonic() > end:
            return  # the rest of the last round
        count += 1
        check(example)

    chosen = patient if SECONDS else settings(patient, max_examples=few)
    while count == 0 or time.monotonic() < end:
        chosen(given(strategy)(one))()
    print(f"{count} inputs")  # shown by pytest -s or -rP
    return count


@st.composite
def damaged(draw: st.DrawFn, files: Sequence[bytes]) -> bytes:
    """A file of the corpus with some bytes changed, cut out, put in or repeated."""
    data = bytearray(draw(st.sampled_from(files)))
    for _ in range(draw(st.integers(0, 6))):
        place = draw(st.integers(0, max(len(data) - 1, 0)))
        piece = draw(
            st.binary(max_size=8) | st.sampled_from([b"\xff\xda", b"\xff\xd9", b"\0\0\0\0", b"\xff\xff\xff\xff"])
        )
        kind = draw(st.sampled_from(["change", "insert", "cut", "repeat", "end"]))
        if kind == "change":
            data[place : place + len(piece)] = piece
        elif kind == "insert":
            data[place:place] = piece
        elif kind == "cut":
            del data[place : place + draw(st.integers(1, 64))]
        elif kind == "repeat":
            data[place:place] = data[place : place + 64] * draw(st.integers(1, 20))
        else:
            del data[place:]
    return bytes(data)
