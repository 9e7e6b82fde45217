"""Foreign interactive environments, unchanged, by file, by module and by id; and the registry's ways to name them."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import rl_vlm
from rl_vlm.envs.base import VisionEnv
from rl_vlm.envs.errors import EnvError, check_reset, check_step
from rl_vlm.envs.foreign.common import to_message
from rl_vlm.envs.foreign.slime import SlimeEnv
from rl_vlm.types import Message, UserInputError

TESTS = Path(__file__).parents[1]
GUESS = TESTS / "fixtures" / "envs" / "guess_env.py"
SCORE = TESTS / "fixtures" / "envs" / "score_env.py"
GEO3K = str(TESTS / "fixtures" / "geo3k")
QUESTIONS = pa.schema([("problem", pa.string()), ("answer", pa.string()), ("images", pa.list_(pa.binary()))])


def opened(env: VisionEnv, index=3):
    """The environment with question `index` (train) open; row 3 of the fixture has the answer 22."""
    return check_reset(env.reset(seed=0, options={"index": index, "split": "train"}))


def assert_plays_well(env: VisionEnv):
    observation, _ = opened(env)
    (message,) = observation.messages
    assert message.role == "user" and len(message.images) == 1 and "parallelogram" in message.text
    look, low, right = (check_step(env.step(text)) for text in ("let me look", "perhaps 20", "then 22"))
    assert look[0].messages[0].images[0].to_pil().getpixel((0, 0)) == (0, 0, 0)
    assert (look[0].messages[0].role, look[0].messages[0].text) == ("user", "Look again.")
    assert low[0].messages[0].text == "Larger."
    assert [step[1] for step in (look, low, right)] == [0.0, 0.0, 1.0]
    assert [step[2:4] for step in (look, low, right)] == [(False, False), (False, False), (True, False)]
    assert right[4]["guess"] == 22 and right[4]["correct"]


def test_it_runs_by_file_by_module_and_by_id(on_path, registered):
    arguments = {"data": GEO3K, "max_turns": 4, "reward": "env"}
    rl_vlm.register("Guess-v0", f"{GUESS}:build_env")
    for spec in (str(GUESS), f"{GUESS}:build_env", "envs.guess_env", "envs.guess_env:build_env", "Guess-v0"):
        env = rl_vlm.make(spec, **arguments)
        assert env.num_items("test") == 4
        assert_plays_well(env)


def call(answer):
    return f'<tool_call>{{"name": "calc_score", "arguments": {{"answer": "{answer}"}}}}</tool_call>'


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        ([call(60), r"\boxed{65}"], 1.0),  # the tool has seen a wrong value, the answer is right
        ([call(65), r"\boxed{66}"], 0.0),
        ([call(65), "I am done."], 0.0),
        ([call(65) + r" Answer: \boxed{65}", "I am done."], 1.0),  # the last box of the whole transcript
        ([r"\boxed{65}"], 1.0),
        ([call(60), call(65), call(65)], 0.0),  # out of turns without a box
        ([call(60), call(60), call(60) + r" \boxed{65}"], 1.0),
    ],
)
def test_the_final_answer_is_paid_as_in_slime_and_not_the_last_tool_score(tmp_path, turns, reward):
    rows = {"problem": ["What is x?"], "answer": ["65"], "images": [[]]}
    pq.write_table(pa.table(rows, schema=QUESTIONS), tmp_path / "train.parquet")
    env = rl_vlm.make(str(SCORE), data=str(tmp_path), max_turns=3)
    opened(env, index=0)
    steps = [check_step(env.step(text)) for text in turns]
    assert [step[1] for step in steps] == [0.0] * (len(turns) - 1) + [reward]
    assert steps[-1][2] and steps[-1][4]["correct"] == (reward == 1.0)


def test_max_turns_truncates_and_pays_the_last_score():
    env = rl_vlm.make(str(GUESS), data=GEO3K, max_turns=2, reward="env")
    opened(env)
    first, second = (check_step(env.step(text)) for text in ("20", "21"))
    assert first[0].messages[0].text == "Larger. Last guess."
    assert second[1:4] == (0.0, False, True)
    assert second[4]["status"] == "out_of_turns"


def test_without_scores_the_policys_words_are_graded():
    env = rl_vlm.make(str(GUESS), data=GEO3K, max_turns=2)
    opened(env)
    _, reward, terminated, _, info = env.step(r"\boxed{none}")
    assert (reward, terminated, info["correct"]) == (0.0, True, False)
    env = rl_vlm.make(str(GUESS), data=GEO3K, max_turns=1, reward="grade")
    opened(env)
    assert env.step(r"\boxed{22}")[1] == 1.0
    opened(env)
    assert env.step("22 it is")[1] == 0.0


class Stub:
    """An environment whose next step is what the test says."""

    def __init__(self, sample, args):
        self.sample, self.args = sample, args
        self.next = ({"obs_str": "on", "role": "tool"}, False, {})
        self.closed = 0

    def reset(self):
        return {"obs_str": "" if self.sample.prompt else "Go on."}, {}

    def step(self, text):
        return self.next

    def close(self):
        self.closed += 1


def stubbed(next_step=None, data=GEO3K, **kwargs):
    """(adapter, its open stub)."""
    built = []

    def build_env(sample, args):
        built.append(Stub(sample, args))
        return built[-1]

    env = SlimeEnv(build_env, data=data, **kwargs)
    opened(env)
    if next_step is not None:
        built[-1].next = next_step
    return env, built[-1]


@pytest.mark.parametrize("arguments", [{"reward": "env"}, {"data": None}], ids=["on request", "no label"])
def test_a_tool_score_is_paid_on_request_and_where_there_is_no_label(arguments):
    env, _ = stubbed(({"obs_str": "x", "tool_score": 1}, True, {}), **arguments)
    assert env.step(r"\boxed{0}")[1] == 1.0


def test_the_sample_carries_what_such_environments_read():
    _, stub = stubbed(max_turns=5, extra={"a": 1})
    assert stub.sample.label == "22"
    assert stub.sample.prompt.startswith("<image>")
    assert stub.sample.multimodal_inputs["images"][0].size == (316, 230)
    assert stub.sample.metadata == {"split": "train", "index": 3, "seed": 0}
    assert (stub.args.max_turns, stub.args.extra) == (5, {"a": 1})


@pytest.mark.parametrize(("where", "done"), [("obs", False), ("info", True)])
def test_rewards_are_paid_per_step_and_the_environment_is_closed_once_at_the_end(where, done):
    obs, info = {"obs_str": "on", "role": "tool"}, {}
    (obs if where == "obs" else info)["reward"] = 0.25
    env, stub = stubbed((obs, done, info), max_turns=3)
    steps = 1 if done else 3
    assert [check_step(env.step("x"))[1] for _ in range(steps)] == [0.25] * steps
    assert stub.closed == 1
    with pytest.raises(UserInputError, match="call reset"):
        env.step("x")
    env.close()
    assert stub.closed == 1


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, r"\(obs, done, info\)"),
        (({}, 0.0, False, {}), r"\(obs, done, info\)"),
        (({}, "yes", {}), "a bool as done"),
        (({}, False, []), "dict as info"),
        (("text", False, {}), "must be a dict with obs_str"),
        (({"obs_str": "x", "reward": float("nan")}, False, {}), "must be finite"),
        (({"obs_str": "x", "reward": "high"}, False, {}), "a number as reward"),
        (({"obs_str": "x", "tool_score": "high"}, False, {}), "a number as reward"),
    ],
)
def test_a_nonsense_step_is_an_error(result, message):
    env, stub = stubbed()
    stub.next = result
    with pytest.raises(EnvError, match=message):
        env.step("x")


def test_messages_take_images_in_every_form(tmp_path):
    picture = Image.new("RGB", (2, 2), "red")
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    (tmp_path / "a.png").write_bytes(buffer.getvalue())
    for image in (picture, np.asarray(picture), buffer.getvalue(), str(tmp_path / "a.png")):
        message = to_message(
            {"role": "tool", "content": [{"type": "image", "image": image}, {"type": "text", "text": "see"}]}
        )
        assert (message.role, message.text, len(message.images)) == ("tool", "see", 1)
    assert to_message({"role": "user", "content": "plain"}) == Message.of("user", "plain")


@pytest.mark.parametrize(
    "message",
    [
        None,
        {"role": "narrator", "content": "x"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [{"type": "video"}]},
        {"role": "user", "content": [{"type": "image", "image": "https://example.org/a.png"}]},
        {"role": "user", "content": [{"type": "image", "image": b"junk"}]},
        {"role": "user", "content": [{"type": "image", "image": np.zeros((2, 2))}]},
    ],
)
def test_a_nonsense_message_is_an_error(message):
    with pytest.raises(EnvError):
        to_message(message)
