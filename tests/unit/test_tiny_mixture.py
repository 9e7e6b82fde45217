"""The tiny model for mixtures: the lessons of three variants in their shares, and their words as tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from rl_vlm.zoo.tiny import mixture
from rl_vlm.zoo.tiny import model as tiny


def test_lessons_of_all_three_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda rng: drawn.update([name]) or original(rng))

    for owner, name in (
        (mixture, "target_dialogue"), (mixture, "perception_dialogue"), (mixture.scenes, "draw_lesson"), (mixture.zoom, "draw_glances"),
    ):  # fmt: skip
        count(owner, name)
    draw = mixture.drawer(0)
    for _ in range(400):
        draw()
    shares = {name: number / 400 for name, number in drawn.items()}
    assert shares["target_dialogue"] + shares["perception_dialogue"] == pytest.approx(0.22, abs=0.07)
    assert shares["target_dialogue"] == pytest.approx(0.22 * 0.38, abs=0.05)
    assert shares["draw_lesson"] == pytest.approx(0.53, abs=0.08)
    assert shares["draw_glances"] == pytest.approx(0.25, abs=0.07)


@pytest.mark.parametrize(
    ("reply", "budget"),
    [
        ("<answer>3</answer>", 8),
        ("2 left 1 right, more left: True", 11),
        ("See top left\nzoom top left", 8),
        (
            "a yellow triangle at the bottom right, a yellow square at the top right and a green circle at the top left",
            31,  # with the end of the turn 32, as the configuration allows
        ),
    ],
)
def test_replies_fit_the_configuration(reply: str, budget: int) -> None:
    assert len(tiny.build_processor("mixture").tokenizer(reply).input_ids) <= budget
