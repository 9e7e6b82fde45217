"""The tiny labeller: what it is taught, and that it is asked in the words that it was taught in."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from label_support import pair
from PIL import Image

from rl_vlm.chat import ChatCodec
from rl_vlm.config import LabelsSection
from rl_vlm.labelling.labeller import VLMLabeller
from rl_vlm.labelling.prompts import task_prompts
from rl_vlm.testing import ScriptedEndpoint
from rl_vlm.types import Message
from rl_vlm.zoo.poles.lesson import comparison, right_label
from rl_vlm.zoo.tiny import model as tiny


@pytest.fixture(scope="module")
def processor() -> Any:
    return tiny.build_processor()


@pytest.mark.parametrize(
    ("first", "second", "label"), [(3, -20, 0), (-20, 3, 1), (5, -6.5, -1), (-30, 30, -1), (0, 2.1, 0), (0, -1.9, -1)]
)
def test_the_pole_nearer_to_upright_is_better(first: float, second: float, label: int) -> None:
    assert right_label(first, second, tie=2.0) == label
    assert comparison(first, second).reply == str(label)


def test_it_is_asked_in_the_words_of_its_lessons(processor: Any, encoder: Any) -> None:
    script = ScriptedEndpoint(lambda question: "0")
    labeller = VLMLabeller(script, task_prompts("cartpole-tiny"), LabelsSection(steps=1, both_orders=False))
    asyncio.run(labeller.label([pair(3, -20)]))
    tokenizer = processor.tokenizer
    codec = ChatCodec(tokenizer, processor.chat_template, processor.image_token)
    lesson = comparison(3, -20)
    parts = [part if isinstance(part, str) else Image.fromarray(part) for part in lesson.parts]
    taught, sent = (
        codec.encode_prompt([Message("user", tuple(parts))]),
        codec.encode_prompt(script.questions[0].messages),
    )
    assert taught.token_ids.tolist() == sent.token_ids.tolist()
    assert [image.sha256 for image in taught.images] == [image.sha256 for image in sent.images]
    example = encoder.encode_turn(lesson.parts, lesson.reply)
    answer = tokenizer(lesson.reply)["input_ids"]
    assert example.token_ids[example.targets].tolist() == [*answer, codec.end_of_turn_id]
    assert (example.token_ids == codec.image_token_id).sum() == 8 and len(example.pixels["image_grid_thw"]) == 2
