"""An environment over HTTP: the same episodes as beside us, tokens, limits, retries, sessions that are lost."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
from PIL import Image

import rl_vlm
from rl_vlm import frames
from rl_vlm.config import HTTPSection
from rl_vlm.envs.address import base_url
from rl_vlm.envs.base import VisionEnv
from rl_vlm.envs.errors import EnvCrashError, EnvError, EnvTimeoutError
from rl_vlm.envs.remote import RemoteEnv
from rl_vlm.http.env_server import EnvServer
from rl_vlm.http.server import HTTPServer, bind
from rl_vlm.types import EncodedImage, Observation, UserInputError

IMAGES = {
    "many": [EncodedImage.from_pil(Image.new("RGB", (4, 4)))] * 65,
    "broken": [EncodedImage("", b"\x89PNG not", 1, 1)],
}


class Counting(VisionEnv):
    """Counts the steps that were really made; some of them go wrong."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return Observation.user("Go."), {}

    def step(self, action):
        if action == "raise":
            raise RuntimeError("out of order")
        if action == "sleep":
            time.sleep(1.0)
        if action in IMAGES:
            return Observation.user(*IMAGES[action]), 0.0, False, False, {}
        self.steps += 1
        return Observation.user(str(self.steps)), 0.0, False, False, {"steps": self.steps, "odd": {1, 2}}


@contextmanager
def served(build, token=None, port=0, max_sessions=8, **limits):
    """The address of a real server, and the server."""
    server = EnvServer(build, max_sessions=max_sessions)
    section = HTTPSection(**{"drain_s": 0.1, **limits})
    sock, ready = bind("127.0.0.1", port), threading.Event()
    http = HTTPServer(server.app(section, token), sock, section, ready.set)
    thread = threading.Thread(target=http.run, args=([sock],), daemon=True)
    thread.start()
    assert ready.wait(300)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}", server
    finally:
        http.should_exit = True
        thread.join(10)
        server.close()


def test_episodes_are_the_same_as_beside_us():
    local = rl_vlm.make("GridWalk-v0")
    with served(lambda: rl_vlm.make("GridWalk-v0")) as (url, _):
        for spec in (url, f"remote:{url}", f"remote:{url.removeprefix('http://')}"):
            remote = rl_vlm.make(spec)
            assert remote.num_items("train") == local.num_items("train") == 4096
            options = {"index": 7, "split": "test"}
            here, there = local.reset(seed=1, options=options), remote.reset(seed=1, options=options)
            for move in ("up", "left", "nonsense"):
                assert here[0].messages[0].text == there[0].messages[0].text
                ours, theirs = (one[0].messages[0].images[0].to_pil() for one in (here, there))
                assert ours.tobytes() == theirs.tobytes()
                assert here[1:] == there[1:]
                here, there = local.step(move), remote.step(move)
                if here[2]:
                    break
            remote.close()


def test_each_client_has_an_environment_of_its_own_and_closing_ends_it():
    with served(Counting) as (url, server):
        first, second = RemoteEnv(url), RemoteEnv(url)
        first.reset()
        second.reset()
        first.step("x")
        assert first.step("x")[4]["steps"] == 2 and second.step("x")[4]["steps"] == 1
        assert server.num_sessions == 2
        first.close()
        assert server.num_sessions == 1


def test_errors_of_the_environment_come_back_as_such():
    with served(Counting) as (url, _):
        env = RemoteEnv(url)
        env.reset()
        with pytest.raises(EnvError, match="out of order"):
            env.step("raise")
        assert env.step("x")[4]["odd"] == "{1, 2}"  # what JSON does not know is sent as text
    with served(lambda: rl_vlm.make("Shapes-v0", turns=99)) as (url, _), pytest.raises(UserInputError, match="turns"):
        RemoteEnv(url)


def test_a_token_is_needed_where_one_is_set(monkeypatch):
    with served(Counting, token="secret") as (url, _):
        monkeypatch.delenv("RL_VLM_API_TOKEN", raising=False)
        with pytest.raises(UserInputError, match="token"):
            RemoteEnv(url)
        monkeypatch.setenv("MINE", "wrong")
        with pytest.raises(UserInputError, match="token"):
            RemoteEnv(url, token_variable="MINE")
        monkeypatch.setenv("MINE", "secret")
        assert RemoteEnv(url, token_variable="MINE").reset()[0].messages[0].text == "Go."


def test_a_connection_that_breaks_is_opened_again_and_no_step_is_made_twice(monkeypatch):
    with served(Counting) as (url, _):
        env = RemoteEnv(url)
        env.reset()
        stream, lost = httpx.Client.stream, []

        @contextmanager
        def lossy(*arguments, **more):
            with stream(*arguments, **more) as response:
                if len(lost) < 2:
                    lost.append(response.read())
                    raise httpx.RemoteProtocolError("the reply is lost")
                yield response

        monkeypatch.setattr(httpx.Client, "stream", lossy)
        assert env.step("x")[4]["steps"] == 1 and len(lost) == 2


