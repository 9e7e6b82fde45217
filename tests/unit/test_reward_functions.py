"""Reward functions: TRL's run unchanged, the built-in ones, how a configuration names them, and what goes wrong with them."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import uvloop
from PIL import Image
from tables import table
from task_support import episode

from rl_vlm.config import RewardFunction, RewardSection, parse_config
from rl_vlm.config.loading import save_config
from rl_vlm.rewards.functions import FUNCTIONS, is_right
from rl_vlm.rollout.env_pool import GroupFailedError
from rl_vlm.rollout.scoring import score_group, try_functions
from rl_vlm.types import EncodedImage, Trajectory, TrajectoryGroup, UserInputError

FILE = Path(__file__).parents[1] / "fixtures/plugins/trl_rewards.py"
POLICY: Any = SimpleNamespace()
CHAT = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Count the dots."}]}]
GOOD = "<think>I see two.</think><answer>2</answer>"


def rewarded(members: list[Trajectory], settings: Any, decode: Any) -> TrajectoryGroup:
    """The group of these episodes, whose tokens `decode` makes texts of. The loop is the one that Ray uses."""
    text: Any = SimpleNamespace(codec=SimpleNamespace(decode=decode), collapse=lambda ids, images: ids)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(
            score_group(TrajectoryGroup("g", 0, members), RewardSection.model_validate(settings), POLICY, text)
        )


def scored(functions: Any, texts: list[str], prompt: Any = "How many?", **columns: list[Any]) -> TrajectoryGroup:
    """A group of one-turn answers, rewarded by functions only; `columns` hold a cell for each answer."""
    members = [
        episode(str(k), (0.0,), 3, prompt=prompt, columns={name: cells[k] for name, cells in columns.items()})
        for k in range(len(texts))
    ]
    said = iter(texts)
    return rewarded(members, functions, lambda ids: next(said))


# Function -> prompt, texts, columns, rewards.
TRL: dict[str, tuple[Any, list[str], dict[str, list[Any]], list[float]]] = {
    "longer_is_better": ("Go", ["ab", "abcd"], {}, [2, 4]),
    "names_a_colour": ("Go", ["a red box", "a credible box"], {}, [1, 0]),
    "boxed_matches": ("Go", [r"so \boxed{4}", r"\boxed{5}"], {"ground_truth": ["4", "4"]}, [1, 0]),
    "few_tokens": ("Go", ["a", "b"], {}, [0.5, 0.5]),
    "is_json": ("Go", ['{"a": 1}', "{a: 1}"], {}, [1, 0]),
    "counts_words": ("Go", ["one two", "one"], {"wanted_words": [3, 3]}, [-1, -2]),
    "repeats_the_prompt": ("Go", ["Go on", "Stop"], {}, [-1, 0]),
    "only_maths": ("Go", ["2", "2"], {"task": ["math", "code"]}, [1, 0]),
    "only_code": ("Go", ["def", "def"], {"task": ["math", "code"]}, [0, 1]),
    "thinks_first": (CHAT, [GOOD, "2"], {}, [1, 0]),
    "solution_in_tags": (CHAT, [GOOD, "<answer>3</answer>"], {"solution": ["2", "2"]}, [1, 0]),
    "counts_tags": (CHAT, [GOOD, "<answer>2</answer>"], {}, [1, 0.5]),
    "cosine_of_length": (CHAT, ["2" * 100, "3" * 50], {"solution": ["2", "2"]}, [0.5, -0.75]),
    "speaks_of_the_prompt": (CHAT, ["I count two", "two"], {}, [1, 0]),
    "asks_someone": ("Go", ["Two.", "Two"], {}, [1, 0]),
    "asks_for_two": ("Go", ["Two.", "Two"], {}, [2, 0]),
    "AsksSomeone": ("Go", ["Two.", "Two"], {}, [1, 0]),
    "returns_a_coroutine": ("Go", ["Two.", "Two"], {}, [1, 0]),
    "RepetitionPenalty": ("Go", ["so it is so it is", "so it is"], {}, [-0.4, 0]),
    "grows_stricter": ("Go", ["abc", ""], {}, [1, 0]),
}


@pytest.mark.parametrize("name", TRL)
def test_functions_written_for_trl_run_unchanged(name: str) -> None:
    prompt, texts, columns, rewards = TRL[name]
    group = scored(f"{FILE}:{name}", texts, prompt, **columns)
    assert group.rewards == pytest.approx(rewards)


@pytest.mark.parametrize(
    ("name", "text", "reward"),
    [("think_format_reward", "<think>a</think>b", 1.0), ("accuracy_reward", r"\boxed{\frac{1}{2}}", 1.0)],
)
def test_trls_own_functions_are_named_by_their_module(name: str, text: str, reward: float) -> None:
    pytest.importorskip("trl")
    group = scored(f"trl.rewards:{name}", [text, "no"], CHAT, solution=["$0.5$", "$0.5$"])
    assert group.rewards[0] == reward


def test_several_functions_are_added_up_by_weight_and_each_is_logged() -> None:
    functions = [{"function": f"{FILE}:only_maths", "weight": 2.0}, {"function": f"{FILE}:only_code"}, "format"]
    group = scored(functions, ["2 def", GOOD], task=["math", "code"])
    assert group.rewards == pytest.approx([2.0, 1.0])
    parts = [dict(one.turns[-1].parts) for one in group.trajectories]
    assert parts == [{"env": 0.0, "only_maths": 1.0, "format": 0.0}, {"env": 0.0, "only_code": 0.0, "format": 1.0}]
    both = scored({"weights": {"length": -0.1}, "functions": ["exact"]}, ["4", "5"], answer=["4", "4"])
    assert both.rewards == pytest.approx([0.7, -0.3])
    part = scored([{"function": "length", "weight": -1.0}], ["4"])  # a registered part by its name
    assert part.rewards == [-3.0]


def test_what_a_function_logs_is_in_the_info_and_among_the_parts() -> None:
    group = scored(f"{FILE}:grows_stricter", ["abc", ""])
    assert [one.info["length"] for one in group.trajectories] == [3, 0]
    assert dict(group.trajectories[0].turns[-1].parts)["long_enough"] == 0.5 and group.rewards[0] == 1.0


def test_accuracy_is_the_environments_word_else_that_of_the_functions() -> None:
    known = scored("exact", ["4", "5"], answer=["4", "4"])
    assert [one.correct for one in known.trajectories] == [True, False]
    judged = episode("a", (0.0,), prompt="Go", correct=True, columns={"answer": "4"})
    group = rewarded([judged], "exact", lambda ids: "5")
    assert group.rewards[0] == 0.0 and group.trajectories[0].correct


def test_all_turns_of_a_conversation_are_shown() -> None:
    seen: list[Any] = []

    def look(prompts: Any, completions: Any) -> list[float]:
        seen.append(completions)
        return [0.0]

    settings = RewardSection(functions=(RewardFunction.of(look, "look"),))
    rewarded([episode("a", (0.0, 1.0), 1, prompt=CHAT)], settings, lambda ids: str(ids[0]))
    assert seen == [[[{"role": "assistant", "content": "1"}, {"role": "assistant", "content": "3"}]]]


def test_functions_see_images_under_the_names_of_their_columns(tmp_path: Path) -> None:
    red, blue = (Image.new("RGB", (size, 9), colour) for size, colour in ((8, "red"), (16, "blue")))
    shown = tuple(map(EncodedImage.from_pil, (red, blue)))
    places = {"left": 0, "others": [1], "images": [0, 1], "absent": None}
    members = [
        replace(episode(str(k), (0.0,), 1, prompt="Go", columns={"image": "a.png"}, image_columns=places), images=shown)
        for k in range(2)
    ]
    seen: list[Any] = []

    def named(completions: Any, images: Any, left: Any, others: Any, image: Any) -> list[float]:
        seen.append((left, others, image))
        return [float(one[1].getpixel((15, 8)) == (0, 0, 255)) for one in images]

    def by_key(completions: Any, **kwargs: Any) -> list[float]:
        assert kwargs.get("absent") in ([None, None], None)
        return [float(one[0].size == (8, 9) and isinstance(one[0], Image.Image)) for one in kwargs["images"]]

    for function in (named, by_key):
        settings = RewardSection(functions=(RewardFunction.of(function, "look"),))
        assert list(rewarded(members, settings, lambda ids: "said").rewards) == [1.0, 1.0]
        try_functions(settings, {"columns": {}, "image_columns": places})
    (left, others, image) = seen[0]
    assert left[1].size == (8, 9) and others[0][0].size == (16, 9) and image == ["a.png", "a.png"]  # a column wins
    bare = replace(members[0], info={})  # of an environment that knows no columns
    assert rewarded([bare], RewardSection(functions=(RewardFunction.of(by_key, "look"),)), lambda ids: "said").rewards[
        0
    ]


# --- Built-in functions

BUILT_IN: list[tuple[str, str, Any, float]] = [
    ("exact", "<answer> Red. </answer>", "red", 1), ("exact", "<think>red</think>blue", "red", 0),
    ("exact", "The answer is: two", ["2", "two"], 1), ("exact", "7", 7, 1),
    ("math", r"so \boxed{\frac{1}{2}}", "0.5", 1), ("math", "#### 5", "6", 0),
    ("choice", "(b)", "B", 1), ("choice", "<answer>B. a cat</answer>", "B", 1), ("choice", "Both", "B", 0), ("choice", "C", "B", 0),
    ("format", GOOD, None, 1), ("format", "<answer>2</answer>", None, 0),
    ("iou", "[0, 0, 10, 10]", [0, 0, 10, 10], 1), ("iou", "box: [0, 0, 10, 10]", [5, 0, 15, 10], 1 / 3),
    ("iou", "none", [0, 0, 10, 10], 0), ("iou", "[10, 10, 0, 0]", "[0, 0, 10, 10]", 0),
    ("anls", "<answer>Hello World</answer>", ["hello world", "x"], 1), ("anls", "helo", "hello", 0.8),
    ("anls", "hexxx", "hello", 0), ("anls", "a", "a long answer", 0),
    ("point_in_box", "5, 6", [0, 0, 10, 10], 1), ("point_in_box", "click(11, 6)", [0, 0, 10, 10], 0),
    ("point_in_box", "<answer>click(start_box='<|box_start|>(10,10)<|box_end|>')</answer>", "[0, 0, 10, 10]", 1),
    ("point_in_box", '```json\n[{"point_2d": [3, 4], "label": "OK"}]\n```', [[5, 5, 9, 9], [0, 0, 10, 10]], 1),
    ("point_in_box", "x=3, y=12", [0, 0, 10, 10], 0), ("point_in_box", "<point>3 4</point>", [0, 0, 10, 10], 1),
    ("point_in_box", "[4, 4, 20, 8]", [0, 0, 10, 10], 0), ("point_in_box", "the button", [0, 0, 10, 10], 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "answer", "reward"), BUILT_IN)
def test_built_in_functions_equal_values_by_hand(name: str, text: str, answer: Any, reward: float) -> None:
    assert FUNCTIONS[name]([text, [{"role": "assistant", "content": text}]], answer=[answer] * 2) == pytest.approx(
        [reward] * 2
    )


@pytest.mark.parametrize(
    ("text", "units", "reward"),
    [
        ("(500, 250)", {"point_unit": 1000, "box_unit": 1}, 1.0),
        ("(500, 250)", {"point_unit": 1000}, 0.0),  # 320, 60 of pixels
        ("(320, 60)", {"box_unit": 1}, 1.0),
        ("(0.5, 0.6)", {"point_unit": 1, "box_unit": 1}, 0.0),
    ],
)
def test_a_point_and_a_box_may_have_different_units(text: str, units: dict[str, float], reward: float) -> None:
    image = [Image.new("RGB", (640, 240))]
    assert FUNCTIONS["point_in_box"]([text], answer=[[0.4, 0.2, 0.6, 0.3]], image=image, **units) == [reward]


TABLE = table("reward_functions")


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in TABLE for kind in {**TABLE[name]["1"], **TABLE[name]["0"]}]
)
def test_answers_as_models_give_them_are_worth_what_they_say(name: str, kind: str) -> None:
    """Also in `<answer>` tags. A box is compared with the same one."""
    box = [10, 20, 30, 40]
    pairs = [(pair, worth) for worth in "10" for pair in TABLE[name][worth].get(kind, ())]
    asked = [((pair, box) if isinstance(pair, str) else tuple(pair), float(worth)) for pair, worth in pairs]
    for form in ("{}", "<answer>{}</answer>"):
        found = {said: FUNCTIONS[name]([form.format(said)], answer=[truth])[0] for (said, truth), _ in asked}
        assert found == {said: worth for (said, _), worth in asked}


def test_anls_counts_edits_as_a_slow_recursion_does() -> None:
    def distance(one: str, other: str) -> int:
        if not one or not other:
            return len(one) + len(other)
        same = distance(one[1:], other[1:]) + (one[0] != other[0])
        return min(same, distance(one[1:], other) + 1, distance(one, other[1:]) + 1)

    rng = np.random.default_rng(0)
    for _ in range(40):
        one, other = ("".join(rng.choice(list("abc"), rng.integers(1, 6))) for _ in range(2))
        part = distance(one, other) / max(len(one), len(other))
        assert FUNCTIONS["anls"]([one], answer=[other]) == pytest.approx([1 - part if part < 0.5 else 0])


def test_the_pattern_of_a_format_comes_from_the_configuration() -> None:
    functions = [{"function": "format", "kwargs": {"pattern": r"<count>\d</count>"}}]
    assert list(scored(functions, ["<count>3</count>", GOOD], pattern=["x", "x"]).rewards) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "accepted", "right"),
    [(r"\boxed{0.50}", ("1/2",), True), ("Red", ("blue", "red"), True), ("[0, 0, 9, 10]", ("[0, 0, 10, 10]",), True),
     ("1 2 3 4", ("1, 2, 3, 5",), False), ("", ("4",), False)],
)  # fmt: skip
def test_an_answer_is_right_as_text_value_or_box(text: str, accepted: tuple[str, ...], right: bool) -> None:
    assert bool(is_right(text, accepted)) is right


# --- Configuration


def test_a_name_and_a_list_are_short_for_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for reward in (
        "my.py:score",
        ["my.py:score"],
        [{"function": "my.py:score"}],
        {"functions": [{"function": "my.py:score"}]},
    ):
        (one,) = parse_config({"env": {"reward": reward}}).env.reward.functions  # type: ignore[union-attr]
        assert (one.function, one.name, one.weight) == (f"{tmp_path}/my.py:score", "score", 1.0)
    config = parse_config({"env": {"reward": ["exact", {"function": "format", "weight": 0.2}]}})
    assert config.env.reward.all_weights == {"exact": 1.0, "format": 0.2}  # type: ignore[union-attr]
    for wrong in (["a.py:score", "b.py:score"], {"weights": {"format": 1.0}, "functions": ["format"]}, ["a.py:env"]):
        with pytest.raises(UserInputError, match="given twice"):
            parse_config({"env": {"reward": wrong}})


def test_a_function_of_python_travels_and_a_saved_configuration_names_it(tmp_path: Path) -> None:
    one = RewardFunction.of(sorted, "mine")
    config = parse_config({"env": {"reward": [one]}})
    copied = pickle.loads(pickle.dumps(config))
    assert copied.env.reward.functions[0].given is sorted
    save_config(config, tmp_path / "config.yaml")
    assert "function: mine" in (tmp_path / "config.yaml").read_text()


BROKEN = """
def needs(completions, gold): ...
def fails(completions, **kwargs): return [1 / 0]
async def reads(completions, **kwargs): return [__import__("json").loads("{")]
def stops(completions, **kwargs): return [next(iter(()))]
def ends(completions, **kwargs): raise SystemExit(3)
def words(completions, **kwargs): return ["good"]
def lone(completions, **kwargs): return 1.0
def short(completions, **kwargs): return []
class Two:
    def __init__(self, a): ...
    def __call__(self, completions): ...
