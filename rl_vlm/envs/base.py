"""VisionEnv: the interface of an environment whose observation is messages with images and whose action is text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium
import numpy as np

from rl_vlm.types import Observation, Split, UserInputError

Info = dict[str, Any]
StepResult = tuple[Observation, float, bool, bool, Info]


class ObservationSpace(gymnasium.Space[Observation]):
    """The set of all `Observation`s. It cannot be sampled usefully: a sample is an empty observation."""

    def __init__(self) -> None:
        super().__init__(shape=None, dtype=None)

    def sample(self, mask: Any = None, probability: Any = None) -> Observation:
        """An observation without messages."""
        return Observation()

    def contains(self, x: Any) -> bool:
        """Whether `x` is an Observation."""
        return isinstance(x, Observation)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObservationSpace)


class TextSpace(gymnasium.Space[str]):
    """The set of all strings: the actions of a language model."""

    def __init__(self) -> None:
        super().__init__(shape=None, dtype=None)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """A short random string of digits."""
        return "".join(str(digit) for digit in self.np_random.integers(0, 10, size=3))

    def contains(self, x: Any) -> bool:
        """Whether `x` is a string."""
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextSpace)


class VisionEnv(gymnasium.Env[Observation, str]):
    """One conversation about images.

    `reset(seed=..., options={"index": i, "split": "train"})` opens task instance `i`; `step(text)` answers one turn
    of the policy. `terminated` is the task's own end, `truncated` a limit's. An environment that draws from a
    finite set returns its size from `num_items(split)`; the driver then chooses indices, and train and test are disjoint.

    `metrics` names the numbers and flags of `info` that a run logs as `env/<name>`, their mean over the episodes; each with
    the quantiles that are logged too, so `{"distance_km": (0.5, 0.9)}` gives `env/distance_km`, `..._p50` and `..._p90`.
    """

    metrics: ClassVar[Mapping[str, tuple[float, ...]]] = {}

    observation_space: gymnasium.Space[Observation]
    action_space: gymnasium.Space[str]

    def __init__(self) -> None:
        self.observation_space = ObservationSpace()
        self.action_space = TextSpace()

    def num_items(self, split: Split) -> int | None:
        """How many task instances the split holds; None when they are drawn without end from the seed."""
        return None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Open an episode. `options`: `index` (int) and `split` ("train" or "test")."""
        super().reset(seed=seed)
        return Observation(), {}

    def step(self, action: str) -> StepResult:
        """Answer the policy's text: (observation, reward, terminated, truncated, info)."""
        raise NotImplementedError  # abstract: every environment answers in its own way

    def item(self, options: dict[str, Any] | None, size: int | None = None) -> tuple[Split, int]:
        """The (split, index) that `reset` was asked for; a random index when none was given."""
        options = options or {}
        split: Split = options.get("split", "train")
        index = options.get("index")
        if index is None:
            index = int(self.np_random.integers(0, size if size else np.iinfo(np.int32).max))
        return split, int(index)


class MadeItemsEnv(VisionEnv):
    """An environment whose items are made from (split, index): so many of each split.

    Args:
        name: its registry id, for error messages.
        num_train, num_test: how many items the splits hold.
    """

    def __init__(self, name: str, num_train: int, num_test: int) -> None:
        super().__init__()
        self._name = name
        self._num_items: dict[str, int] = {"train": num_train, "test": num_test}

    def num_items(self, split: Split) -> int:
        """How many items the split holds."""
        if split not in self._num_items:
            raise UserInputError(f'{self._name}: split {split!r} is unknown; choose "train" or "test".')
        return self._num_items[split]

    def chosen_item(self, options: dict[str, Any] | None) -> tuple[Split, int]:
        """As `item`. Raises UserInputError for a split or an index that is not there."""
        size = self.num_items((options or {}).get("split", "train"))
        split, index = self.item(options, size)
        if not 0 <= index < size:
            raise UserInputError(f"{self._name}: index {index} is outside the {size} items of the {split} split.")
        return split, index
