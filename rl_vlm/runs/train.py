"""`rl-vlm train`: checks, the run folder, and the run that the algorithm asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_vlm.config import PolicyConfig, TrainConfig
from rl_vlm.envs.loading import load_plugins
from rl_vlm.models.loading import check_quantization, check_weights
from rl_vlm.monitoring.callbacks import Callback
from rl_vlm.runs.lifecycle import changed_settings
from rl_vlm.runs.policy import PolicyRun
from rl_vlm.runs.policy_checks import inspect_policy_run
from rl_vlm.runs.preference import PreferenceRun, inspect_preference_run
from rl_vlm.runs.preference_evaluation import evaluate_preference_run
from rl_vlm.runs.remote_folder import RunDir, is_remote
from rl_vlm.runs.run_folder import check_run_dir, opened_run_folder
from rl_vlm.runs.surroundings import check_resources, found_obstacles, joins_cluster
from rl_vlm.types import UserInputError


def kind_of(config: TrainConfig) -> type[Any]:
    return PolicyRun if isinstance(config, PolicyConfig) else PreferenceRun


def inspect_run(config: TrainConfig, *, answers: bool = True) -> dict[str, Any]:
    """Check all that can be checked without Ray, and return what was found. Raises UserInputError.

    answers: also have a made answer rewarded. A run does not: a reward function may load a model of its own.
    """
    load_plugins(config.plugins)
    check_quantization(config.serving.quantization)
    return inspect_policy_run(config, answers) if isinstance(config, PolicyConfig) else inspect_preference_run(config)


def evaluate_run(config: TrainConfig, **options: Any) -> dict[str, Any]:
    """Evaluate what a run trained. options: `adapter`, `run_dir`, `out`, and `options`, an EvaluationOptions."""
    if not isinstance(config, PolicyConfig):
        return evaluate_preference_run(config, **options)
    from rl_vlm.runs.evaluate import evaluate_policy_run  # imports clients of endpoints

    return evaluate_policy_run(config, **options)


def obstacles(config: TrainConfig, run_dir: RunDir, *, resume: bool, overwrite: bool) -> list[str]:
    """What would keep the run from starting on this machine, in this folder: a sentence each. Changes nothing."""
    return found_obstacles(
        lambda: check_resources(config) if not joins_cluster() else None,
        lambda: check_weights(config.model.path) if config.serves else None,
        lambda: check_run_dir(run_dir, resume, overwrite),
        lambda: _check_settings(config, run_dir) if resume and not is_remote(run_dir) else None,
    )


def _check_settings(config: TrainConfig, run_dir: RunDir) -> None:
    """Raise UserInputError where a run with checkpoints cannot go on with a configuration."""
    if any(Path(run_dir, "checkpoints").glob("*")):
        changed_settings(Path(run_dir), config)


@contextmanager
def opened_run(
    config: TrainConfig,
    run_dir: RunDir | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Iterator[Any]:
    """A run that has been checked, in its folder, before anything starts. Raises UserInputError."""
    run_dir = run_dir or Path("runs") / config.name
    if found := obstacles(config, run_dir, resume=resume, overwrite=overwrite):
        raise UserInputError(" ".join(found))
    inspect_run(config, answers=False)
    with opened_run_folder(run_dir, resume=resume, overwrite=overwrite) as folder:
        run = kind_of(config)(config, folder, resume)
        run.callbacks += callbacks
        yield run


def train(config: TrainConfig, run_dir: RunDir | None = None, **options: Any) -> dict[str, Any]:
    """Run to the end; returns `result.json`; options as of `opened_run`. Raises InterruptedRun and RLVLMError, too."""
    with opened_run(config, run_dir, **options) as run:
        return run.execute()  # type: ignore[no-any-return]
