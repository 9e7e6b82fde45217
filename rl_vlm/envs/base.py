"""VisionEnv: the interface of an environment whose observation is messages with images and whose action is text."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import gymnasium
import numpy as np
from pydantic import Field

from rl_vlm.envs.errors import Info, StepResult, as_reward
from rl_vlm.seeding import derive_seed
from rl_vlm.types import Message, Observation, Split, UserInputError, images_of, with_images

if TYPE_CHECKING:  # a file of one environment needs no pyarrow
    from rl_vlm.envs.data import TableSet

# For arguments of environments.
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class ObservationSpace(gymnasium.Space[Any]):
    """The set of all `Observation`s; a sample is an empty one."""

    kind: ClassVar[type] = Observation

    def __init__(self) -> None:
        super().__init__(shape=None, dtype=None)

    def contains(self, x: Any) -> bool:
        return isinstance(x, self.kind)

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        return self.kind()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)


class TextSpace(ObservationSpace):
    """The set of all strings: the actions of a language model."""

    kind = str


class VisionEnv(gymnasium.Env[Observation, str]):
    """One conversation about images.

    `reset(seed=..., options={"index": i, "split": "train"})` opens task instance `i`; `step(text)` answers one turn of
    the policy. `terminated` is the task's own end, `truncated` a limit's. If `num_items(split)` is finite, the driver
    chooses indices below it.

    `metrics` names the numbers and flags of `info` whose mean over the episodes a run logs as `env/<name>`, each with
    the quantiles to log: `{"distance_km": (0.5, 0.9)}` gives `env/distance_km`, `..._p50` and `..._p90`.
    """

    metrics: ClassVar[Mapping[str, tuple[float, ...]]] = {}

    # Of the class, as those of EpisodeEnv are, so that an `__init__` that does not call its base's does no harm.
    observation_space: gymnasium.Space[Observation] = ObservationSpace()
    action_space: gymnasium.Space[str] = TextSpace()

    def num_items(self, split: Split) -> int | None:
        """How many task instances the split holds; None when they are drawn without end from the seed."""
        return None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        super().reset(seed=seed)
        return Observation(), {}

    def step(self, action: str) -> StepResult:
        """Answer the policy's text: (observation, reward, terminated, truncated, info)."""
        raise NotImplementedError  # abstract: every environment answers in its own way

    def example(self) -> str | None:
        """A right answer to what was shown last, for `rl-vlm sft-example --from`; None: it is not known."""
        return None

    def item(self, options: dict[str, Any] | None, size: int | None = None) -> tuple[Split, int]:
        """The (split, index) that `reset` was asked for; a random index when none was given."""
        options = options or {}
        split: Split = options.get("split", "train")
        index = options.get("index")
        if index is None:
            index = int(self.np_random.integers(0, size if size else np.iinfo(np.int32).max))
        return split, int(index)


@dataclass(frozen=True, slots=True)
class Item:
    """Which task instance an episode is about: number `index` of a split."""

    split: Split
    index: int

    def random(self) -> np.random.Generator:
        """Random numbers of this item alone: the same in every episode, process and run."""
        return np.random.default_rng(derive_seed(int(self.split == "test"), self.index))


@dataclass(frozen=True, slots=True)
class Reply:
    """What an environment makes of one answer of the policy."""

    reward: float  # of this turn
    message: Observation | None = None  # what the policy is shown next; None ends the episode
    info: Info = field(default_factory=dict)  # metrics and facts of the turn
    truncated: bool = False  # a limit ended the episode, not the task itself


