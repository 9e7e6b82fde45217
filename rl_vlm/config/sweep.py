"""The file of a sweep: which keys vary and how, what is compared, and how trials are chosen and stopped."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from rl_vlm.config.loading import TrainConfig, parse_config, read_yaml, validated
from rl_vlm.config.overrides import apply_overrides
from rl_vlm.config.policy import PolicyConfig
from rl_vlm.config.section import Count, Section
from rl_vlm.types import UserInputError

# Keys that change the shapes of what is trained, or of the optimiser's state.
_SHAPES = (
    "model.path", "model.train", "model.lora", "critic.kind", "critic.hidden", "learner.optimizer", "preference.sac.hidden",  # noqa: E501
    "preference.sac.depth", "preference.reward_model",
)  # fmt: skip
HELD_OUT = ("held_out/accuracy", "held_out/reward")
_COMBINATIONS = 256  # of the other keys' values in which a value is tried before it is rejected
SEED = "seed"  # trials that differ in it alone are runs of one setting


class Values(Section):
    """What one key may be: exactly one of these."""

    choice: list[Any] | None = Field(None, min_length=1)  # One of these, at random.
    grid: list[Any] | None = Field(None, min_length=1)  # Each of these.
    uniform: tuple[float, float] | None = None  # A number between two.
    loguniform: tuple[float, float] | None = None  # As uniform, of the logarithm; both above 0.
    randint: tuple[int, int] | None = None  # An integer from the first up to, without, the second.

    def problems(self) -> Iterator[str]:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            yield "give one of choice, grid, uniform, loguniform and randint"
        elif self.bounds is not None and self.bounds[0] >= self.bounds[1]:
            yield f"the first of {given[0]} must be below the second"
        if self.loguniform is not None and self.loguniform[0] <= 0:
            yield "loguniform needs numbers above 0"

    @property
    def bounds(self) -> tuple[float, float] | None:
        return self.uniform or self.loguniform or self.randint

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the greatest value of a range."""
        least, most = self.bounds or (-math.inf, math.inf)
        return (least, most - 1) if self.randint is not None else (least, most)

    @property
    def examples(self) -> list[Any]:
        """All values, or the ends of the range and, of one of any numbers, one between them that is no integer."""
        if self.bounds is None:
            return self.choice or self.grid or []
        least, most = self.ends
        return [least, most] if self.randint is not None else [least, least + (most - least) / math.e, most]


class Stopping(Section):
    """Trials that are behind: ASHA stops them (arXiv 1810.05934), PBT lets them copy better ones (1711.09846)."""

    name: Literal["none", "asha", "pbt"] = "none"  # `none` trains each trial to its end.
    # Iterations before a trial may be stopped, or between two copies; of held-out metrics, of evaluation.every.
    grace_period: Count = 50
    reduction_factor: int = Field(3, ge=2)  # ASHA: of so many trials one goes on at each rung.


class SweepConfig(Section):
    """A sweep over a run's configuration."""

    space: dict[str, Values] = Field(min_length=1)  # Dotted keys of the configuration, and their values.
    metric: str = "held_out/accuracy"  # What is compared: held_out/accuracy, held_out/reward, or a figure of a run.
    mode: Literal["max", "min"] = "max"  # Whether more of it is better.
    num_samples: Count = 1  # Trials, or with grids the trials of each point of the grid.
    max_concurrent: Count | None = None  # Trials at the same time; as many as fit by default.
    # True, or a name: all trials share one set of replicas of the base model (serving.shared).
    shared: bool | str = False
    search: Literal["random", "optuna"] = "random"  # How settings are chosen; optuna needs that package, and no grids.
    stopping: Stopping = Stopping()
    seed: int = 0  # Of the choice of settings.

    def problems(self) -> Iterator[str]:
        if self.metric.startswith("held_out/") and self.metric not in HELD_OUT:
            yield f"metric {self.metric}: held-out metrics are {' and '.join(HELD_OUT)}"
        if self.search == "optuna" and any(values.grid for values in self.space.values()):
            yield "search optuna chooses each value itself: use choice in place of grid"
        if self.stopping.name == "pbt":
            if self.search == "optuna":
                yield "stopping pbt varies the settings itself: use search random"
            if SEED in self.space or any(values.grid for values in self.space.values()):
                yield "stopping pbt varies every key of the space: leave out seed, and use choice in place of grid"
            if shapes := sorted(key for key in self.space if key.startswith(_SHAPES)):
                yield (
                    "stopping pbt lets a trial go on with another one's weights, which have to have the same shapes: "
                    f"leave out {', '.join(shapes)}"
                )
            if self.max_concurrent is not None:
                yield "stopping pbt trains its population side by side: leave out max_concurrent"

    @property
    def sign(self) -> float:
        """Times the metric: the least is the best."""
        return -1.0 if self.mode == "max" else 1.0

    @property
    def num_trials(self) -> int:
        return self.num_samples * math.prod(len(values.grid) for values in self.space.values() if values.grid)

    def prepared(self, run: TrainConfig) -> TrainConfig:
        """The run that the trials are made of: with `serving.shared`, and room for the largest adapter of the space."""
        settings: dict[str, Any] = {}
        if self.shared:
            settings["serving.shared"] = self.shared if isinstance(self.shared, str) else f"{run.name[:72]}-sweep"
        ranks = self.space.get("model.lora.rank")
        if (self.shared or run.serving.shared) and ranks is not None and run.serving.sharing.max_lora_rank is None:
            settings["serving.sharing.max_lora_rank"] = max(run.lora_rank, *(int(rank) for rank in ranks.examples))
        return changed(run, settings) if settings else run

    def check_evaluations(self, run: TrainConfig) -> None:
        """Raise UserInputError where a held-out metric is not yet there when trials are compared."""
        if self.stopping.name == "none" or self.metric not in HELD_OUT or not isinstance(run, PolicyConfig):
            return
        every, grace = run.evaluation.every, self.stopping.grace_period
        if not every or grace % every:
            raise UserInputError(
                f"stopping.grace_period ({grace}) must be a multiple of evaluation.every ({every}): between two "
                f"evaluations {self.metric} is that of the earlier one."
            )

    def check_space(self, run: TrainConfig) -> None:
        """Raise UserInputError for a value that is valid with no combination of the others."""
        chosen = random.Random(self.seed)
        for key, values in self.space.items():
            others = {name: other.examples for name, other in self.space.items() if name != key}
            combinations: Iterable[tuple[Any, ...]] = itertools.product(*others.values())
            if math.prod(map(len, others.values())) > _COMBINATIONS:
                combinations = (tuple(map(chosen.choice, others.values())) for _ in range(_COMBINATIONS))
            tried = [dict(zip(others, combination, strict=True)) for combination in combinations]
            for value in values.examples:
                errors = []
                for settings in tried:
                    try:
                        changed(run, {**settings, key: value})
                        break
                    except UserInputError as error:
                        errors.append(error)
                else:
                    raise errors[-1]


def changed(run: TrainConfig, settings: Mapping[str, Any]) -> TrainConfig:
    """The run with dotted keys set. Raises UserInputError that names the settings."""
    try:
        return parse_config(apply_overrides(run.model_dump(exclude_unset=True), settings))
    except UserInputError as error:
        named = ", ".join(f"{key}={value}" for key, value in settings.items())
        raise UserInputError(f"With {named}: {error}") from error


def load_sweep(path: Path) -> SweepConfig:
    """Read and check a sweep's YAML file. Raises UserInputError."""
    return validated(SweepConfig, read_yaml(path, ()))
