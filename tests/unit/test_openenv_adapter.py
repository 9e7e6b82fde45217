"""An OpenEnv server, a process of its own made with that package, is played over its WebSocket."""

import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import httpx
import pytest
from ports import free_ports
from tables import table

import rl_vlm
from rl_vlm.envs.errors import EnvCrashError, EnvError, check_reset, check_step
from rl_vlm.envs.foreign.openenv import ActionError, ActionForm
from rl_vlm.types import UserInputError

SERVER = str(Path(__file__).parents[1] / "fixtures" / "openenv_server.py")


@contextmanager
def running(port, *arguments):
    """The server as a process; it is killed at the end."""
    process = subprocess.Popen([sys.executable, SERVER, str(port), *arguments])
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
                break
            except httpx.TransportError:
                assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
                time.sleep(0.1)
        yield process
    finally:
        process.kill()
        process.wait(300)


@pytest.fixture(scope="module")
def server():
    (port,) = free_ports(1)
    with running(port):
        yield f"http://127.0.0.1:{port}"


def opened(env, index=0, split="train"):
    return check_reset(env.reset(options={"index": index, "split": split}))


@pytest.mark.slow
def test_an_episode_is_played_to_its_end(server):
    env = rl_vlm.make(f"openenv:{server}", reset={"goal": 2})
    observation, info = opened(env, 1)
    (message,) = observation.messages
    assert message.text == "Answer with the move (left or right).\n\nThe dot is at 1 of 2."
    assert info["seed"] == 1
    picture, screen = (image.to_pil() for image in message.images)
    assert picture.getpixel((0, 0)) == (40, 0, 0) and screen.size == (8, 8) and screen.getpixel((0, 0)) == (1, 1, 1)
    observation, reward, *ended, _ = check_step(env.step("<think>right?</think>left"))
    assert (observation.messages[0].text, reward, ended) == ("The dot is at 0 of 2.", 0.0, [False, False])
    env.step("right")
    assert check_step(env.step("right"))[1:4] == (1.0, True, False)
    env.close()


@pytest.mark.slow
def test_an_action_that_the_schema_refuses_is_answered_and_counted(server):
    env = rl_vlm.make(f"openenv:{server}", prompt="", max_turns=2)
    assert opened(env)[0].messages[0].text == "The dot is at 0 of 3."
    step = check_step(env.step("x" * 50))
    assert "move: String should have at most 40 characters" in step[0].messages[0].text
    assert step[4] == {"turn": 1, "invalid_actions": 1}
    assert check_step(env.step("right"))[2:4] == (False, True)
    env.close()


@pytest.mark.slow
def test_an_exception_on_the_server_aborts_the_episode_and_the_session_goes_on(server):
    env = rl_vlm.make(f"openenv:{server}")
    opened(env)
    with pytest.raises(EnvError, match="the dot fell off"):
        env.step("crash")
    opened(env)
    assert env.step("right")[1] == 0.0
    env.close()


@pytest.mark.slow
def test_a_server_that_is_full_is_tried_again(server):
    first, second = (rl_vlm.make(f"openenv:{server}") for _ in range(2))
    opened(first), opened(second)
    third = rl_vlm.make(f"openenv:{server}", retry_s=0.4)
    with pytest.raises(EnvCrashError):
        opened(third)
    first.close()
    third = rl_vlm.make(f"openenv:{server}", retry_s=10)
    opened(third)
    second.close(), third.close()


@pytest.mark.acceptance  # two more servers, of which each takes seconds to start
def test_a_server_that_is_killed_loses_the_episode_reset_connects_again_and_a_token_is_sent(monkeypatch):
    (port,) = free_ports(1)
    with running(port):
        env = rl_vlm.make(f"openenv:127.0.0.1:{port}", retry_s=60)
        opened(env)
    with pytest.raises(EnvCrashError):
        env.step("right")
    with running(port, "secret"):
        with pytest.raises(UserInputError, match="token"):
            rl_vlm.make(f"openenv:127.0.0.1:{port}")
        monkeypatch.setenv("DOT_TOKEN", "secret")
        opened(rl_vlm.make(f"openenv:127.0.0.1:{port}", token_variable="DOT_TOKEN"))
        opened(env)
        assert env.step("right")[0].messages[0].text == "The dot is at 1 of 3."
        env.close()


@pytest.mark.parametrize(
    ("properties", "text", "action"),
    [
        *table("openenv_actions")["text_becomes_an_action_or_says_why_it_is_none"],
        ({"w": {"type": "string"}}, "x" * 70_000, None),
    ],
)
def test_text_becomes_an_action_or_says_why_it_is_none(properties, text, action):
    form = ActionForm({"properties": {**properties, "metadata": {}}})
    with nullcontext() if action else pytest.raises(ActionError):
        assert form.parse(text) == action
