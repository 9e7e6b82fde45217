"""RunKind: what a kind of run is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from rl_vlm.config import CommonConfig
from rl_vlm.evaluation.options import EvaluationOptions
from rl_vlm.runs.lifecycle import BaseRun

if TYPE_CHECKING:
    from rl_vlm.algorithms.config import RunAlgorithmConfig

Config = TypeVar("Config", bound=CommonConfig)
_Given = TypeVar("_Given", bound=CommonConfig, contravariant=True)


class Evaluate(Protocol[_Given]):
    """Evaluates what a run trained; returns the results, and writes them to `out`."""

    def __call__(
        self,
        config: _Given,
        /,
        *,
        adapter: Path | None = None,
        run_dir: Path | None = None,
        out: Path | None = None,
        options: EvaluationOptions | None = None,
    ) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class RunKind(Generic[Config]):
    """One kind of run.

    config: its class of configurations. inspect: checks one without starting Ray, returns what was found, raises
    UserInputError. run: a run in a folder, new or resumed. evaluate: see `Evaluate`. rllib_config: the class of the RLlib
    configuration, which takes seconds to import.
    """

    config: type[Config]
    inspect: Callable[[Config], dict[str, Any]]
    run: Callable[[Config, Path, bool], BaseRun]
    evaluate: Evaluate[Config]
    rllib_config: Callable[[Config], type[RunAlgorithmConfig]]
