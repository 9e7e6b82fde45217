"""Environments in a process of their own: the same episodes, and every way to fail ends in an error with a name."""

import gc
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from PIL import Image

from rl_vlm import frames
from rl_vlm.envs.errors import EnvCrashError, EnvError, EnvTimeoutError
from rl_vlm.envs.isolation import ProcessEnv
from rl_vlm.types import EncodedImage, UserInputError
from rl_vlm.zoo.geo3k.environment import Geo3kEnv

pytestmark = pytest.mark.slow

FIXTURES = Path(__file__).parents[1] / "fixtures"
BROKEN = str(FIXTURES / "envs" / "broken_env.py")
GEO3K = str(FIXTURES / "geo3k")


def gone(pid: int, within_s: float = 5.0) -> bool:
    """Whether a process has ended (a zombie has) within some seconds."""
    deadline = time.monotonic() + within_s
    while psutil.pid_exists(pid):
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture(scope="module")
def shared():
    """One child for the tests that leave it unharmed."""
    env = ProcessEnv(BROKEN)
    yield env
    env.close()


@pytest.fixture
def env(shared):
    """The shared child with an open episode; a fresh one if the last test has killed it."""
    shared.reset(seed=1, options={"index": 0, "split": "train"})
    return shared


def test_an_episode_is_the_same_as_in_process():
    arguments = {"data": GEO3K, "max_turns": 2, "image_size": 64}
    inside, outside = Geo3kEnv(**arguments), ProcessEnv("Geo3k-v0", arguments)
    try:
        assert outside.num_items("train") == inside.num_items("train") == 8
        options = {"index": 1, "split": "test"}
        assert outside.reset(seed=3, options=options) == inside.reset(seed=3, options=options)
        for text in ('<tool_call>{"name": "calc_score", "arguments": {"answer": "7 ü"}}</tool_call>', r"\boxed{22.5}"):
            assert outside.step(text) == inside.step(text)
        with pytest.raises(UserInputError, match="reset"):
            outside.step("more")
        assert outside.reset(seed=4)[1] == inside.reset(seed=4)[1]
        with pytest.raises(UserInputError, match="index 99"):
            outside.reset(options={"index": 99})
    finally:
        outside.close()
    assert outside.pid is None


def test_texts_images_and_info_arrive(env):
    observation, info = env.reset(seed=1, options={"index": 2})
    image = observation.messages[0].images[0]
    assert isinstance(image, EncodedImage)
    assert image == EncodedImage.from_pil(Image.new("RGB", (6, 5), "red"))
    assert "'index': 2" in observation.messages[0].text
    assert info["number"] == 3
    observation, reward, terminated, truncated, info = env.step("fine")
    assert observation.messages[0].text == "heard 4"
    assert (reward, terminated, truncated) == (0.5, False, False)
    assert info["list"] == [0, 1] and info["odd"] == "<class 'object'>"
    assert env.step("é" * 1_000_000)[0].messages[0].text == "heard 1000000"  # more than a pipe holds


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("raise", "step: RuntimeError: first line second line"),
        ("leave", "KeyboardInterrupt: no more items"),
        ("nan", "returned the reward nan"),
        ("short", "not a tuple of 3"),
        ("text", "must return an Observation, not a value of type str"),
        ("cycle", "the reply cannot be sent"),
        ("large", "is too large"),
    ],
)
def test_a_failing_step_is_an_error_that_the_child_survives(env, action, message):
    pid = env.pid
    with pytest.raises(EnvError, match=message):
        env.step(action)
    assert env.step("fine")[1] == 0.5
    assert env.pid == pid


@pytest.mark.parametrize("action", ["exit", "abort", "kill"])
def test_a_crash_is_reported_and_reset_starts_a_fresh_child(env, action):
    pid = env.pid
    if action == "kill":
        helpers = psutil.Process(pid).children(recursive=True)
        os.kill(pid, signal.SIGKILL)
        assert all(gone(helper.pid) for helper in helpers)  # the one that answers dies a moment after its supervisor
    with pytest.raises(EnvCrashError):
        env.step(action)
    with pytest.raises(EnvCrashError):
        env.step("fine")
    env.reset(options={"index": 0})
    assert env.pid != pid
    assert env.step("fine")[1] == 0.5


