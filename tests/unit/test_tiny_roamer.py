"""The tiny roamer: what it is taught about MiniGrid's rooms, that it is asked as it was taught, and that no policy is taught."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rl_vlm
from rl_vlm.config import load_config
from rl_vlm.zoo.control import lesson as rooms
from rl_vlm.zoo.control.environment import read_word
from rl_vlm.zoo.control.lesson import HEADINGS, WORDS, Room, described, draw_tour, random_room, render, side

CONFIG = Path(__file__).parents[2] / "configs" / "minigrid_tiny.yaml"
ROOM = Room(6, agent=(1, 2), heading="north", goal=(3, 3))


@pytest.fixture
def env() -> Any:
    run = load_config(CONFIG)
    return rl_vlm.make(run.env.id, **run.env.make_kwargs())


# --- what is taught


def test_answers_about_a_room_by_hand() -> None:
    rng = np.random.default_rng(0)
    found = {rooms.random_question(rng, ROOM) for _ in range(2000)}
    assert found == {
        ("Heading?", "north"), ("Where is goal?", "south east"), ("Which side?", "behind right"), ("What is ahead?", "floor"),
        ("Column of agent?", "2"), ("Row of agent?", "3"), ("Column of goal?", "4"), ("Row of goal?", "4"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("heading", "seen"),
    [("north", "behind right"), ("east", "ahead right"), ("south", "ahead left"), ("west", "behind left")],
)
def test_the_side_turns_with_the_agent(heading: str, seen: str) -> None:
    assert side(Room(6, (1, 1), heading, (2, 2))) == seen


def test_what_is_written_agrees_with_minigrids_own_state(env: Any) -> None:
    """Headings, cells and moves are those of MiniGrid's environment, and the picture is the one that Control-v0 shows of them."""
    rng = np.random.default_rng(1)
    for index in range(6):
        observation, _ = env.reset(options={"index": index, "split": "train"})
        for _ in range(5):
            inner = env._inner.unwrapped
            room = Room(6, tuple(int(x) - 1 for x in inner.agent_pos), tuple(HEADINGS)[inner.agent_dir], (3, 3))
            shown = np.asarray(observation.messages[0].images[0])
            assert np.array_equal(shown, render(room))
            word = WORDS[rng.integers(3)]
            observation, _, ended, _, info = env.step(described(room, word))
            assert info["well_formed"]
            if ended:
                assert room.after(word).agent == (3, 3)
                break
            after = room.after(word)
            assert tuple(int(x) - 1 for x in inner.agent_pos) == after.agent
            assert tuple(HEADINGS)[inner.agent_dir] == after.heading


def test_action_words_are_random_wherever_the_goal_is() -> None:
    rng = np.random.default_rng(2)
    words: dict[str, Counter[str]] = {"ahead": Counter(), "behind": Counter()}
    turns = asked = 0
    for _ in range(2500):
        for role, (picture, text), reply in draw_tour(rng):
            turns += 1
            assert role == "user" and picture.shape == (64, 64, 3)
            if text in (rooms.QUESTION, rooms.REMINDER):
                asked += 1
                word = read_word(reply, dict.fromkeys(WORDS))
                assert word is not None
                for name, counts in words.items():
                    counts[word] += name in reply
    assert 0.4 < asked / turns < 0.7
    for counts in words.values():
        assert all(abs(counts[word] / counts.total() - 1 / 3) < 0.04 for word in WORDS)


def test_no_start_of_the_test_split_is_shown(env: Any) -> None:
    rng = np.random.default_rng(3)
    shown = {picture.tobytes() for _ in range(800) for _, (picture, _), _ in draw_tour(rng)}
    test = {
        np.asarray(env.reset(options={"index": index, "split": "test"})[0].messages[0].images[0]).tobytes()
        for index in range(60)
    }
    assert len(shown) > 500 and len(test) > 5 and not shown & test


def test_rooms_of_the_splits_are_different_ones() -> None:
    rng = np.random.default_rng(4)
    drawn = {split: {random_room(rng, (6,), split) for _ in range(300)} for split in ("train", "test")}
    assert drawn["train"] and drawn["test"] and not drawn["train"] & drawn["test"]


# --- how it is asked


# --- the warm start