class EpisodeEnv(VisionEnv):
    """The base of environments: a subclass writes `open` and `reply`, and the base keeps the episode.

    The base chooses split and index, counts turns, truncates after `max_turns`, and rejects an answer to an episode
    that is not open.

    Args:
        num_train, num_test: how many items the splits hold; None, for both, draws them without end.
        max_turns: turns after which an episode is truncated; None if `reply` ends each episode itself.
        rows: the data set whose rows are the items, in place of the numbers.
    """

    name = ""  # in error messages; by default that of the class
    max_turns: int | None = None
    turn = 0  # of this episode, the one being answered included
    _sizes: Mapping[str, int | None] = {"train": None, "test": None}
    _rows: TableSet[Any] | None = None
    _open = False
    _has_context = False  # whether the class has one of its own
    _said: list[Message]  # the conversation, for `context`

    def __init__(
        self,
        *,
        num_train: int | None = None,
        num_test: int | None = None,
        max_turns: int | None = None,
        rows: TableSet[Any] | None = None,
    ) -> None:
        self.max_turns, self._rows = max_turns, rows
        self._sizes = {"train": num_train, "test": num_test}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.name = vars(cls).get("name", cls.__name__)
        cls._has_context = cls.context is not EpisodeEnv.context

    @abstractmethod
    def open(self, item: Item) -> Observation | tuple[Observation, Info]:
        """Begin the episode of an item: what the policy is shown first, and facts about it. Raises RLVLMError."""

    @abstractmethod
    def reply(self, text: str) -> Reply:
        """Answer one turn of the policy, of which `text` is the answer without its end-of-turn token."""

    def context(self, messages: Sequence[Message]) -> Sequence[Message]:
        """What the next turn's prompt shows, in place of what `rollout.history` leaves of the conversation: a subclass
        may leave out, sum up or draw anew. Pictures are `EncodedImage`s. A prompt that only grows is the cheapest."""
        return messages

    @property
    def is_last_turn(self) -> bool:
        """Whether no turn comes after the one that is being answered."""
        return self.turn == self.max_turns

    def num_items(self, split: Split) -> int | None:
        """How many items the split holds. Raises UserInputError for a split that is not there."""
        if split not in self._sizes:
            raise UserInputError(f'{self.name}: split {split!r} is unknown; choose "train" or "test".')
        return self._sizes[split] if self._rows is None else len(self._rows.split(split))

    def number(self, item: Item) -> int:
        """A number that no item of either split shares, as the seed of an environment that knows seeds alone."""
        size = self.num_items("train")
        if size is None:
            return 2 * item.index + (item.split == "test")
        return item.index if item.split == "train" else size + item.index

    def row(self, item: Item) -> Any:
        """The row of the data set that an item names; None without a data set. Raises BadRowError."""
        return None if self._rows is None else self._rows.split(item.split)[item.index]

    def validate(self, split: Split, limit: int | None = None) -> int:
        """Check the rows of a data set before training starts; return how many were checked. Raises UserInputError."""
        return 0 if self._rows is None else self._rows.split(split).validate(limit)

    def longest(self, split: Split) -> int:
        """The item of the most text that `validate` saw, 0 without a data set."""
        return 0 if self._rows is None else self._rows.split(split).longest

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        super().reset(seed=seed)
        self._open, self.turn = False, 0
        size = self.num_items((options or {}).get("split", "train"))
        split, index = self.item(options, size)
        if size is not None and not 0 <= index < size:
            raise UserInputError(f"{self.name}: index {index} is outside the {size} items of the {split} split.")
        opened = self.open(Item(split, index))
        observation, info = opened if isinstance(opened, tuple) else (opened, {})
        if not isinstance(info, Mapping):
            raise UserInputError(f"{self.name}: open() must return an Observation, or an Observation and a dict.")
        self._open = True
        if self._has_context and isinstance(observation, Observation):
            self._said = with_images(observation.messages, images_of(observation.messages))
        return observation, {"index": index, "split": split, **info}

    def step(self, action: str) -> StepResult:
        if not self._open:
            raise UserInputError(f"{self.name}: call reset() before step(), and again after an episode has ended.")
        if not isinstance(action, str):
            raise UserInputError(f"{self.name}: an action is text, not {type(action).__name__}.")
        self.turn += 1
        reply = self.reply(action)
        if not isinstance(reply, Reply):
            raise UserInputError(f"{self.name}: reply() must return a Reply, not {type(reply).__name__}.")
        cut = reply.message is not None and self.is_last_turn
        self._open = reply.message is not None and not cut
        truncated = reply.truncated or cut
        shown = reply.message if self._open and reply.message is not None else Observation()
        if self._has_context and isinstance(shown, Observation) and shown.messages:
            messages = with_images(shown.messages, images_of(shown.messages))
            self._said += [Message.of("assistant", action), *messages]
            shown = Observation(tuple(messages), context=tuple(self.context(tuple(self._said))))
        return shown, as_reward(reply.reward, "step()"), not self._open and not truncated, truncated, reply.info