def test_a_hanging_step_is_killed_with_all_that_it_started(tmp_path):
    note = tmp_path / "pid"
    env = ProcessEnv(BROKEN, {"hello": str(note)}, step_timeout_s=3.0)
    env.reset()
    pid = env.pid
    started = time.monotonic()
    with pytest.raises(EnvTimeoutError):
        env.step("hang with a child")
    assert time.monotonic() - started < 60
    assert gone(pid) and gone(int(note.read_text()))
    env.reset()
    assert env.step("fine")[1] == 0.5
    env.close()


def test_the_child_dies_with_its_parent_even_when_it_hangs():
    program = (
        "import sys\nfrom rl_vlm.envs.isolation import ProcessEnv\n"
        f"env = ProcessEnv({BROKEN!r})\nenv.reset()\nprint(env.pid, flush=True)\nenv.step('hang')\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    helpers = psutil.Process(pid).children(recursive=True)
    time.sleep(0.2)
    assert not gone(pid, within_s=0.1)
    parent.kill()
    parent.communicate()
    assert gone(pid)
    assert all(gone(helper.pid) for helper in helpers)


def open_pipes() -> set[str]:
    """Of this process, by name; threads that other tests left behind may close one meanwhile."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(os.readlink(descriptor))
    return {name for name in found if name.startswith(("pipe:", "socket:"))}


def test_an_environment_that_is_dropped_leaves_no_process():
    gc.collect()  # what other tests have left behind would be closed between the two counts
    before = open_pipes()
    env = ProcessEnv(BROKEN)
    pid, opened = env.pid, open_pipes() - before
    assert len(opened) >= 2
    del env
    gc.collect()
    assert gone(pid)
    assert len(opened & open_pipes()) <= len(opened) - 2


def test_wrong_arguments_are_input_errors_and_leave_no_process():
    before = len(psutil.Process().children())
    with pytest.raises(UserInputError, match="env.kwargs.level"):
        ProcessEnv("Geo3k-v0", {"level": 9})
    with pytest.raises(UserInputError, match="Unknown"):
        ProcessEnv("Nonsense-v0")
    with pytest.raises(UserInputError, match=r"env\.kwargs\.hello"):
        ProcessEnv(BROKEN, {"hello": object()})
    with pytest.raises(EnvCrashError):
        ProcessEnv(BROKEN, {"die": True})
    assert len(psutil.Process().children()) == before


# Frames on the pipes between them.


@pytest.fixture
def pipes():
    """(channel, the file that feeds it)."""
    read_fd, feed = os.pipe()
    channel = frames.Channel(read_fd, os.open(os.devnull, os.O_WRONLY))
    with open(feed, "wb", buffering=0) as file:
        yield channel, file
    channel.close()


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        b"\0\0\0\2[]",
        b"\0\0\0\2{}",
        b"\0\0\0\4nope",
        b'\0\0\0\x0e{"blobs":[-1]}',
        b'\0\0\0\x19{"blobs":[9999999999999]} ',
        b"\0\0\0\x02\xff\xfe",
    ],
)
def test_nonsense_is_no_frame(pipes, frame):
    channel, feed = pipes
    feed.write(frame)
    with pytest.raises(frames.FrameError):
        channel.receive(timeout_s=5)


def test_half_a_frame_times_out_and_an_end_is_an_end(pipes):
    channel, feed = pipes
    feed.write(b"\0\0\0\x20{")
    with pytest.raises(TimeoutError):
        channel.receive(timeout_s=0.1)
    feed.close()
    with pytest.raises(frames.PeerGoneError):
        channel.receive(timeout_s=5)