number = 4
"""


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        ("broken.py:needs", "needs needs the column gold, and the data have answer, colour"),
        ("broken.py:absent", "has no 'absent'; it has "),
        ("broken.py:number", "is a int, not a function"),
        ("broken.py:Two", "cannot be made without arguments"),
        ("exactly", "'exactly' is not a reward function; there are exact, math"),
        ("nowhere.py:score", "There is no file"),
    ],
)
def test_what_is_wrong_with_a_function_is_said_before_the_run(
    reward: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text(BROKEN)
    with pytest.raises(UserInputError, match=sentence):
        try_functions(RewardSection.model_validate(reward), {"columns": {"answer": "4", "colour": "red"}})


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("fails", r"raised ZeroDivisionError: division by zero \(broken.py, line 3\)"),
        ("reads", r"raised JSONDecodeError: .* \(broken.py, line 4\)"),
        ("stops", r"raised RuntimeError: StopIteration \(broken.py, line 5\)"), ("ends", r"SystemExit: 3 \(broken.py, line 6\)"),
        ("words", r"gave \['good'\] for 1 answers"), ("lone", "gave 1.0 for 1 answers"), ("short", "one finite number for each"),
    ],
)  # fmt: skip
def test_a_function_that_fails_costs_the_group_and_is_named_with_its_line(
    name: str, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    with pytest.raises(GroupFailedError, match=sentence):
        scored(f"{tmp_path}/broken.py:{name}", ["a"])


def test_functions_see_what_any_environment_tells() -> None:
    assert rewarded([episode("a", (0.0,), 1, answer="3")], "exact", lambda ids: "3").rewards[0] == 1.0
