"""The tiny model for mixtures: the lessons of three variants in their shares, and their words as tokens."""

from __future__ import annotations

import pytest

from rl_vlm.zoo.tiny import model as tiny


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
