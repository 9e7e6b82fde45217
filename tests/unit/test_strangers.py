"""tests/fixtures/strangers: small environments as other people write them, and what benchmarks/strangers.py asks of them."""

import importlib
import json
from itertools import permutations, product
from pathlib import Path

import pytest

from rl_vlm.envs.checking import check_environment
from rl_vlm.envs.registry import make

ROOT = Path(__file__).parents[2]
STRANGERS = ROOT / "tests" / "fixtures" / "strangers"
ITEMS = 120
CALL = '{"name": "open_curtain", "arguments": {"side": "left"}}'
SWITCH = CALL.replace("open_curtain", "switch_on").replace("side", "lamp")
# What they can be answered with, turn by turn.
ANSWERS = {
    "bars": ({"Answer: 1", "Answer: 2", "Answer: 3"},),
    "brighter_photo": ({"first", "second"},),
    "buttons": (
        {
            f'{{"x": {x}, "y": {y}}}'
            for x in (*range(46, 59), *range(142, 155))
            for y in (*range(36, 47), *range(84, 95))
        },
    ),
    "cross": ({"yes", "no"},),
    "curtain": (
        {f"<tool_call>{CALL}</tool_call>", f"<tool_call>{CALL.replace('left', 'right')}</tool_call>"},
        {"on", "off"},
    ),
    "difference": (
        {f"The difference is at the {row} {side}." for row in ("top", "bottom") for side in ("left", "right")},
    ),
    "doors": ({f"open {number}" for number in range(1, 5)},),
    "gauge": ({f"{percent}%" for percent in range(0, 101, 10)},),
    "lamps": (
        {f"<tool_call>{SWITCH}</tool_call>", f"<tool_call>{SWITCH.replace('left', 'right')}</tool_call>"},
        {"red", "green", "blue", "yellow"},
    ),
    "marbles": ({f"**{number}**" for number in ("one", "two", "three", "four")},),
    "maze": ({f"Action: {move}" for move in ("up", "down", "left", "right")},),
    "mouse": ({f"row {row}, column {column}" for row in (1, 2) for column in (1, 2)},),
    "paint": ({f"I choose {paint}." for paint in ("red", "blue", "white", "yellow")},),
    "price": ({"(a)", "(b)", "(c)", "(d)"},),
    "quiz": ({"A", "B", "C"},),
    "search": (
        {f"quarter={number}" for number in range(1, 5)},
        {f"colour={name}" for name in ("red", "blue", "white")},
    ),
    "sizes": ({" < ".join(order) for order in permutations(("red", "green", "blue"))},),
    "tallest": ({f"<answer>{letter}</answer>" for letter in "ABCDEF"},),
    "traffic": ({f'{{"light": "{light}"}}' for light in ("red", "yellow", "green")},),
    "weather": ({f"<weather>{weather}</weather>" for weather in ("sunny", "cloudy", "night")},),
}


def path_of(name: str) -> str:
    return str(STRANGERS / f"{name}.py")


def opened(name: str, index: int, split: str = "train"):
    env = make(path_of(name))
    env.reset(options={"index": index, "split": split})
    return env


@pytest.mark.acceptance
@pytest.mark.parametrize("name", ANSWERS)
def test_it_is_a_sound_environment(name: str) -> None:
    report = check_environment(path_of(name), episodes=8, budget_s=0.5, answers=sorted(ANSWERS[name][0]))
    # No one text of the check answers both turns of these.
    unpaid = ["reward"] if name in ("curtain", "lamps") else []
    assert report.ok and report.image is not None
    assert [finding.name for finding in report.findings if finding.status != "ok"] == unpaid


@pytest.mark.parametrize("name", ANSWERS)
def test_right_answers_are_rewarded_in_full_and_all_answers_occur(name: str) -> None:
    said: list[set[str]] = [set() for _ in ANSWERS[name]]
    for index in range(60):
        env, total = opened(name, index, ("train", "test")[index % 2]), 0.0
        for turn, texts in enumerate(said):
            texts.add(text := env.right())
            _, reward, terminated, _, info = env.step(text)
            total += reward
            assert (terminated, info["well_formed"]) == (turn == len(said) - 1, True)
        assert (total, info["correct"]) == (1.0, True)
    for texts, possible in zip(said, ANSWERS[name], strict=True):
        assert texts == possible or (len(possible) > 60 and texts < possible)


@pytest.mark.parametrize("name", ANSWERS)
def test_it_states_what_an_oracle_gets_and_what_constant_answers_get(name: str, benchmarks) -> None:
    path, oracle = Path(path_of(name)), benchmarks("oracle")
    said, found = oracle.stated(path), oracle.measured(path, ITEMS)
    assert oracle.holds(said, found, ITEMS), (said, found)


@pytest.mark.parametrize("name", ANSWERS)
def test_shuffled_pictures_are_those_of_the_next_item(name: str) -> None:
    def shown(env, index: int) -> tuple[list[str], list[str]]:
        observation, _ = env.reset(options={"index": index, "split": "test"})
        seen = list(observation.messages)
        for text in answers[:-1]:
            seen += env.step(text)[0].messages
        return [message.text for message in seen], [image.sha256 for message in seen for image in message.images]

    answers = next(product(*(sorted(turn) for turn in ANSWERS[name])))
    own, following = (shown(make(path_of(name)), index) for index in (3, 4))
    shuffled = make(str(ROOT / "benchmarks" / "shuffled_pictures.py"), env=path_of(name))
    assert shown(shuffled, 3) == (own[0], following[1]) != own


@pytest.mark.parametrize(("name", "items", "turns"), [("lamps", 60, 2), ("doors", 100, 1)])
def test_conversations_teach_the_form_and_not_the_task(name: str, items: int, turns: int, tmp_path, benchmarks) -> None:
    path = benchmarks("strangers").conversations(name, tmp_path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    said = [[one["content"][0]["text"] for one in row["messages"] if one["role"] == "assistant"] for row in rows]
    right = [opened(name, index).right() for index in range(items)]
    assert [len(texts) for texts in said] == [turns] * items and len(list(tmp_path.glob("images/*"))) == turns * items
    assert sum(texts[0] == own for texts, own in zip(said, right, strict=True)) < 0.7 * items


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of the folder."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module
