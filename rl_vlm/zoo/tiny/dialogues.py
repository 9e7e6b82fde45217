"""The form of lessons: conversations, with the replies that a tiny model is taught."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rl_vlm.types import Role

# One conversation: role, texts and images (uint8 [height, width, 3]) of each message, and the reply to it.
Turns = Sequence[tuple[Role, Sequence[str | np.ndarray], str]]
Draw = Callable[[], Turns]


class Exchange(NamedTuple):
    """One message to the policy and the policy's reply."""

    role: Role
    text: str
    reply: str


@dataclass(frozen=True, slots=True)
class Dialogue:
    """uint8 [height, width, 3] images, all shown before the first text, and the exchanges."""

    images: tuple[np.ndarray, ...]
    exchanges: tuple[Exchange, ...]

    @property
    def turns(self) -> Turns:
        """The conversation as the encoder takes it."""
        return [
            (role, (text,) if number else (*self.images, text), reply)
            for number, (role, text, reply) in enumerate(self.exchanges)
        ]