def test_a_server_that_starts_again_loses_the_episode_and_reset_opens_another():
    with served(Counting) as (url, _):
        env = RemoteEnv(url, retry_s=5.0)
        env.reset()
        port = int(url.rpartition(":")[2])
    with served(Counting, port=port):
        with pytest.raises(EnvCrashError):
            env.step("x")
        env.reset()
        assert env.step("x")[4]["steps"] == 1


def test_a_server_that_is_gone_is_an_error_after_the_time_for_retries():
    started = time.monotonic()
    with pytest.raises(EnvCrashError):
        RemoteEnv("127.0.0.1:9", retry_s=0.3)
    assert time.monotonic() - started < 30


def test_a_full_server_ends_the_session_that_is_longest_unused():
    """A client that was killed never closes its own."""
    with served(Counting, max_sessions=2) as (url, server):
        killed, alive = RemoteEnv(url), RemoteEnv(url)
        for session, ago in zip(server._sessions.values(), (61.0, 59.0), strict=True):
            session.used -= ago
        alive.reset()
        alive.step("x")
        third = RemoteEnv(url, retry_s=0.1)
        assert server.num_sessions == 2 and alive.step("x")[4]["steps"] == 2
        with pytest.raises(EnvCrashError):
            RemoteEnv(url, retry_s=0.1)
        third.close()
        assert killed.reset()[0].messages[0].text == "Go."  # it was alive after all


def test_bodies_are_limited():
    with served(Counting, max_body_mib=0.01) as (url, _):
        env = RemoteEnv(url)
        env.reset()
        with pytest.raises(EnvCrashError):
            env.step("x" * 20_000)


@pytest.mark.parametrize(
    "body", [b"", b"\x00\x00", b"\xff\xff\xff\xff{}", frames.pack_frame({"op": "pickle"}, []), b"\0\0\0\2[]"]
)
def test_bytes_that_are_no_request_are_refused(body):
    with served(Counting) as (url, _):
        assert httpx.post(f"{url}/env", content=body, trust_env=False).status_code in (400, 410)


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_stop():
    command = [sys.executable, "-m", "rl_vlm.cli", "envs", "serve", "GridWalk-v0", "--port", "0"]
    env = {**os.environ, "RL_VLM_API_TOKEN": "secret", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([*command, "--env-arg", "num_test=7"], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        url = said.rpartition("env.id=")[2].strip()
        assert "token required" in said and url.startswith("http://127.0.0.1:")
        os.environ["SERVED_TOKEN"] = "secret"
        remote = RemoteEnv(url, token_variable="SERVED_TOKEN")
        assert remote.num_items("test") == 7
        remote.reset(options={"index": 0})
        assert remote.step("up")[4]["steps"] == 1
        remote.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 143
    finally:
        os.environ.pop("SERVED_TOKEN", None)
        process.kill()
        process.wait(300)


def test_beyond_loopback_a_token_is_required_and_a_wrong_environment_is_named(monkeypatch, capsys):
    from rl_vlm.cli.app import run

    monkeypatch.delenv("RL_VLM_API_TOKEN", raising=False)
    assert run(["envs", "serve", "GridWalk-v0", "--host", "0.0.0.0"]) == 2
    assert "set RL_VLM_API_TOKEN" in capsys.readouterr().err
    assert run(["envs", "serve", "GridWalk-v0", "--env-arg", "size=99", "--port", "0"]) == 2
    assert "env.kwargs.size must be less than or equal to 6, not 99" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["", "ftp://a", "http://", "http://u:p@host", "host:port:7", "http://h/?x=1"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(UserInputError, match="http://host:port"):
        base_url(address)


@pytest.mark.parametrize(("action", "words"), [("many", "more than 64"), ("broken", "cannot be read")])
def test_images_from_elsewhere_are_decoded_and_limited(action, words):
    with served(Counting) as (url, _):
        env = RemoteEnv(url)
        env.reset()
        with pytest.raises(EnvError, match=words):
            env.step(action)


def test_a_session_whose_call_timed_out_is_ended_on_the_server():
    with served(Counting, max_sessions=1) as (url, server):
        env = RemoteEnv(url, timeout_s=0.5)
        env.reset()
        with pytest.raises(EnvTimeoutError):
            env.step("sleep")
        assert server.num_sessions == 1  # while its environment is at work
        RemoteEnv(url, retry_s=60.0).close()
        assert server.num_sessions == 0
        env.reset()
        assert env.step("x")[4]["steps"] == 1
