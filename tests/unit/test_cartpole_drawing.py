"""The drawing of the cart and its pole shows the angle, and nothing else."""

import math

import numpy as np
import pytest

from rl_vlm.control_envs.cartpole import draw_cartpole

BROWN = np.array([202, 152, 101])


def pole_pixels(frame: np.ndarray) -> np.ndarray:
    """[P, 2] (x, y) of the brown pixels."""
    rows, columns = np.nonzero(np.abs(frame.astype(int) - BROWN).max(-1) < 8)
    return np.stack([columns, rows], axis=1).astype(float)


@pytest.mark.parametrize("size", [64, 100, 200])
@pytest.mark.parametrize("degrees", [-30, -12, 0, 7, 30])
def test_the_angle_can_be_read_from_the_picture(size: int, degrees: float) -> None:
    frame = draw_cartpole(math.radians(degrees), size)
    assert frame.shape == (size, size, 3) and frame.dtype == np.uint8
    points = pole_pixels(frame)
    # The first principal axis of the brown pixels is the pole's own.
    _, _, axes = np.linalg.svd(points - points.mean(0), full_matrices=False)
    x, y = axes[0] if axes[0][1] < 0 else -axes[0]
    assert math.degrees(math.atan2(x, -y)) == pytest.approx(degrees, abs=1.0)


def test_left_and_right_are_mirror_images() -> None:
    left, right = draw_cartpole(-0.3, 200), draw_cartpole(0.3, 200)
    assert np.abs(left[:, ::-1].astype(int) - right).mean() < 1.5
