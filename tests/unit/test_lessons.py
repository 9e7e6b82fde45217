"""What the tiny models are taught before reinforcement learning: to see rightly, and to act at random whatever they see."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from task_support import grid_of

import rl_vlm
from rl_vlm.config import load_config
from rl_vlm.envs.tools import parse_tool_call
from rl_vlm.rewards.boxes import extract_boxed
from rl_vlm.zoo.caption.grading import grade_caption
from rl_vlm.zoo.control import lesson as rooms
from rl_vlm.zoo.control.lesson import HEADINGS, WORDS, Room, described, draw_tour
from rl_vlm.zoo.control.words import read_word
from rl_vlm.zoo.drawing import CORNERS, render
from rl_vlm.zoo.geo3k.lesson import GUESSES, boxed, drawer
from rl_vlm.zoo.geospot import world
from rl_vlm.zoo.geospot.answers import parse_answer
from rl_vlm.zoo.geospot.environment import BRIEF
from rl_vlm.zoo.geospot.lesson import GRID, draw_spot, vocabulary
from rl_vlm.zoo.gridwalk.environment import EXPECTED, QUESTION, parse_move
from rl_vlm.zoo.gridwalk.grids import AGENT, GOAL
from rl_vlm.zoo.gridwalk.lesson import draw_walk, random_question
from rl_vlm.zoo.nlvr2.verdicts import read_verdict
from rl_vlm.zoo.scenes.data import LOOKS, caption_of, pair_item
from rl_vlm.zoo.scenes.data import random_scene as random_shapes
from rl_vlm.zoo.scenes.lesson import VERDICT_QUESTION, draw_lesson, vague_caption, verdict_lesson
from rl_vlm.zoo.tiny.teach import Exchange
from rl_vlm.zoo.zoom.lesson import CALL_ODDS, draw_glances

pytestmark = pytest.mark.slow


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


# --- Geo3k-v0: numbers before the guess are right, the guess is random


@pytest.fixture(scope="module")
def dialogues() -> list[list[Exchange]]:
    draw = drawer(0)
    return [list(draw()) for _ in range(600)]


def test_the_guess_is_random_whatever_the_figure_holds_and_the_numbers_before_it_are_right(
    dialogues: list[list[Exchange]],
) -> None:
    right: list[bool] = []
    guesses: Counter[int] = Counter()
    for dialogue in dialogues:
        reply = dialogue[0].reply
        one, other, guess = map(int, re.match(r"(\d+) (\d+): (\d+) ", reply).groups())  # type: ignore[union-attr]
        assert one <= other < 160 and one + other < 180
        right.append(one + other + guess == 180)
        guesses[guess] += 1
        call = parse_tool_call(reply)
        assert (call.arguments["answer"] if call else extract_boxed(reply)) == str(guess)
    assert abs(np.mean(right) - 1 / 7) < 0.05
    assert set(guesses) == set(GUESSES)


def test_replies_to_calls_are_those_of_the_environment_and_a_right_call_is_boxed(
    dialogues: list[list[Exchange]],
) -> None:
    confirmed = tried_again = 0
    for dialogue in dialogues:
        for (_, _, reply), answered in pairwise(dialogue):
            role, text, following = answered.role, answered.text, answered.reply
            call = parse_tool_call(reply)
            assert call is not None and role == "tool"
            guess = call.arguments["answer"]
            if text.startswith("Score: 1"):
                assert following == boxed(guess)
                confirmed += 1
            else:
                assert text.startswith(f"Score: 0. The answer {guess} is wrong.")
                assert f": {guess} " not in following
                assert parse_tool_call(following) is None or "last one" not in text
                tried_again += 1
        assert parse_tool_call(dialogue[-1].reply) is None
    assert confirmed > 20 and tried_again > 40


# --- NLVR2-v0 and Caption-v0: counts are right, verdicts random, captions vague and never false


def test_a_verdict_is_random_whatever_the_images_hold_and_the_counts_before_it_are_right() -> None:
    rng = Random(0)
    right: list[bool] = []
    for index in range(200):
        pair = pair_item("train", index)
        left, right_count = (pair.statement.noun.count(scene) for scene in (pair.left, pair.right))
        _, (first, second, question), reply = verdict_lesson(pair, verdict=False)
        assert (first == render(pair.left)).all() and (second == render(pair.right)).all()
        assert question == f"{pair.statement} True or False?"
        order = ("same", "more left", "more right")[int(np.sign(left - right_count))]
        assert reply == f"{left} left {right_count} right, {order}: False"
    verdicts: Counter[bool] = Counter()
    for _ in range(3000):
        _, parts, reply = draw_lesson(rng)
        text = str(parts[-1])
        if text.endswith(VERDICT_QUESTION):
            verdict = read_verdict(reply).value
            assert verdict is not None
            verdicts[verdict] += 1
            words = reply.split()
            right.append(_holds(text.removesuffix(VERDICT_QUESTION), int(words[0]), int(words[2])) == verdict)
    assert 0.3 < len(right) / 3000 < 0.5
    assert abs(np.mean(right) - 0.5) < 0.05
    assert abs(verdicts[True] / len(right) - 0.5) < 0.05


def _holds(sentence: str, left: int, right: int) -> bool:
    """The meaning of a sentence, read from its words."""
    if sentence.startswith("Both"):
        return left == right
    if sentence.startswith("Exactly"):
        return (left == 0) != (right == 0)
    if sentence.endswith("in all."):
        return left + right == int(sentence.split()[3])
    return left > right if sentence.startswith("The left") else right > left


def test_captions_leave_out_much_and_say_nothing_false() -> None:
    rng = Random(1)
    scores = []
    for _ in range(500):
        scene = random_shapes(rng, [rng.choice(LOOKS) for _ in range(rng.randint(1, 3))], "train")
        caption = vague_caption(rng, scene)
        truth = caption_of(scene).split()
        assert not set(caption.replace(",", "").split()) - {word.strip(",") for word in truth} - {"shape", "and"}
        scores.append(grade_caption(caption, [caption_of(scene)]).score)
    assert 0.25 < np.mean(scores) < 0.45
    # The likeliest choice at every step leaves colour, kind and place out, so the likeliest caption is vague as well.
    assert np.mean([score == 1 for score in scores]) < 0.05


# --- MiniGrid: what is written agrees with its own state, action words are random


ROAMER = Path(__file__).parents[2] / "configs" / "minigrid_tiny.yaml"


@pytest.fixture
def env() -> Any:
    run = load_config(ROAMER)
    return rl_vlm.make(run.env.id, **run.env.make_kwargs())


def test_what_is_written_agrees_with_minigrids_own_state(env: Any) -> None:
    """Headings, cells and moves are those of MiniGrid's environment, and the picture is the one that Control-v0 shows of them."""
    rng = np.random.default_rng(1)
    for index in range(6):
        observation, _ = env.reset(options={"index": index, "split": "train"})
        for _ in range(5):
            inner = env._inner.unwrapped
            room = Room(6, tuple(int(x) - 1 for x in inner.agent_pos), tuple(HEADINGS)[inner.agent_dir], (3, 3))
            shown = np.asarray(observation.messages[0].images[0].to_pil())
            assert np.array_equal(shown, rooms.render(room))
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


