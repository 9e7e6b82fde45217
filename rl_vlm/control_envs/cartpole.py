"""Continuous CartPole as RL-VLM-F defines it: real-valued force, 100 steps in every episode, reward from the angle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from PIL import Image, ImageDraw

from rl_vlm.control_envs.base import ControlEnv, StepResult, unit_box

SIZE = 200  # of the layout below, in pixels
_SUPERSAMPLING = 2  # PIL does not smooth edges: draw larger, then average
_GROUND_Y = 160.0  # the rail, which goes through the middle of the cart
_CART_WIDTH, _CART_HEIGHT = 50.0, 30.0
_AXLE_Y = _GROUND_Y - _CART_HEIGHT / 4
_POLE_WIDTH, _POLE_LENGTH = 10.0, 125.0
_WHITE, _BLACK, _BROWN, _AXLE = (255, 255, 255), (0, 0, 0), (202, 152, 101), (129, 132, 203)
_GRAVITY, _CART_MASS, _POLE_MASS, _HALF_LENGTH = 9.8, 1.0, 0.1, 0.5
_FORCE, _SECONDS = 10.0, 0.02
_TRACK = 1.92  # metres on either side
_MAX_ANGLE = math.radians(30)
_SUCCESS_DEGREES = 5.0


def draw_cartpole(angle: float, size: int = SIZE) -> np.ndarray:
    """uint8 [size, size, 3] by PIL (no display, no OpenGL, equal bytes on every machine): a black cart in the middle
    and a brown pole on it, which leans to the right by `angle` (radians). The cart's place on the rail is not shown."""
    side = size * _SUPERSAMPLING
    scale = side / SIZE
    image = Image.new("RGB", (side, side), _WHITE)
    draw = ImageDraw.Draw(image)
    middle = SIZE / 2

    def box(left: float, top: float, right: float, bottom: float) -> tuple[float, float, float, float]:
        return left * scale, top * scale, right * scale - 1, bottom * scale - 1

    half = _CART_WIDTH / 2
    draw.rectangle(
        box(middle - half, _GROUND_Y - _CART_HEIGHT / 2, middle + half, _GROUND_Y + _CART_HEIGHT / 2), _BLACK
    )
    draw.line((0, _GROUND_Y * scale, side, _GROUND_Y * scale), _BLACK, width=max(1, round(scale)))
    sine, cosine = math.sin(angle), math.cos(angle)
    across, below, above = _POLE_WIDTH / 2, -_POLE_WIDTH / 2, _POLE_LENGTH - _POLE_WIDTH / 2
    corners = [(-across, below), (-across, above), (across, above), (across, below)]
    turned = [(middle + x * cosine + y * sine, _AXLE_Y + x * sine - y * cosine) for x, y in corners]
    draw.polygon([(x * scale, y * scale) for x, y in turned], _BROWN)
    draw.ellipse(box(middle - across, _AXLE_Y - across, middle + across, _AXLE_Y + across), _AXLE)
    return np.asarray(image.reduce(_SUPERSAMPLING)).copy()


class ContinuousCartPole(ControlEnv):
    """Keep a pole upright on a cart; the reward is minus the angle in degrees; success is an angle below 5° at the end.

    Observation: place, velocity, angle, angular velocity. The angle is limited to 30°, so an episode never ends early
    and 0 is a perfect return. Not gymnasium's `CartPole-v1`, which is discrete and ends when the pole falls.
    """

    def __init__(self, horizon: int = 100, image_size: int = 200) -> None:
        self.horizon, self.image_size = horizon, image_size
        high = np.array([_TRACK, np.inf, _MAX_ANGLE, np.inf], dtype=np.float32)
        self.observation_space = Box(-high, high, dtype=np.float32)
        self.action_space = unit_box(1)
        self._state = (0.0, 0.0, 0.0, 0.0)
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start within ±0.05 of rest in each of the four numbers."""
        super().reset(seed=seed)
        self._state = tuple(self.np_random.uniform(-0.05, 0.05, 4).tolist())
        self._steps = 0
        return self._observe(), {}

    def step(self, action: np.ndarray) -> StepResult:
        """Push with 10 N times the action for 0.02 s (explicit Euler; Barto, Sutton and Anderson, 1983)."""
        x, x_dot, angle, angle_dot = self._state
        force = _FORCE * float(np.clip(action[0], -1.0, 1.0))
        sine, cosine = math.sin(angle), math.cos(angle)
        mass = _CART_MASS + _POLE_MASS
        push = (force + _POLE_MASS * _HALF_LENGTH * angle_dot**2 * sine) / mass
        angle_acc = (_GRAVITY * sine - cosine * push) / (_HALF_LENGTH * (4 / 3 - _POLE_MASS * cosine**2 / mass))
        x_acc = push - _POLE_MASS * _HALF_LENGTH * angle_acc * cosine / mass
        x, x_dot = x + _SECONDS * x_dot, x_dot + _SECONDS * x_acc
        angle, angle_dot = angle + _SECONDS * angle_dot, angle_dot + _SECONDS * angle_acc
        # Only place and angle are clipped, as in the original, and not the velocities.
        x = min(max(x, -_TRACK), _TRACK)
        angle = min(max(angle, -_MAX_ANGLE), _MAX_ANGLE)
        self._state = (x, x_dot, angle, angle_dot)
        self._steps += 1
        degrees = abs(math.degrees(angle))
        ended = self._steps >= self.horizon
        info = {"success": ended and degrees < _SUCCESS_DEGREES, "degrees": degrees}
        return self._observe(), -degrees, False, ended, info

    def frame(self) -> np.ndarray:
        return draw_cartpole(self._state[2], self.image_size)

    def _observe(self) -> np.ndarray:
        return np.array(self._state, dtype=np.float32)
