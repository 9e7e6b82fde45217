"""The tiny all-rounder: all lessons are taught, their words are tokens, and its figures are those of the three that it stands for."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from rl_vlm.models.supervised import DialogueEncoder
from rl_vlm.zoo.tiny import allrounder
from rl_vlm.zoo.tiny import model as tiny


@pytest.fixture(scope="module")
def processor() -> Any:
    return tiny.build_processor("mixture")


def test_the_warm_start_depends_on_its_seed_alone(processor: Any, encoder: DialogueEncoder) -> None:
    losses = []
    for seed in (0, 0, 1):
        model = tiny.build_model(0, processor.tokenizer, "mixture")
        losses.append(allrounder.warm_start(model, encoder, seed, steps=2, batch=6))
    assert losses[0] == losses[1] != losses[2]


def test_lessons_of_all_three_are_drawn(
    processor: Any, encoder: DialogueEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []
    for name in ("target_dialogue", "perception_dialogue", "draw_lesson", "draw_glances"):
        original = getattr(allrounder, name)
        monkeypatch.setattr(
            allrounder, name, lambda rng, name=name, original=original: drawn.append(name) or original(rng)
        )
    model = tiny.build_model(0, processor.tokenizer, "mixture")
    allrounder.warm_start(model, encoder, 0, steps=1, batch=400)
    shares = {name: drawn.count(name) / 400 for name in set(drawn)}
    about = pytest.approx(0.22, abs=0.07)
    assert shares["target_dialogue"] + shares["perception_dialogue"] == about
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
def test_replies_fit_the_configuration(processor: Any, reply: str, budget: int) -> None:
    assert len(processor.tokenizer(reply).input_ids) <= budget


def test_it_reports_what_the_three_report(
    processor: Any, encoder: DialogueEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny.build_model(0, processor.tokenizer, "mixture").eval()
    with caplog.at_level(logging.INFO):
        allrounder.log_accuracy(model, encoder, 1.0, 2.0)
    assert [message.split(":")[0] for message in caplog.messages] == ["tiny model", "tiny observer", "tiny inspector"]
