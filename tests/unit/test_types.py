"""The shared types: what a trajectory must fulfil, and how images are encoded."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
from PIL import Image

from rl_vlm.types import (
    EncodedImage,
    StopReason,
    Trajectory,
    TrajectoryError,
    TrajectoryGroup,
    TrajectoryStatus,
    Turn,
)


def trajectory(**changes: object) -> Trajectory:
    """Two turns, [2, 4) and [6, 7), of eight tokens, unless something is changed."""
    mask = np.zeros(8, dtype=bool)
    mask[[2, 3, 6]] = True
    whole = Trajectory(
        trajectory_id="t1",
        token_ids=np.arange(8, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -1.5, 0).astype(np.float32),
        turns=(Turn(2, 4, 3, StopReason.END_OF_TURN, 0.25), Turn(6, 7, 5, StopReason.LENGTH, 1.0)),
        status=TrajectoryStatus.COMPLETED,
    )
    return dataclasses.replace(whole, **changes)


def changed(array: np.ndarray, place: int, value: object) -> np.ndarray:
    array = array.copy()
    array[place] = value
    return array


# --- trajectories


def test_a_sound_trajectory_is_returned_as_it_is() -> None:
    whole = trajectory()
    assert whole.check() is whole
    assert (len(whole), whole.num_sampled, whole.reward, whole.oldest_version) == (8, 3, 1.25, 3)


def test_a_turn_survives_pickling_with_all_its_fields() -> None:
    pieces, parts = ((1, 3), (1, 5)), (("answer", 0.5),)
    turn = Turn(2, 4, 3, StopReason.STOP, 0.25, "0123456789abcdef", pieces, parts, well_formed=False)
    values = [getattr(turn, field.name) for field in dataclasses.fields(turn)]
    assert len(set(map(str, values))) == len(values)  # no field is mistaken for another
    group = pickle.loads(pickle.dumps(TrajectoryGroup("g", 0, [trajectory(turns=(turn,))], "count", 2)))
    assert group.trajectories[0].turns == (turn,) and (group.env, group.stage) == ("count", 2)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"loss_mask": np.zeros(7, dtype=bool)}, "equally long"),
        ({"logprobs": np.zeros(9, dtype=np.float32)}, "equally long"),
        ({"turns": (Turn(2, 4, 0, StopReason.STOP), Turn(3, 7, 0, StopReason.STOP))}, "follow"),
        ({"turns": (Turn(6, 7, 0, StopReason.STOP), Turn(2, 4, 0, StopReason.STOP))}, "follow"),
        ({"turns": (Turn(2, 2, 0, StopReason.STOP),)}, "follow"),
        ({"turns": (Turn(2, 9, 0, StopReason.STOP),)}, "follow"),
        ({"turns": (Turn(-1, 4, 0, StopReason.STOP),)}, "follow"),
        ({"turns": (Turn(0, 4, 0, StopReason.STOP),)}, "follow"),  # nothing predicts the first token
        ({"turns": (Turn(2, 4, 0, StopReason.STOP),)}, "loss mask"),
        ({"loss_mask": changed(trajectory().loss_mask, 5, True)}, "loss mask"),
        ({"turns": (Turn(2, 4, 0, StopReason.STOP, float("nan")), trajectory().turns[1])}, "rewards are finite"),
        ({"turns": (Turn(2, 4, 0, StopReason.STOP, float("inf")), trajectory().turns[1])}, "rewards are finite"),
        ({"logprobs": changed(trajectory().logprobs, 3, np.nan)}, "finite"),
        ({"logprobs": changed(trajectory().logprobs, 3, -np.inf)}, "finite"),
        ({"logprobs": changed(trajectory().logprobs, 3, 0.1)}, "at most 0"),
        ({"logprobs": changed(trajectory().logprobs, 1, -0.1)}, "only sampled"),
    ],
)
def test_each_broken_invariant_is_named(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(TrajectoryError, match="trajectory t1") as error:
        trajectory(**changes).check()
    assert complaint in str(error.value)


def test_a_group_reports_rewards_and_its_oldest_version() -> None:
    other = trajectory(turns=(Turn(2, 4, 2, StopReason.STOP), Turn(6, 7, 9, StopReason.STOP, -1.0)))
    group = TrajectoryGroup("g", 0, [trajectory(), other])
    assert group.rewards.dtype == np.float64
    assert group.rewards.tolist() == [1.25, -1.0]
    assert (len(group), group.oldest_version) == (2, 2)


# --- images


def test_equal_pixels_have_equal_hashes_and_others_do_not() -> None:
    red = EncodedImage.from_pil(Image.new("RGB", (3, 3), "red"))
    assert EncodedImage.from_pil(Image.new("RGBA", (3, 3), "red")).sha256 == red.sha256
    assert EncodedImage.from_pil(Image.new("RGB", (3, 3), "blue")).sha256 != red.sha256
