"""YAML, paths, wires and environments that were made to harm."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fuzzing import patient
from http_support import wait_until
from hypothesis import given
from hypothesis import strategies as st
from image_corpus import encoded

from rl_vlm import frames
from rl_vlm.cli.output import ErrorReport
from rl_vlm.config.loading import load_config
from rl_vlm.config.yaml_text import Dumper, load_yaml
from rl_vlm.envs import isolation
from rl_vlm.envs.images import BadImageError, image_bytes
from rl_vlm.envs.isolation import ProcessEnv
from rl_vlm.envs.loading import absolute_spec
from rl_vlm.files import append_whole, resolved
from rl_vlm.ownership import RUN_MARKER, mark_run
from rl_vlm.types import UserInputError

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [
        LAUGHS,
        "a: &a [*a]",
        "a: &a {b: *a}",
        "[" * 5000,
        "a: 2020-13-45",
        "x" * (5 * 2**20),
        "? [a]\n: b",
        "!!python/name:os.system",
    ],
)
def test_a_hostile_configuration_is_one_sentence(text, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UserInputError) as caught:
        load_config(tmp_path / "run.yaml")
    assert len(str(caught.value)) < 500


@pytest.mark.slow
@patient
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
    )
)
def test_what_yaml_writes_is_read(value):
    assert load_yaml(yaml.dump(value, Dumper=Dumper)) == value


@pytest.mark.parametrize(
    "width, height", [("x", 1), (None, 1), (1.5, 1), (0, 1), (-1, 8), (2**40, 1), (True, 1), ([], 1), (8, 10**400)]
)
def test_a_size_on_the_wire_that_is_none_is_a_frame_error(width, height):
    messages = [{"role": "user", "parts": [{"width": width, "height": height}]}]
    with pytest.raises(frames.FrameError):
        isolation.unpack_observation({"messages": messages}, [encoded("PNG")])


@pytest.mark.parametrize(
    "messages", [None, 5, [5], [{"role": "user"}], [{"role": "user", "parts": [5]}], "ab", [None], {"role": 1}]
)
def test_messages_on_the_wire_that_are_none_are_a_frame_error(messages):
    with pytest.raises(frames.FrameError):
        isolation.unpack_observation({"messages": messages}, [encoded("PNG")])


def test_links_in_a_circle_are_one_sentence(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(UserInputError, match="leads nowhere"):
        resolved(tmp_path / "a")
    with pytest.raises(BadImageError, match="cannot be read|no such file"):
        image_bytes("a", tmp_path)
    with pytest.raises(UserInputError, match="leads nowhere"):
        load_config(None, [f"model.adapter={tmp_path / 'a'}"])
    with pytest.raises(UserInputError, match="leads nowhere"):
        absolute_spec(str(tmp_path / "a" / "env.py"))


def test_nothing_is_written_through_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    for name in ("progress.csv", "error.log", RUN_MARKER):
        (run / name).symlink_to(victim)
    with pytest.raises(UserInputError, match="symbolic link"):
        append_whole(run / "progress.csv", b"row\n")
    mark_run(run)
    report = ErrorReport()
    report.folder = run
    report.report(ValueError("x"))
    assert victim.read_text() == "mine"
    assert "ValueError" in (run / "error.log").read_text() and (run / RUN_MARKER).is_file()


ENV = '''
import os, subprocess, sys
from rl_vlm.envs.base import VisionEnv
from rl_vlm.types import Message, Observation

DAEMON = """
import os, sys, time
if os.fork():
    os._exit(0)
os.setsid()
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(600)
"""


class Env(VisionEnv):
    """Starts a process in a session of its own, whose parent is gone, and tells what it sees."""

    def __init__(self, pid_file="", variable=""):
        super().__init__()
        if pid_file:
            subprocess.run([sys.executable, "-c", DAEMON, pid_file])

    def reset(self, *, seed=None, options=None):
        return Observation((Message.of("user", " ".join(sorted(os.environ))),)), {}

    def step(self, action):
        os._exit(3)
'''


@pytest.fixture
def env_file(tmp_path):
    path = tmp_path / "env.py"
    path.write_text(ENV)
    return str(path)


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "crash"])
def test_a_process_in_a_session_of_its_own_ends_with_its_environment(how, env_file, tmp_path):
    pid_file = tmp_path / "pid"
    env = ProcessEnv(env_file, {"pid_file": str(pid_file)})
    wait_until(lambda: pid_file.exists() and pid_file.read_text())
    pid = int(pid_file.read_text())
    assert not gone(pid)
    if how == "close":
        env.close()
    else:
        with pytest.raises(Exception, match="died"):
            env.step("x")
    wait_until(lambda: gone(pid))


@pytest.mark.slow
def test_a_process_in_a_session_of_its_own_ends_with_the_process_that_made_the_environment(env_file, tmp_path):
    pid_file = tmp_path / "pid"
    program = f"""
import os, pathlib, time
from rl_vlm.envs.isolation import ProcessEnv

env, pid = ProcessEnv({env_file!r}, {{"pid_file": {str(pid_file)!r}}}), pathlib.Path({str(pid_file)!r})
while not (pid.exists() and pid.read_text()):  # it would be gone before it has said who it is
    time.sleep(0.02)
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", program], check=False)
    wait_until(lambda: pid_file.exists() and pid_file.read_text())
    wait_until(lambda: gone(int(pid_file.read_text())))


@pytest.mark.slow
def test_environments_see_no_tokens_but_those_that_they_need(env_file, monkeypatch):
    for name in ("WANDB_API_KEY", "HF_TOKEN", "RL_VLM_API_TOKEN", "GAME_TOKEN", "OTHER_KEY"):
        monkeypatch.setenv(name, "a-long-secret-value")
    monkeypatch.setenv("RL_VLM_ENV_PASS", "OTHER_KEY")
    env = ProcessEnv(env_file, {"variable": "GAME_TOKEN"})
    try:
        seen = env.reset()[0].messages[0].text.split()
    finally:
        env.close()
    assert {"GAME_TOKEN", "OTHER_KEY", "PATH"} <= set(seen)
    assert not {"WANDB_API_KEY", "HF_TOKEN", "RL_VLM_API_TOKEN"} & set(seen)
