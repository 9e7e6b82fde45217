"""The replay buffer and its frames: the ring wraps, everything is relabelled, segments are whole, saving loses nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from control_support import number_of, steps
from safetensors.numpy import load_file, save_file

from rl_vlm.labelling.labels import SegmentPair
from rl_vlm.preference.collector import StepBatch
from rl_vlm.preference.frame_ring import FrameRing
from rl_vlm.preference.replay import NonFiniteStepError, ReplayBuffer
from rl_vlm.types import UserInputError


def filled(capacity: int, total: int, episode_length: int = 7, frames: int = 0) -> ReplayBuffer:
    """Episodes one after another; step n has reward n."""
    buffer = ReplayBuffer(capacity, 2, 1, frame_capacity=frames, image_size=16)
    for first in range(0, total, episode_length):
        count = min(episode_length, total - first)
        done = "truncated" if count == episode_length else ""
        batch = steps(first, count, episode=first // episode_length, done=done, size=16 if frames else 0)
        buffer.add(batch, np.arange(first, first + count, dtype=np.float32))
    return buffer


def test_the_ring_keeps_the_newest_rows() -> None:
    buffer = filled(capacity=10, total=27)
    assert len(buffer) == 10
    assert sorted(buffer.rewards.tolist()) == list(range(17, 27))
    for row in range(10):
        number = buffer.rewards[row]
        assert buffer.observations[row].tolist() == [number, number + 0.25]
        assert buffer.actions[row].tolist() == [number + 0.5]
        assert buffer.next_observations[row].tolist() == [number + 1, number + 1.25]
        assert buffer.true_rewards[row] == -number and buffer.successes[row] == number % 2


def test_critics_look_past_truncation_but_not_past_termination() -> None:
    buffer = ReplayBuffer(10, 2, 1)
    buffer.add(steps(0, 3, done="truncated"), np.zeros(3))
    buffer.add(steps(3, 2, episode=1, done="terminated"), np.zeros(2))
    assert buffer.continues[:5].tolist() == [1, 1, 1, 1, 0]


def test_samples_are_uniform_over_the_rows_that_exist() -> None:
    rng = np.random.default_rng(0)
    rows = filled(capacity=100, total=20).sample_rows(40_000, rng)
    counts = np.bincount(rows, minlength=20)
    assert len(counts) == 20 and np.abs(counts - 2000).max() < 5 * np.sqrt(2000)


@pytest.mark.parametrize("total", [6, 10, 27])
def test_relabelling_covers_the_whole_ring(total: int) -> None:
    buffer = filled(capacity=10, total=total)
    seen: list[np.ndarray] = []

    def reward(inputs: np.ndarray) -> np.ndarray:
        seen.append(inputs)
        return inputs[:, 0] * 10 + inputs[:, 2]

    buffer.relabel_with("state_action", reward, chunk=4)
    size = len(buffer)
    assert np.concatenate(seen).shape == (size, 3)
    numbers = buffer.observations[:size, 0]
    assert buffer.rewards[:size].tolist() == (numbers * 10 + numbers + 0.5).tolist()
    assert buffer.rewards.dtype == np.float32


def test_every_row_is_relabelled_by_its_own_frame() -> None:
    buffer = filled(capacity=10, total=27, frames=10)
    buffer.relabel_with("image", lambda frames: np.array([number_of(f) for f in frames], np.float32), chunk=3)
    assert (buffer.rewards == buffer.observations[:, 0]).all()


def test_rows_whose_frame_is_gone_are_refused() -> None:
    buffer = filled(capacity=20, total=20, frames=5)
    assert [number_of(frame) for frame in buffer.frames_of(np.array([15, 19]))] == [15, 19]
    with pytest.raises(IndexError):
        buffer.frames_of(np.array([14]))


@pytest.mark.parametrize("spoilt", ["observations", "next_observations", "rewards"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_what_is_not_finite_never_reaches_the_learner(spoilt: str, value: float) -> None:
    buffer, batch, rewards = filled(capacity=10, total=5), steps(5, 2), np.zeros(2, np.float32)
    (rewards if spoilt == "rewards" else getattr(batch, spoilt))[1] = value
    with pytest.raises(NonFiniteStepError):
        buffer.add(batch, rewards)
    assert buffer.total == 5 and np.isfinite(buffer.rewards).all()
    unknown = steps(5, 2)
    unknown.true_rewards[:] = np.nan  # an agent that learns from labels never sees them
    buffer.add(unknown, np.zeros(2))
    with pytest.raises(NonFiniteStepError):
        buffer.relabel_with("state_action", lambda inputs: np.full(len(inputs), value, np.float32))
    assert np.isfinite(buffer.rewards).all()


def all_pairs(buffer: ReplayBuffer, length: int, **options: Any) -> list[SegmentPair]:
    return buffer.sample_pairs(200, length, np.random.default_rng(1), **options)


@pytest.mark.parametrize(("capacity", "total"), [(40, 33), (40, 100), (10, 27)])
def test_segments_are_consecutive_steps_of_one_episode(capacity: int, total: int) -> None:
    pairs = all_pairs(filled(capacity, total, frames=capacity), 3)
    assert len(pairs) == 200
    oldest = max(total - capacity, 0)
    for pair in pairs:
        for segment in (pair.first, pair.second):
            numbers = segment.observations[:, 0]
            assert numbers.tolist() == list(range(int(numbers[0]), int(numbers[0]) + 3))
            assert int(numbers[0]) // 7 == int(numbers[-1]) // 7  # the same episode
            assert numbers[0] >= oldest
            assert segment.true_rewards.tolist() == (-numbers).tolist()
            assert segment.frames is not None
            assert [number_of(frame) for frame in segment.frames] == numbers.tolist()
    first = {tuple(pair.first.observations[:, 0]) for pair in pairs}
    assert len(first) > 3


def test_interleaved_environments_do_not_mix() -> None:
    buffer = ReplayBuffer(50, 2, 1)
    for time in range(6):  # one step of each of three environments at a time
        parts = [steps(100 * env + time, 1, episode=env, start=time) for env in range(3)]
        buffer.add(StepBatch.concatenate(parts), np.zeros(3))
    for pair in all_pairs(buffer, 4):
        for segment in (pair.first, pair.second):
            assert np.diff(segment.observations[:, 0]).tolist() == [1, 1, 1]


def test_pairs_come_from_the_newest_rows_when_asked() -> None:
    for pair in all_pairs(filled(100, 60), 2, newest=14):
        assert min(pair.first.observations.min(), pair.second.observations.min()) >= 46


def test_frames_come_back_byte_for_byte() -> None:
    rng = np.random.default_rng(0)
    ring = FrameRing(50, 32)
    background = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    kept: list[np.ndarray] = []
    for number in range(120):
        frame = background.copy()
        frame[number % 28 : number % 28 + 4, 5:9] = rng.integers(0, 256, 3)  # something moves
        kept.append(frame)
    for number in range(0, 120, 2):  # a frame of each of two environments
        ring.add(np.stack(kept[number : number + 2]), np.array([number // 18, 1000 + number // 18]))
    order = rng.permutation(50)
    newest = {number % 50: kept[number] for number in range(70, 120)}
    assert np.array_equal(ring.get(order), np.stack([newest[slot] for slot in order.tolist()]))
    state = ring.state()
    assert state["differences"].nbytes < 50 * 32 * 32 * 3 / 20  # what does not move costs nothing
    assert len(state["firsts_lengths"]) == 2 * len({number // 18 for number in range(70, 120)})


def test_a_ring_that_was_full_is_not_read_by_one_of_another_capacity() -> None:
    """Frame n is in slot n % capacity: another capacity would show other frames."""

    def ring(capacity: int, frames: int = 0) -> FrameRing:
        made = FrameRing(capacity, 16)
        for number in range(frames):
            made.add(np.full((1, 16, 16, 3), number, np.uint8), np.array([number]))
        return made

    with pytest.raises(UserInputError, match=r"preference\.frame_capacity"):
        ring(6).load(ring(4, 10).state())
    larger = ring(6)
    larger.load(ring(4, 3).state())
    assert [int(frame[0, 0, 0]) for frame in larger.get(np.arange(3))] == [0, 1, 2]
    same = ring(4)
    same.load(ring(4, 10).state())
    assert [int(frame[0, 0, 0]) for frame in same.get(np.arange(4))] == [8, 9, 6, 7]


def same(one: ReplayBuffer, other: ReplayBuffer) -> None:
    left, right = one.state(), other.state()
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert array.dtype == right[name].dtype and np.array_equal(array, right[name]), name


@pytest.mark.parametrize("total", [0, 6, 10, 27])
@pytest.mark.parametrize("frames", [0, 10])
def test_a_saved_buffer_goes_on_as_if_nothing_had_happened(total: int, frames: int, tmp_path: Path) -> None:
    buffer = filled(10, total, frames=frames)
    save_file(buffer.state(), tmp_path / "replay.safetensors")
    restored = ReplayBuffer(10, 2, 1, frame_capacity=frames, image_size=16)
    restored.load(load_file(tmp_path / "replay.safetensors"))
    same(buffer, restored)
    for one in (buffer, restored):
        # The open episode goes on, and a new one starts.
        start = total % 7
        one.add(steps(total, 3, episode=total // 7, start=start, size=16 if frames else 0), np.ones(3))
        one.add(steps(total + 3, 2, episode=99, size=16 if frames else 0), np.ones(2))
    same(buffer, restored)
    pairs = [one.sample_pairs(5, 2, np.random.default_rng(3)) for one in (buffer, restored)]
    for left, right in zip(*pairs, strict=True):
        assert np.array_equal(left.first.observations, right.first.observations)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (ReplayBuffer(5, 2, 1), "keep preference.replay_capacity"),
        (ReplayBuffer(20, 2, 1), "keep preference.replay_capacity"),
        (ReplayBuffer(10, 3, 1), "another environment"),
        (ReplayBuffer(10, 2, 1, frame_capacity=10, image_size=16), "with frames"),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused(other: ReplayBuffer, sentence: str) -> None:
    with pytest.raises(UserInputError, match=sentence):
        other.load(filled(10, 27).state())
