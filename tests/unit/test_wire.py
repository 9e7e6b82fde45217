"""Frames between a process and its environment: nonsense, half frames and the end are told apart."""

import os
import time

import pytest

from rl_vlm import frames


@pytest.fixture
def pipes():
    """(channel, fd that feeds it)."""
    read_fd, feed = os.pipe()
    drain, write_fd = os.pipe()
    channel = frames.Channel(read_fd, write_fd)
    yield channel, feed
    channel.close()
    for fd in (feed, drain):
        try:
            os.close(fd)
        except OSError:
            pass  # the test has closed it


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
    os.write(feed, frame)
    with pytest.raises(frames.FrameError):
        channel.receive(timeout_s=5)


def test_half_a_frame_times_out_and_an_end_is_an_end(pipes):
    channel, feed = pipes
    os.write(feed, b"\0\0\0\x20{")
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        channel.receive(timeout_s=0.1)
    assert time.monotonic() - started < 30
    os.close(feed)
    with pytest.raises(frames.PeerGoneError):
        channel.receive(timeout_s=5)
