"""The prompts of an evaluation's items, for measurements that ask them without playing them."""

from __future__ import annotations

from collections.abc import Sequence

from rl_vlm.config import PolicyConfig
from rl_vlm.envs.parts import make_part, part_size
from rl_vlm.seeding import derive_seed
from rl_vlm.types import Message


class ItemPrompts:
    """Opens items of the evaluation's split in the order in which they are asked for, those of a mixture's environments in turns.

    Item `number` wraps around at the split's end.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self._run = config
        made = [(make_part(config.env, name), part) for name, part in config.env.parts.items()]
        self._envs = [(env, part_size(part, env, config.evaluation.split)) for env, part in made]

    def take(self, numbers: Sequence[int]) -> list[tuple[Message, ...]]:
        """What is shown first in each of these items."""
        found = []
        for number in numbers:
            rank, place = divmod(number, len(self._envs))
            env, size = self._envs[place]
            index = rank % (size or 2**31 - 1)
            options = {"index": index, "split": self._run.evaluation.split}
            observation, _ = env.reset(seed=derive_seed(self._run.seed, 4, index), options=options)
            found.append(observation.messages)
        return found

    def close(self) -> None:
        """Close the environments."""
        for env, _ in self._envs:
            env.close()
