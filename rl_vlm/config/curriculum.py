"""`curriculum`: which tasks come when."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator, model_validator

from rl_vlm.config.section import Section

if TYPE_CHECKING:
    from rl_vlm.config.run import RunConfig

# `reward/<name>` and `accuracy/<name>` have other meanings for these.
_TAKEN_NAMES = ("mean", "std", "part", "zero_advantage_groups")


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

    @model_validator(mode="after")
    def _consistent(self) -> CurriculumSection:
        stages = self.stages
        self._refuse(("by", "blend"), not stages, "curriculum.stages")
        self._refuse(("blend_levels",), not self.blend, "curriculum.blend")
        self._refuse(("metric", "min_episodes", "fall_back_margin"), self.by != "metric", "curriculum.by metric")
        self._refuse(("prior", "floor", "half_life"), self.sampling == "uniform", "curriculum.sampling solve_rate")
        if not stages:
            return self
        if len(set(self.names)) < len(stages):
            raise ValueError(f"curriculum.stages: the names {', '.join(self.names)} must differ")
        if self.by == "metric":
            self._check_thresholds()
        else:
            self._check_starts()
        return self

    def _refuse(self, keys: tuple[str, ...], unread: bool, needs: str) -> None:
        for key in keys if unread else ():
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"curriculum.{key} has no effect without {needs}")

    def _check_starts(self) -> None:
        starts = [stage.start for stage in self.stages]
        known = [start for start in starts if start is not None]
        if len(known) < len(starts) or known[0] != 0 or sorted(set(known)) != known:
            raise ValueError(
                f"curriculum.stages: with by {self.by} each stage has a start, the first 0 and each later than the one before; "
                f"these are {', '.join(str(start) for start in starts)}"
            )
        if any(stage.until is not None for stage in self.stages):
            raise ValueError(f"curriculum.stages: until needs curriculum.by metric; this one goes by {self.by}")

    def _check_thresholds(self) -> None:
        if any(stage.start is not None for stage in self.stages):
            raise ValueError("curriculum.stages: start has no effect with by metric: give until, or set by to episodes")
        if any(stage.until is None for stage in self.stages[:-1]) or self.stages[-1].until is not None:
            raise ValueError("curriculum.stages: with by metric each stage but the last has an until, at which it ends")
        if self.blend:
            raise ValueError(
                "curriculum.blend needs stages by episodes or iterations: a metric does not say how far it is"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The stages' names."""
        return tuple(stage.name or str(place) for place, stage in enumerate(self.stages))


def check_tasks(run: RunConfig) -> None:
    """Raise ValueError where mixture, curriculum and variants do not fit together."""
    names, variants, stages = [part.name for part in run.env.mixture], run.evaluation.variants, run.curriculum.stages
    if bad := [name for name in names if name in _TAKEN_NAMES or name in variants]:
        raise ValueError(f"env.mixture: the name {bad[0]} belongs to another metric: choose another one")
    if names:
        for variant, arguments in variants.items():
            _check_names(f"evaluation.variants.{variant}", arguments, names)
    for place, stage in enumerate(stages):
        if names:
            _check_names(f"curriculum.stages.{place}.env", stage.env, names)
        _check_weights(
            f"curriculum.stages.{place}.mixture", stage, {part.name: part.weight for part in run.env.mixture}
        )


def _check_names(key: str, arguments: dict[str, Any], names: list[str]) -> None:
    for name, inner in arguments.items():
        if name not in names:
            raise ValueError(
                f"{key}: with env.mixture it maps names ({', '.join(names)}) to arguments, such as {names[0]}: {{seed: 1}}; {name} "
                "is not one of them"
            )
        if not isinstance(inner, dict):
            raise ValueError(f"{key}.{name}: arguments are a mapping, such as {{seed: 1}}, not {inner!r}")


def _check_weights(key: str, stage: StageSection, weights: dict[str, float]) -> None:
    for name, weight in stage.mixture.items():
        if name not in weights:
            known = f"env.mixture has {', '.join(weights)}" if weights else "env.mixture is empty"
            raise ValueError(f"{key} names {name}, and {known}")
        if weight < 0:
            raise ValueError(f"{key}.{name}: a weight is at least 0, not {weight}")
    if weights and not any((weights | stage.mixture).values()):
        raise ValueError(f"{key}: all weights are 0, so that no environment would ever be chosen")