# --- GeoSpot-v0: answers about the pin are right, places random


def test_answers_about_the_pin_are_right_in_the_pixels() -> None:
    rng = np.random.default_rng(0)
    seen: Counter[str] = Counter()
    for _ in range(600):
        _, (pixels, question), reply = draw_spot(rng)
        rows, columns = np.nonzero((pixels == world.PIN).all(2))
        column, row = (int(values.mean().round()) * GRID // world.IMAGE_SIZE + 1 for values in (columns, rows))
        expected = {"Column of pin?": f"{column}", "Row of pin?": f"{row}"}.get(question, f"{column} {row}")
        seen[question] += 1
        if len(rows) >= 21:  # the whole pin is on the picture
            assert reply.splitlines()[0] == expected
    assert len(seen) == 4 and seen[BRIEF] > 150


def test_answers_are_well_formed_and_random_whatever_is_drawn() -> None:
    rng = np.random.default_rng(1)
    cities, regions, countries = vocabulary()
    by_half: dict[bool, Counter[str]] = defaultdict(Counter)
    latitudes: dict[bool, list[float]] = defaultdict(list)
    for _ in range(3000):
        _, (pixels, question), reply = draw_spot(rng)
        if question != BRIEF:
            continue
        answer = parse_answer(reply)
        assert answer.format_valid
        assert answer.city in cities and answer.country in countries
        assert answer.region in [region.removesuffix(".") for region in regions]
        north = bool(np.nonzero((pixels == world.PIN).all(2))[0].mean() < 32)
        by_half[north][str(answer.country)] += 1
        assert answer.coords is not None
        latitudes[north].append(answer.coords[0])
    for counts in by_half.values():
        assert all(abs(count / sum(counts.values()) - 1 / len(countries)) < 0.05 for count in counts.values())
    assert abs(np.mean(latitudes[True]) - np.mean(latitudes[False])) < 6


# --- GridWalk-v0: answers about cells are right, moves random


STANDING = grid_of("..#.", ".A.O", "#O.G", "....")


def test_answers_about_a_grid_by_hand() -> None:
    rng = np.random.default_rng(0)
    found = {random_question(rng, STANDING) for _ in range(3000)}
    by_question = dict(found)
    assert len(by_question) == len(found)  # one answer each
    expected = {
        "Row of agent?": "2", "Column of agent?": "2", "Row of goal?": "3", "Column of goal?": "4",
        "Where is goal?": "down right", "What is up?": "floor", "What is down?": "hole", "What is left?": "floor", "What is right?": "floor",
        "What is around?": "floor hole floor floor",
    }  # fmt: skip
    assert by_question == expected


def test_moves_are_random_whatever_is_drawn() -> None:
    rng = np.random.default_rng(2)
    moves: Counter[str] = Counter()
    by_bearing: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}  # whether the goal is painted above
    turns = 0
    for _ in range(1500):
        for role, (picture, text), reply in draw_walk(rng):
            turns += 1
            assert role == "user" and picture.shape == (64, 64, 3)
            if text in (QUESTION, EXPECTED):
                reply = parse_move(reply) or ""
                moves[reply] += 1
                agent, goal = (np.argwhere((picture == one).all(-1))[:, 0].mean() for one in (AGENT, GOAL))
                by_bearing[bool(goal < agent - 8)][reply] += 1
    assert 0.4 < sum(moves.values()) / turns < 0.7
    assert all(abs(count / sum(moves.values()) - 0.25) < 0.03 for count in moves.values())
    for counts in by_bearing.values():  # going up is as likely when the goal is above
        assert abs(counts["up"] / sum(counts.values()) - 0.25) < 0.04
