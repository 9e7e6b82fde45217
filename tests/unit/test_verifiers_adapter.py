"""Environments made with the package verifiers: their rubric pays, their turns and tools are played."""

import signal
import threading
from pathlib import Path

import pytest

import rl_vlm
from rl_vlm.envs.errors import EnvError, check_reset, check_step
from rl_vlm.envs.foreign.verifiers import from_text
from rl_vlm.types import UserInputError

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "fixtures" / "envs"
COLOURS = str(FOLDER / "verifiers_colours.py")
MADE = []


def made(**kwargs):
    env = rl_vlm.make(COLOURS, **kwargs)
    MADE.append(env)
    return env


@pytest.fixture(autouse=True)
def close_them():
    yield
    while MADE:
        MADE.pop().close()


def opened(env, index=0, split="train"):
    return check_reset(env.reset(seed=0, options={"index": index, "split": split}))


def test_one_answer_is_paid_by_the_rubric_and_its_parts_are_in_the_info():
    env = made()
    observation, _ = opened(env, 1)
    system, user = observation.messages
    assert (system.role, system.text) == ("system", "One word.")
    assert user.text == "Item 1: which colour?"
    assert user.images[0].to_pil().getpixel((0, 0)) == (0, 0, 220)
    observation, reward, terminated, truncated, info = check_step(env.step("It is blue, without any doubt."))
    assert (reward, terminated, truncated, observation.messages) == (1.0, True, False, ())
    assert (info["right"], info["short"], info["num_turns"]) == (1.0, 0.0, 1.0)
    opened(env, 1)
    assert env.step("red")[1] == 0.5


def test_turns_are_the_environments_own():
    env = made(kind="multi")
    opened(env, 2)
    observation, reward, *ended, _ = check_step(env.step("red"))
    assert (observation.messages[0].text, reward, ended) == ("Not red. Guess again.", 0.0, [False, False])
    last = check_step(env.step("green"))
    # The rubric reads the last message of the completion, which is the environment's "Right.".
    assert last[2:4] == (True, False) and last[4]["stop"] == "has_final_env_response" and last[4]["turn"] == 2
    opened(env, 2)
    steps = [check_step(env.step("red")) for _ in range(3)]
    assert [step[2:4] for step in steps] == [(False, False), (False, False), (False, True)]
    assert steps[-1][4]["stop"] == "max_turns_reached"


def test_tools_are_described_called_and_answered():
    env = made(kind="tools")
    observation, _ = opened(env, 1)
    system = observation.messages[0].text
    assert system.startswith("Use the tool.") and '"count_letters"' in system and "<tool_call>" in system
    call = 'Let me count.\n<tool_call>\n{"name": "count_letters", "arguments": {"word": "blue"}}\n</tool_call>'
    reply = check_step(env.step(call))[0].messages
    assert [(message.role, message.text) for message in reply] == [("tool", "4")]
    both = call + '<tool_call>{"name": "nothing", "arguments": {}}</tool_call>'
    assert [message.text for message in env.step(both)[0].messages] == ["4", "'nothing'"]
    broken = env.step('<tool_call>{"name": "count_letters", </tool_call>')[0].messages
    assert len(broken) == 1 and "Expecting value" in broken[0].text
    last = check_step(env.step("blue"))
    assert last[1:4] == (1.5, True, False) and last[4]["count_letters_calls"] == 2.0


def test_an_error_of_the_environment_aborts_the_episode_and_the_next_one_is_fine():
    env = made(kind="multi")
    opened(env)
    with pytest.raises(EnvError, match="InfraError"):
        env.step("broken")
    opened(env)
    opened(env)  # the rollout before it is cancelled
    assert env.step("red")[2]


def test_splits_are_the_environments_own_or_held_out():
    env = made(test_rows=4)
    assert (env.num_items("train"), env.num_items("test")) == (20, 4)
    env = made()
    assert (env.num_items("train"), env.num_items("test")) == (18, 2)
    assert opened(env, 1, "test")[1]["row"] == 19


def test_signal_handlers_stay_and_it_is_made_outside_of_the_main_thread():
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    thread = threading.Thread(target=made)
    thread.start()
    thread.join(30)
    assert len(MADE) == 1
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before


def test_what_cannot_be_played_is_refused_by_name():
    with pytest.raises(UserInputError, match="ranked"):
        made(kind="group")
    with pytest.raises(UserInputError, match="loaded"):
        rl_vlm.make("verifiers:no-such-environment")
    with pytest.raises(UserInputError, match="colour"):
        made(colour=1)


def test_calls_behind_a_thought_are_taken_out_and_the_thought_stays() -> None:
    thought = "<think>maybe <tool_call>{}</tool_call></think>"
    message = from_text(
        thought + 'Look: <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>\n', with_tools=True
    )
    assert message["content"] == f"{thought}Look:"
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "f", "arguments": '{"x": 1}'}]
