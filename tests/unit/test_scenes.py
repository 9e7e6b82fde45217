"""Drawn scenes: what is said about them holds in their pixels, nothing gives it away, and train and test never meet."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable

import numpy as np
import pytest

from rl_vlm.zoo.drawing import BACKGROUND, COLOURS, CORNERS, MAX_SHAPES
from rl_vlm.zoo.scenes.data import (
    EVERY,
    SOME,
    STATEMENT_KINDS,
    Noun,
    Scene,
    Statement,
    caption_item,
    caption_of,
    count_pairs,
    joined,
    pair_item,
    picture_of,
)

STATEMENTS = [
    *(Statement("equal", noun) for noun in (*SOME, EVERY)),
    *(Statement("sum", noun, number) for noun in SOME for number in (1, 2, 3, 4)),
    *(Statement("sum", EVERY, number) for number in (3, 4, 5, 6, 7)),
    *(Statement("one", noun) for noun in SOME),
    *(Statement("more", noun, side) for noun in SOME for side in (0, 1)),
]


def seen(scene: Scene) -> list[tuple[str, str, int]]:
    """(colour, kind, quadrant) of each shape, read from the pixels alone: the kind from how much of its box a shape fills."""
    pixels = np.asarray(picture_of(scene).to_pil()).astype(int)
    found = []
    for quadrant in range(MAX_SHAPES):
        row, column = 32 * (quadrant // 2), 32 * (quadrant % 2)
        part = pixels[row : row + 32, column : column + 32]
        drawn = (part != BACKGROUND).any(-1)
        if drawn.any():
            colour = next(name for name, rgb in COLOURS.items() if (part[drawn] == rgb).all())
            rows, columns = np.flatnonzero(drawn.any(1)), np.flatnonzero(drawn.any(0))
            share = drawn.sum() / ((rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1))
            found.append((colour, "square" if share == 1 else "circle" if share > 0.7 else "triangle", quadrant))
    return found


def test_what_is_said_holds_in_the_pixels() -> None:
    for index in range(300):
        pair = pair_item("train", index)
        noun = pair.statement.noun
        left, right = (
            sum(noun.colour in ("", colour) for colour, _, _ in seen(scene))
            for scene in (pair.left, pair.right)
        )  # fmt: skip
        meaning = {
            "equal": left == right, "sum": left + right == pair.statement.number, "one": bool(left) ^ bool(right),
            "more": (right > left) if pair.statement.number else (left > right),
        }  # fmt: skip
        assert meaning[pair.statement.kind] == pair.truth


def test_a_caption_names_what_the_pixels_show() -> None:
    for index in range(100):
        scene = caption_item("test", index)
        phrases = [f"a {colour} {kind} at the {CORNERS[quadrant]}" for colour, kind, quadrant in seen(scene)]
        assert len(phrases) == 1 + index % 3
        assert caption_of(scene) == joined(phrases)


def test_sentences_by_hand() -> None:
    assert [str(statement) for statement in (
        Statement("equal", Noun("red")), Statement("sum", Noun("green"), 1), Statement("sum", EVERY, 5),
        Statement("one", Noun("yellow")), Statement("more", Noun("blue"), 1),
    )] == [
        "Both images hold equally many red shapes.", "The images hold 1 green shape in all.", "The images hold 5 shapes in all.",
        "Exactly one image holds a yellow shape.", "The right image holds more blue shapes than the left.",
    ]  # fmt: skip
    assert [joined(list("abc")[:k]) for k in (1, 2, 3)] == ["a", "a and b", "a, b and c"]


# --- nothing gives the truth away


def right_guesses(statement: Statement, knows: Callable[[tuple[int, int]], Hashable]) -> float:
    """How often the best guess is right of one who knows the sentence and `knows(counts)`: by counting all cases."""
    mass: defaultdict[Hashable, Counter[bool]] = defaultdict(Counter)
    for truth in (True, False):
        pairs = count_pairs(statement, truth)
        for pair in pairs:
            mass[knows(pair)][truth] += 0.5 / len(pairs)  # type: ignore[assignment]
    return sum(max(of.values()) for of in mass.values())


@pytest.mark.parametrize("side", [0, 1])
def test_one_image_and_the_sentence_decide_nothing(side: int) -> None:
    by_kind = defaultdict(list)
    for statement in STATEMENTS:
        assert right_guesses(statement, lambda pair: None) == pytest.approx(0.5)
        assert right_guesses(statement, lambda pair: pair) == pytest.approx(1.0)
        by_kind[statement.kind].append(right_guesses(statement, lambda pair: pair[side]))
    for kind in ("equal", "sum", "one"):
        assert by_kind[kind] == pytest.approx([0.5] * len(by_kind[kind]))
    assert by_kind["more"] == pytest.approx([0.625] * len(by_kind["more"]))
    assert np.mean([np.mean(of) for of in by_kind.values()]) < 0.54


def test_labels_are_balanced_and_kinds_are_equally_frequent() -> None:
    items = [pair_item("test", index) for index in range(2000)]
    assert sum(pair.truth for pair in items) == 1000
    kinds = Counter(pair.statement.kind for pair in items)
    assert all(abs(kinds[kind] - 500) < 80 for kind in STATEMENT_KINDS)
