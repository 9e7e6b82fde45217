"""`env` and `curriculum`: what is played, and what is rewarded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from rl_vlm.config.judges import GroupJudgeSection, JudgeSection, ProgressSection, RubricSection
from rl_vlm.config.section import Count, Natural, NonNegative, OnlyWith, Positive, Section
from rl_vlm.files import resolved
from rl_vlm.types import Split


class RewardFunction(Section):
    """A function of completions and the data's columns, as TRL calls them, or a part that `weights` may name."""

    # `file.py:function`, `package.module:function`, or a name: exact, math, choice, format, iou, anls, judge, ...
    function: str = Field(min_length=1)
    weight: float = 1.0
    kwargs: dict[str, Any] = Field(default_factory=dict)  # Arguments beside those of the data.

    # The object itself where Python gives it and no name leads to it; a saved configuration holds its name alone.
    _given: Any = PrivateAttr(None)

    @field_validator("function")
    @classmethod
    def _absolute(cls, function: str) -> str:
        target, colon, name = function.rpartition(":")
        return f"{resolved(target)}:{name}" if colon and target.endswith(".py") else function

    @property
    def name(self) -> str:
        """Of the part of the reward: `reward/part/<name>`."""
        return self.function.rpartition(":")[2]

    @property
    def given(self) -> Any:
        return self._given

    @classmethod
    def of(cls, function: Any, name: str) -> RewardFunction:
        """An object of this process, which is pickled on its way to others."""
        made = cls(function=name)
        made._given = function
        return made


class RewardSection(Section):
    """The reward as a weighted sum of parts: the environment's own, reward functions, built-in ones, and those of
    plugins."""

    # Functions that reward an episode at its end; `env.reward: my.py:score` and a list of these are short for it.
    functions: tuple[RewardFunction, ...] = ()

    # Part -> weight; `env` is the environment's own reward. Empty: the environment's own reward as it is.
    weights: dict[str, float] = Field(default_factory=dict)
    length_budget: Natural = 0  # Sampled tokens of an episode that the part `length` does not count.
    judge: JudgeSection = JudgeSection()
    rubric: RubricSection = RubricSection()
    group_judge: GroupJudgeSection = GroupJudgeSection()
    progress: ProgressSection = ProgressSection()

    @model_validator(mode="before")
    @classmethod
    def _functions_alone(cls, given: Any) -> Any:
        """`my.py:score`, or a list of such names and of functions with their weights."""
        if isinstance(given, str | RewardFunction):
            given = [given]
        return {"functions": given} if isinstance(given, list | tuple) else given

    @field_validator("functions", mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        return [{"function": one} if isinstance(one, str) else one for one in given]

    def problems(self) -> Iterator[str]:
        names = [*{*self.weights, "env"}, *(one.name for one in self.functions)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield f"env.reward: the name {twice[0]} is given twice, and metrics are named after it: rename a function"

    @property
    def all_weights(self) -> dict[str, float]:
        """Part -> weight, reward functions included."""
        return self.weights | {one.name: one.weight for one in self.functions}


class EnvPart(Section):
    # A registry id, `package.module:Class`, `path/to/env.py[:Class]`, verifiers:NAME, openenv:URL or http://host:port.
    id: str = "Shapes-v0"
    # Folder, file or hub name of the data, or one for each of `train` and `test`; passed on as `data`.
    data: str | dict[Split, str] | None = None
    kwargs: dict[str, Any] = Field(default_factory=dict)  # Arguments of the environment's class.
    num_items: Count | None = None  # Use only the first items of the training split.
    reward: RewardSection = RewardSection()  # Or `my.py:score`, or a list of such functions.

    def make_kwargs(self, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The arguments that the environment is made with."""
        data = {"data": self.data} if self.data is not None else {}
        return {**data, **self.kwargs, **(overrides or {})}


class MixtureSection(EnvPart):
    id: str  # A registry id, `package.module:Class`, or `path/to/env.py[:Class]`.
    # Names its metrics, `reward/<name>` and `accuracy/<name>`.
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$")
    weight: NonNegative = 1.0  # Share of the groups, relative to the other weights.


class EnvSection(EnvPart):
    isolation: Literal["thread", "process"] = "thread"  # process: a child that can be killed.
    step_timeout_s: Positive = 60.0  # How long a reset or a step may take.
    # Several environments, each with name, id, kwargs, data, weight, num_items and reward.
    mixture: tuple[MixtureSection, ...] = ()

    def problems(self) -> Iterator[str]:
        if not self.mixture:
            return
        for key in EnvPart.model_fields:
            if key in self.model_fields_set:
                yield f"env.{key} has no effect with env.mixture: set it for each environment of the mixture"
        names = [part.name for part in self.mixture]
        if len(set(names)) < len(names):
            yield f"env.mixture: the names {', '.join(names)} must differ, because metrics are named after them"
        if not any(part.weight for part in self.mixture):
            yield "env.mixture: all weights are 0, so that no environment would ever be chosen"

    @model_serializer(mode="wrap")
    def _without_unread(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        return {key: value for key, value in data.items() if not (self.mixture and key in EnvPart.model_fields)}

    @property
    def parts(self) -> dict[str, EnvPart]:
        """The environments by name; a single one is named by the empty string."""
        return {part.name: part for part in self.mixture} or {"": self}

    @property
    def title(self) -> str:
        """What people call it: the id, or the names of a mixture."""
        return " + ".join(part.name for part in self.mixture) or self.id


class StageSection(Section):
    name: str = Field("", pattern=r"^[A-Za-z0-9._-]{0,40}$")  # Default: its number.
    start: Natural  # Episodes or iterations after which it begins; the first at 0.
    # Environment arguments, laid over env.kwargs; with env.mixture a name -> arguments.
    env: dict[str, Any] = Field(default_factory=dict)
    # Name -> weight, in place of env.mixture's.
    mixture: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)


class CurriculumSection(Section):
    """Stages of difficulty, and how tasks are drawn inside a stage."""

    place: ClassVar[str] = "curriculum."
    conditional: ClassVar[tuple[OnlyWith, ...]] = (
        OnlyWith(("by", "blend"), "stages"),
        OnlyWith(("blend_levels",), "blend"),
    )

    stages: tuple[StageSection, ...] = ()  # The stages in order, each with its own settings.
    by: Literal["episodes", "iterations"] = "episodes"  # What moves a run to the next stage.
    # Numbers in a stage's arguments and weights move to the next stage's, linearly between the starts.
    blend: bool = False
    blend_levels: int = Field(8, ge=2, le=64)  # Steps in which they move: environments are made for each.
    # uniform: each task once per epoch. solve_rate: tasks and environments near a solve rate of one half first.
    sampling: Literal["uniform", "solve_rate"] = "uniform"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if len(set(self.names)) < len(self.stages):
            yield f"curriculum.stages: the names {', '.join(self.names)} must differ"
        starts = [stage.start for stage in self.stages]
        if starts and (starts[0] or sorted(set(starts)) != starts):
            yield (
                "curriculum.stages: the first starts at 0 and each later than the one before; these are "
                f"{', '.join(map(str, starts))}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(stage.name or str(place) for place, stage in enumerate(self.stages))
