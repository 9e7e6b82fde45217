"""An environment with the pictures of other items: what a policy gains there, it gains without looking."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rl_vlm.envs.base import VisionEnv
from rl_vlm.envs.errors import StepResult
from rl_vlm.envs.registry import make
from rl_vlm.types import Observation, Split, images_of


class ShuffledPictures(VisionEnv):
    """`env` with its texts and rewards, and in place of each picture that of the next item after the same answers."""

    def __init__(self, env: str) -> None:
        self.shown, self.other = make(env), make(env)

    def num_items(self, split: Split) -> int | None:
        return self.shown.num_items(split)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Any]:
        split, index = self.item(options, size := self.num_items((options or {}).get("split", "train")))
        following = (index + 1) % size if size else index + 1
        observation, info = self.shown.reset(seed=seed, options={"split": split, "index": index})
        other, _ = self.other.reset(seed=seed, options={"split": split, "index": following})
        return _with_pictures(observation, other), info

    def step(self, action: str) -> StepResult:
        observation, reward, terminated, truncated, info = self.shown.step(action)
        if not (terminated or truncated):
            observation = _with_pictures(observation, self.other.step(action)[0])
        return observation, reward, terminated, truncated, info


def _with_pictures(observation: Observation, other: Observation) -> Observation:
    """The texts of one and the pictures of the other. Raises ValueError if they show different numbers of pictures."""
    places, pictures = images_of(observation.messages), images_of(other.messages)
    if len(places) != len(pictures):
        raise ValueError(f"One item shows {len(places)} pictures and the next {len(pictures)}: there is no swapping.")
    left = iter(pictures)
    return Observation(
        tuple(
            replace(message, parts=tuple(part if isinstance(part, str) else next(left) for part in message.parts))
            for message in observation.messages
        )
    )
