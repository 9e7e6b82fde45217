"""The tiny inspector: what it is taught about views, that it is asked as it was taught, and that it is not taught when to call."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest

from rl_vlm.chat import ChatCodec
from rl_vlm.envs.registry import make
from rl_vlm.models.supervised import DialogueEncoder
from rl_vlm.types import EncodedImage
from rl_vlm.zoo.drawing import CORNERS
from rl_vlm.zoo.tiny import model as tiny
from rl_vlm.zoo.zoom.data import PATTERNS, random_scene
from rl_vlm.zoo.zoom.lesson import CALL_ODDS, draw_glances, seen


@pytest.fixture(scope="module")
def processor() -> Any:
    return tiny.build_processor("zoom")


# --- what is taught


def test_what_is_seen_by_hand() -> None:
    for hard in (False, True):
        scene = random_scene(Random(0), "bricks", hard, "train")
        home = CORNERS[scene.flag.quadrant]
        assert seen(scene, None) == (home if hard else "bricks")
        for corner in CORNERS:
            assert seen(scene, corner) == ("bricks" if corner == home else "nothing")


def test_actions_are_random_whatever_is_seen() -> None:
    rng = Random(1)
    actions: dict[str, Counter[str]] = {}
    for _ in range(1500):
        for _, _, reply in draw_glances(rng):
            what, _, action = reply.removeprefix("See ").partition("\n")
            if action:
                actions.setdefault(
                    "nothing" if what == "nothing" else "corner" if what in CORNERS else "pattern", Counter()
                )["same" if action in (f"zoom {what}", f"Answer: {what}") else action.split()[0]] += 1
    for what, choices, odds in (("corner", 4, CALL_ODDS), ("pattern", 5, 1 - CALL_ODDS)):
        found = actions[what]
        assert found["same"] / found.total() == pytest.approx(odds / choices, abs=0.04)
    calls = actions["nothing"]["zoom"] / actions["nothing"].total()
    assert calls == pytest.approx(CALL_ODDS, abs=0.05)


def test_no_overview_of_a_test_item_is_shown() -> None:
    rng = Random(2)
    shown = {
        turn[1][0].tobytes() for _ in range(300) for turn in draw_glances(rng)[:1] if isinstance(turn[1][0], np.ndarray)
    }
    env = make("Zoom-v0")
    images = [env.reset(options={"index": index, "split": "test"})[0].messages[0].images[0] for index in range(150)]
    test = {np.asarray(image.to_pil()).tobytes() for image in images if isinstance(image, EncodedImage)}
    assert len(shown) > 200 and len(test) > 140 and not shown & test


# --- how it is asked


def test_an_episode_is_encoded_as_the_warm_start_encodes_it(processor: Any, encoder: DialogueEncoder) -> None:
    """Every token and every patch of an episode with two calls equals that of the dialogue that the warm start would make of it."""
    codec = ChatCodec(processor.tokenizer, processor.chat_template, processor.image_token)
    env = make("Zoom-v0", prompt="brief")
    observation, _ = env.reset(options={"index": 1})
    ids, turns = np.zeros(0, dtype=np.int32), []
    replies = ("See top left\nzoom top left", "See nothing\nzoom bottom right", "See bricks\nAnswer: bricks")
    for number, reply in enumerate(replies):
        (message,) = observation.messages
        span = codec.encode_continuation([message], ended=True) if number else codec.encode_prompt([message])
        ids = np.concatenate([ids, span.token_ids, [*processor.tokenizer(reply)["input_ids"], codec.end_of_turn_id]])
        parts = tuple(np.asarray(part.to_pil()) if isinstance(part, EncodedImage) else part for part in message.parts)
        turns.append((message.role, parts, reply))
        observation = env.step(reply)[0]
    example = encoder.encode_chat(turns)  # type: ignore[arg-type]
    pad = codec.image_token_id
    single = [token for k, token in enumerate(example.token_ids) if token != pad or example.token_ids[k - 1] != pad]
    assert single == ids.tolist() and len(example.grids) == 3
    rng = Random(3)
    drawn = [draw_glances(rng) for _ in range(60)]
    roles = {tuple(turn[0] for turn in dialogue) for dialogue in drawn}
    assert roles == {("user",), ("user", "tool"), ("user", "tool", "tool")}
    assert {turn[1][1:] for dialogue in drawn for turn in dialogue} == {("Which pattern?",), ("See?",), ()}


def test_replies_are_short(processor: Any) -> None:
    longest = max(
        len(processor.tokenizer(reply)["input_ids"]) + 1
        for reply in (
            "See bottom right\nzoom bottom right",
            *(f"See {pattern}\nAnswer: {pattern}" for pattern in PATTERNS),
        )
    )
    assert longest <= 8  # of 10 in configs/zoom_tiny.yaml
