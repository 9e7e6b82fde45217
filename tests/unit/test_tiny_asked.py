"""Every tiny model is asked as it was taught: an episode of its recipe has the tokens, patches and questions of its lessons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_vlm.chat import ChatCodec
from rl_vlm.config import load_config
from rl_vlm.envs.registry import make
from rl_vlm.models.supervised import DialogueEncoder
from rl_vlm.types import EncodedImage
from rl_vlm.zoo.tiny import model as tiny
from rl_vlm.zoo.tiny.variants import VARIANTS

CONFIGS = Path(__file__).parents[2] / "configs"
# Variant, the recipe that trains it, and replies that keep an episode open until the last one.
ASKED = [
    ("gridwalk", "gridwalk_tiny", ["north", "nowhere", "up"]),
    ("minigrid", "minigrid_tiny", ["nothing", "north: south: behind: left", "right"]),
    ("zoom", "zoom_tiny", ["See top left\nzoom top left", "See nothing\nzoom bottom right", "See bricks\nAnswer: bricks"]),
    ("geo3k", "geo3k_offline_tiny", ["20 60: 100 Answer: \\boxed{100}"]),
    ("scenes", "nlvr2_tiny", ["2 left 1 right, more left: True"]),
    ("scenes", "caption_tiny", ["a red circle at the top left"]),
    ("geospot", "geospot_tiny", ["5 3"]),
    ("small", "quickstart", ["<answer>3</answer>"]),
]  # fmt: skip


@pytest.mark.parametrize(("variant", "recipe", "replies"), ASKED, ids=[recipe for _, recipe, _ in ASKED])
def test_an_episode_is_encoded_as_its_lessons_are(variant: str, recipe: str, replies: list[str]) -> None:
    processor = tiny.build_processor(variant)
    codec = ChatCodec(processor.tokenizer, processor.chat_template, processor.image_token)
    run = load_config(CONFIGS / f"{recipe}.yaml")
    env = make(run.env.id, **run.env.make_kwargs())
    messages = env.reset(options={"index": 1})[0].messages
    ids, turns = np.zeros(0, dtype=np.int32), []
    for number, reply in enumerate(replies):
        (message,) = messages
        span = codec.encode_continuation([message], ended=True) if number else codec.encode_prompt([message])
        ids = np.concatenate([ids, span.token_ids, [*processor.tokenizer(reply)["input_ids"], codec.end_of_turn_id]])
        parts = tuple(part if isinstance(part, str) else pixels(part) for part in message.parts)
        turns.append((message.role, parts, reply))
        messages = env.step(reply)[0].messages
    example = DialogueEncoder(processor).encode_chat(turns)
    pad = codec.image_token_id
    single = [token for k, token in enumerate(example.token_ids) if token != pad or example.token_ids[k - 1] != pad]
    assert single == ids.tolist()
    assert len(example.pixels["image_grid_thw"]) == sum(
        not isinstance(part, str) for _, parts, _ in turns for part in parts
    )

    draw = VARIANTS[variant].lessons.drawer(0)
    taught = {(role, _text(parts)) for _ in range(150) for role, parts, _ in draw()}
    if run.env.id not in ("NLVR2-v0",):  # whose statements are many
        assert {(role, _text(parts)) for role, parts, _ in turns} <= taught
    else:
        assert all(parts[-1].endswith(" True or False?") for _, parts, _ in turns)


LESSONS = [
    *((variant, recipe) for variant, recipe, _ in ASKED),
    ("judge", "caption_judge_tiny"),
    ("mixture", "mixture_tiny"),
]


@pytest.mark.acceptance
@pytest.mark.parametrize(("variant", "recipe"), LESSONS, ids=[recipe for _, recipe in LESSONS])
def test_no_picture_of_a_test_split_is_in_a_lesson(variant: str, recipe: str) -> None:
    run, draw = load_config(CONFIGS / f"{recipe}.yaml"), VARIANTS[variant].lessons.drawer(1)
    turns = [turn for _ in range(2000) for turn in draw()]
    shown = {(part.shape, part.tobytes()) for _, parts, _ in turns for part in parts if isinstance(part, np.ndarray)}
    for one in run.env.mixture or [run.env]:
        env, test = make(one.id, **one.make_kwargs()), set()
        for index in range(min(env.num_items("test") or 400, 400)):
            images = [
                pixels(image) for image in env.reset(options={"index": index, "split": "test"})[0].messages[-1].images
            ]
            test |= {(image.shape, image.tobytes()) for image in images}
        assert len(shown) > 400 and len(test) > 5 and not shown & test
        assert {shape for shape, _ in test} <= {shape for shape, _ in shown}


def test_the_longest_reply_to_a_mixture_fits_its_configuration() -> None:
    reply = "a yellow triangle at the bottom right, a yellow square at the top right and a green circle at the top left"
    budget = load_config(CONFIGS / "mixture_tiny.yaml").rollout.max_new_tokens_per_turn
    assert len(tiny.build_processor("mixture").tokenizer(reply).input_ids) < budget  # and the end of the turn


def pixels(image: Any) -> np.ndarray:
    return np.asarray(image.to_pil() if isinstance(image, EncodedImage) else image)


def _text(parts: Any) -> str:
    return "".join(part for part in parts if isinstance(part, str))
