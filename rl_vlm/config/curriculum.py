"""`curriculum`: which tasks come when."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator

from rl_vlm.config.section import Section


class StageSection(Section):
    """One stage."""

    name: str = Field("", pattern=r"^[A-Za-z0-9._-]{0,40}$", description="Default: its number.")
    start: int | None = Field(
        None, ge=0, description="Episodes or iterations after which it begins (by episodes, iterations)."
    )
    until: float | None = Field(
        None, description="Value of the metric at which it ends (by metric); the last stage has none."
    )
    env: dict[str, Any] = Field(
        default_factory=dict,
        description="Environment arguments, laid over env.kwargs; with env.mixture a name -> arguments.",
    )
    mixture: dict[str, float] = Field(default_factory=dict, description="Name -> weight, in place of env.mixture's.")

    @field_validator("env")
    @classmethod
    def _is_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"a stage's arguments must be JSON, and there is something else ({error}): quote dates"
            ) from error
        return value


class CurriculumSection(Section):
    """Stages of difficulty, and how tasks are drawn inside a stage."""

    stages: tuple[StageSection, ...] = ()
    by: Literal["episodes", "iterations", "metric"] = Field(
        "episodes", description="What moves a run to the next stage."
    )
    blend: bool = Field(
        False,
        description="Numbers in a stage's arguments and weights move to the next stage's, linearly between the starts.",
    )
    blend_levels: int = Field(8, ge=2, le=64, description="Steps in which they move: environments are made for each.")
    metric: Literal["solve_rate", "reward"] = Field("solve_rate", description="What `until` is compared with.")
    window: int = Field(256, ge=1, description="Newest episodes of the stage over which the metric is averaged.")
    min_episodes: int = Field(256, ge=1, description="Episodes in a stage before it may end, either way.")
    fall_back_margin: float | None = Field(
        None,
        gt=0,
        description="Go back a stage where the metric is this much below the value that ended the stage before; null: never.",
    )
    sampling: Literal["uniform", "solve_rate"] = Field(
        "uniform",
        description="uniform: each task once per epoch. solve_rate: tasks and environments near a solve rate of one half first.",
    )
    prior: float = Field(2.0, gt=0, description="Episodes, half of them solved, that every task is taken to have had.")
    floor: float = Field(0.1, gt=0, le=1, description="Least weight of a task, as a share of the largest.")
    half_life: float = Field(64.0, gt=0, description="Episodes of a task after which an older episode counts half.")

    def problems(self) -> Iterator[str]:
        """Keys that nothing reads, and stages that do not follow each other."""
        yield from self._unread(("by", "blend"), not self.stages, "curriculum.stages")
        yield from self._unread(("blend_levels",), not self.blend, "curriculum.blend")
        yield from self._unread(
            ("metric", "min_episodes", "fall_back_margin"), self.by != "metric", "curriculum.by metric"
        )
        yield from self._unread(
            ("prior", "floor", "half_life"), self.sampling == "uniform", "curriculum.sampling solve_rate"
        )
        if self.stages:
            if len(set(self.names)) < len(self.stages):
                yield f"curriculum.stages: the names {', '.join(self.names)} must differ"
            yield from self._thresholds() if self.by == "metric" else self._starts()

    def _unread(self, keys: tuple[str, ...], unread: bool, needs: str) -> Iterator[str]:
        for key in self.changed(*keys) if unread else ():
            yield f"curriculum.{key} has no effect without {needs}"

    def _starts(self) -> Iterator[str]:
        starts = [stage.start for stage in self.stages]
        known = [start for start in starts if start is not None]
        if len(known) < len(starts) or known[0] != 0 or sorted(set(known)) != known:
            yield (
                f"curriculum.stages: with by {self.by} each stage has a start, the first 0 and each later than the one before; "
                f"these are {', '.join(str(start) for start in starts)}"
            )
        if any(stage.until is not None for stage in self.stages):
            yield f"curriculum.stages: until needs curriculum.by metric; this one goes by {self.by}"

    def _thresholds(self) -> Iterator[str]:
        if any(stage.start is not None for stage in self.stages):
            yield "curriculum.stages: start has no effect with by metric: give until, or set by to episodes"
        if any(stage.until is None for stage in self.stages[:-1]) or self.stages[-1].until is not None:
            yield "curriculum.stages: with by metric each stage but the last has an until, at which it ends"
        if self.blend:
            yield "curriculum.blend needs stages by episodes or iterations: a metric does not say how far it is"

    @property
    def names(self) -> tuple[str, ...]:
        """The stages' names."""
        return tuple(stage.name or str(place) for place, stage in enumerate(self.stages))
