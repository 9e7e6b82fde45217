"""Geo3k: prompts, the replies to every kind of turn, when an episode ends, and what it pays."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_vlm.envs.data import open_table
from rl_vlm.envs.errors import check_reset, check_step
from rl_vlm.envs.questions import QUESTIONS
from rl_vlm.types import EncodedImage
from rl_vlm.zoo.geo3k.environment import Geo3kEnv

GEO3K = str(Path(__file__).parents[1] / "fixtures" / "geo3k")
RADICAL = 1  # the train row whose answer is 4\sqrt{15}
TRUTH = r"4\sqrt{15}"


def opened(index=RADICAL, **kwargs) -> Geo3kEnv:
    env = Geo3kEnv(data=GEO3K, **kwargs)
    check_reset(env.reset(seed=0, options={"index": index, "split": "train"}))
    return env


def tool(answer=TRUTH, name="calc_score") -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'answer': answer}})}</tool_call>"


def take(env, text):
    """(reply, reward, terminated, truncated, info) of a step, whose observation must fit its flags."""
    observation, reward, terminated, truncated, info = check_step(env.step(text))
    if terminated or truncated:
        assert observation.messages == ()
    else:
        (message,) = observation.messages
        assert (message.role, message.text) == ("tool", info["reply"])
    return info["reply"], reward, terminated, truncated, info


def test_the_question_replaces_its_marker_by_the_image():
    observation, info = Geo3kEnv(data=GEO3K).reset(options={"index": 3, "split": "test"})
    system, user = observation.messages
    question = open_table(QUESTIONS, GEO3K, "test")[3]
    assert (system.role, user.role) == ("system", "user")
    assert user.parts == (question.images[0], question.problem.removeprefix("<image>"))
    assert info == {"split": "test", "index": 3, "where": question.where}
    assert question.answer not in system.text + user.text


def test_instructions_name_the_tool_only_where_it_exists():
    for prompt in ("full", "brief"):
        texts = []
        for scoring_tool in (True, False):
            observation, _ = Geo3kEnv(data=GEO3K, prompt=prompt, scoring_tool=scoring_tool).reset(options={"index": 0})
            texts.append("".join(message.text for message in observation.messages))
        assert "calc_score" in texts[0] and "<tool_call>" in texts[0]
        assert "calc" not in texts[1] and "tool" not in texts[1]
        assert all(r"Answer: \boxed{" in text for text in texts)


def test_the_example_call_in_the_instructions_is_well_formed():
    observation, _ = Geo3kEnv(data=GEO3K).reset(options={"index": 0})
    instructions = observation.messages[0].text
    env = opened()
    reply, *_, info = take(env, instructions)
    assert reply.startswith("Score: 0. The answer 42 is wrong.")
    assert info["tool_errors"] == 0
    assert "You have 3 messages" in instructions


@pytest.mark.parametrize(
    "own", [r" Put the answer in \boxed{}.", " Call <tool_call>{}</tool_call>.", " Use calc_geo3k_reward."]
)
def test_a_problem_that_brings_its_own_instructions_gets_no_others(tmp_path, own):
    rows = pq.read_table(f"{GEO3K}/train.parquet").to_pylist()[:2]
    rows[1]["problem"] += own
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    roles = {}
    for prompt in ("auto", "full"):
        env = Geo3kEnv(data=str(tmp_path), prompt=prompt)
        roles[prompt] = [
            [message.role for message in env.reset(options={"index": index})[0].messages] for index in range(2)
        ]
    assert roles["auto"] == [["system", "user"], ["user"]]
    assert roles["full"] == [["system", "user"]] * 2


def test_image_size_shrinks_and_square_pads_with_grey():
    def image(**kwargs) -> EncodedImage:
        observation, _ = Geo3kEnv(data=GEO3K, **kwargs).reset(options={"index": 0})
        return observation.messages[-1].images[0]

    assert (image().width, image().height) == (389, 157)
    small = image(image_size=64)
    assert (small.width, small.height) == (64, 26)
    assert image(image_size=1000) == image()
    square = image(image_size=64, square=True)
    assert (square.width, square.height) == (64, 64)
    assert square.to_pil().getpixel((32, 2)) == (127, 127, 127)
    assert square.to_pil().getpixel((2, 32)) == (255, 255, 255)


def test_every_kind_of_turn_has_its_own_reply():
    turns = {
        "right": tool(),
        "wrong": tool("7"),
        "alias": tool("7", name="calc_geo3k_reward"),
        "unknown tool": tool(name="calc_scores"),
        "missing answer": '<tool_call>{"name": "calc_score", "arguments": {}}</tool_call>',
        "malformed": "<tool_call>{</tool_call>",
        "no answer": "I do not know.",
        "answer": r"\boxed{7}",
    }
    replies = {kind: take(opened(), text)[0] for kind, text in turns.items()}
    assert len(take(opened(), tool("9" * 5000))[0]) < 200
    for kind in ("wrong", "unknown tool", "missing answer", "malformed"):  # each warns before the last turn
        assert "next message is the last one" in take(opened(max_turns=2), turns[kind])[0]
    assert replies.pop("alias") == replies["wrong"]
    assert len(set(replies.values())) == len(replies)
    assert "'calc_scores': the only tool is calc_score" in replies["unknown tool"]
    assert replies["missing answer"].startswith("Missing answer")
    assert "not valid JSON" in replies["malformed"]
    assert "the episode ends here" in replies["no answer"]


@pytest.mark.parametrize("answer", [None, True, [], {}, ["5"], "", "  "])
def test_an_answer_that_is_no_value_counts_as_missing(answer):
    reply, *_, info = take(opened(), tool(answer))
    assert reply.startswith("Missing answer")
    assert (info["tool_calls"], info["tool_errors"]) == (1, 1)


@pytest.mark.parametrize("answer", [22, 22.0, "22", "y = 22", r"\boxed{22}", "22.0"])
def test_numbers_and_boxes_are_values(answer):
    assert take(opened(index=3), tool(answer))[0].startswith("Score: 1.")


def test_the_withheld_tool_is_unknown():
    for name in ("calc_score", "calc_geo3k_reward", "f"):
        for answer in (TRUTH, "7"):
            reply, *_, info = take(opened(scoring_tool=False), tool(answer, name))
            assert reply.startswith(f"Unknown tool '{name}': there are no tools.")
            assert info["tool_errors"] == 1


BOXED = rf"Answer: \boxed{{{TRUTH}}}"


@pytest.mark.parametrize(
    ("max_turns", "turns", "reward", "ended", "told"),
    [
        (3, [f"So x = {TRUTH}. {BOXED}"], 1.0, (True, False), {"answer": TRUTH, "truth": TRUTH, "status": "answered"}),
        (3, [r"Answer: \boxed{7}"], 0.0, (True, False), {"answer": "7", "status": "answered"}),
        (3, [f"The answer is {TRUTH}."], 0.0, (True, False), {"answer": None, "status": "no_answer"}),
        (2, [tool(), f"{tool()} {BOXED}"], 1.0, (False, True), {"answer": TRUTH}),  # truncated, and still graded
        (1, [tool()], 0.0, (False, True), {"answer": None}),  # a right call alone
        (3, [f"{tool()} {BOXED}", r"On second thought \boxed{7}."], 0.0, (True, False), {"answer": "7"}),
        (2, [tool("7"), "I give up."], 0.0, (True, False), {"answer": None}),  # the reply's box is no answer
    ],
)
def test_the_last_box_of_the_policy_is_paid_where_the_episode_ends(max_turns, turns, reward, ended, told):
    env = opened(max_turns=max_turns)
    replies = [take(env, text) for text in turns]
    *_, (_, paid, terminated, truncated, info) = replies
    assert (paid, (terminated, truncated), info["correct"]) == (reward, ended, reward == 1.0)
    assert told.items() <= info.items()
    assert all(one[1] == 0.0 and not one[2] and r"\boxed" in one[0] for one in replies[:-1] if "Score: 0" in one[0])


def test_calls_cost_and_the_first_well_formed_one_pays_a_bonus_once():
    env = opened(max_turns=5, tool_cost=0.25, format_bonus=0.125)
    rewards = [take(env, text)[1] for text in ("<tool_call>{</tool_call>", tool("7"), tool(), rf"\boxed{{{TRUTH}}}")]
    assert rewards == [-0.25, -0.125, -0.25, 1.0]
    env.reset(options={"index": 0})  # which starts afresh
    _, reward, *_, info = take(env, tool("7"))
    assert (reward, info["turn"], info["tool_calls"]) == (-0.125, 1, 1)


def test_every_row_of_the_fixture_is_paid_for_its_own_answer():
    env = Geo3kEnv(data=GEO3K)
    for split, size in (("train", 8), ("test", 4)):
        assert env.num_items(split) == size
        assert env.validate(split) == size
        table = open_table(QUESTIONS, GEO3K, split)
        for index in range(size):
            env.reset(options={"index": index, "split": split})
            assert check_step(env.step(rf"\boxed{{{table[index].answer}}}"))[1] == 1.0
