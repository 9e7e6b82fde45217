"""Runs a sweep with Ray Tune: trials side by side, checkpoints, early stopping, and going on after a kill."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rl_vlm.config import RunConfig, save_config
from rl_vlm.config.sweep import SweepConfig, Values
from rl_vlm.files import write_atomic
from rl_vlm.runs.cluster import ray_cluster
from rl_vlm.runs.preflight import inspect_run
from rl_vlm.serving.shared_service import kept_up
from rl_vlm.sweeps.results import ERRORS, TrialResult, read_results, write_results
from rl_vlm.types import RLVLMError, UserInputError

if TYPE_CHECKING:
    from ray.tune import Result, ResultGrid

_TUNE = "tune"  # Tune's folder inside the sweep's
_ENDLESS = 1 << 40  # iterations
_MAX_FAILURES = 2  # of one trial, each from its last checkpoint


class SweepError(RLVLMError):
    """No trial of a sweep came to its end."""


def run_sweep(run: RunConfig, sweep: SweepConfig, folder: Path, *, resume: bool = False) -> list[TrialResult]:
    """Run all trials, write results.csv, results.md, results.png and best/ into `folder`, and return the trials, best first.

    `resume` goes on with a sweep that was interrupted: what is done is not repeated. Raises UserInputError before anything
    is touched, and SweepError when every trial failed.
    """
    trial = sweep.prepared(run)
    inspect_run(trial)
    sweep.check_space(trial)
    prepare_folder(run, sweep, folder, resume)
    with ray_cluster(trial), kept_up(trial):
        _forget_survived(_tune(trial, sweep, folder, resume))
    trials = read_results(folder, sweep)
    write_results(folder, trials, run, sweep)
    if not any(trial.finished for trial in trials):
        raise SweepError(f"Every trial failed; the first said: {trials[0].error if trials else 'nothing'}")
    return trials


def prepare_folder(run: RunConfig, sweep: SweepConfig, folder: Path, resume: bool) -> None:
    """Write config.yaml and sweep.yaml. Raises UserInputError if a folder is there that does not fit."""
    text = yaml.safe_dump(sweep.model_dump(mode="json", exclude_unset=True), sort_keys=False)
    if resume:
        known = folder / "sweep.yaml"
        if not known.is_file():
            raise UserInputError(f"{folder} holds no sweep to resume: leave out --resume, or choose another --run-dir.")
        if known.read_text() != text:
            raise UserInputError(f"{known} differs from the given space: resume with that file, or start a new sweep.")
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserInputError(f"{folder} exists: choose another --run-dir, or add --resume.")
    folder.mkdir(parents=True, exist_ok=True)
    save_config(run, folder / "config.yaml")
    write_atomic(folder / "sweep.yaml", text)


def _tune(run: RunConfig, sweep: SweepConfig, folder: Path, resume: bool) -> ResultGrid:
    # Tune reads this when it is imported: its newer output is for terminals only.
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    from ray import tune

    from rl_vlm.sweeps.progress import SweepProgress
    from rl_vlm.sweeps.trial import trial_class

    # Population-based training compares all trials with each other: where not all fit, Tune lets them take turns (0).
    at_once = 0 if sweep.stopping.name == "pbt" else sweep.max_concurrent or _fitting(run)
    trainable = trial_class(run.spec.load("config")().algo_class, sweep.space)
    space = {"run_config": run.model_dump(exclude_unset=True), **{key: _domain(v) for key, v in sweep.space.items()}}
    if resume and tune.Tuner.can_restore(str(folder / _TUNE)):
        tuner = tune.Tuner.restore(
            str(folder / _TUNE), trainable, resume_unfinished=True, resume_errored=True, param_space=space
        )
    else:
        tuner = tune.Tuner(
            trainable,
            param_space=space,
            tune_config=tune.TuneConfig(
                metric=sweep.metric,
                mode=sweep.mode,
                num_samples=sweep.num_samples,
                scheduler=_scheduler(sweep),
                search_alg=_search(sweep, at_once),
                # Tune ignores this number where the search has one of its own.
                max_concurrent_trials=None if sweep.search == "random" else at_once,
                trial_name_creator=lambda trial: f"trial-{trial.trial_id}",
                trial_dirname_creator=lambda trial: f"trial-{trial.trial_id}",
            ),
            run_config=tune.RunConfig(
                name=_TUNE,
                storage_path=str(folder),
                failure_config=tune.FailureConfig(max_failures=max(_MAX_FAILURES, run.learner.max_restarts)),
                checkpoint_config=tune.CheckpointConfig(
                    # Population-based training lets others begin at any trial's checkpoint, which may be neither the best nor the last.
                    num_to_keep=None if sweep.stopping.name == "pbt" else 1,
                    checkpoint_score_attribute=sweep.metric,
                    checkpoint_score_order=sweep.mode,
                    checkpoint_at_end=True,  # others after each evaluation: see trial.py
                ),
                callbacks=[SweepProgress(sweep)],
                verbose=0,
            ),
        )
    return tuner.fit()


def _forget_survived(results: Iterable[Result]) -> None:
    """Rename the errors of trials that went on and came to their end: Tune keeps each trial's errors for ever."""
    for result in results:
        errors = Path(result.path) / ERRORS
        if result.error is None and errors.is_file():
            errors.rename(errors.with_name("survived_errors.txt"))


def _fitting(run: RunConfig) -> int:
    """How many trials fit on the cluster at the same time: Tune counts env runners and learners, and not the replicas."""
    import ray

    have = ray.cluster_resources()
    shares = []
    for kind, needed in (("CPU", run.needed_cpus), ("GPU", run.needed_gpus)):
        free = have.get(kind, 0.0)
        if run.serving.shared:  # all trials together have one set of replicas
            serving = run.serving
            each = serving.cpus_per_replica if kind == "CPU" else serving.gpus_per_replica
            free, needed = free - serving.num_replicas * each, needed - serving.num_replicas * each
        shares.append(free / needed if needed > 0 else math.inf)
    return max(int(min(*shares, 64)), 1)


def _domain(values: Values) -> Any:
    from ray import tune

    if values.grid is not None:
        return tune.grid_search(values.grid)
    if values.choice is not None:
        return tune.choice(values.choice)
    if values.uniform is not None:
        return tune.uniform(*values.uniform)
    if values.loguniform is not None:
        return tune.loguniform(*values.loguniform)
    assert values.randint is not None
    return tune.randint(*values.randint)


def _mutation(values: Values) -> Any:
    """What population-based training varies: a list moves to a neighbour, a range is scaled or drawn anew."""
    return values.choice if values.choice is not None else _domain(values)


def _scheduler(sweep: SweepConfig) -> Any:
    from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining

    stopping = sweep.stopping
    if stopping.name == "none":
        return None
    if stopping.name == "pbt":
        return PopulationBasedTraining(
            time_attr="training_iteration",
            perturbation_interval=stopping.grace_period,
            hyperparam_mutations={key: _mutation(values) for key, values in sweep.space.items()},
            synch=True,
            log_config=False,
        )
    return ASHAScheduler(
        time_attr="training_iteration",
        max_t=_ENDLESS,  # a trial says itself when it is done
        grace_period=stopping.grace_period,
        reduction_factor=stopping.reduction_factor,
    )


def _search(sweep: SweepConfig, at_once: int) -> Any:
    if sweep.search == "random":
        from ray.tune.search import BasicVariantGenerator

        return BasicVariantGenerator(max_concurrent=at_once, random_state=sweep.seed)
    try:
        from ray.tune.search.optuna import OptunaSearch

        return OptunaSearch(seed=sweep.seed)
    except (ImportError, AssertionError) as error:
        raise UserInputError("sweep search optuna needs the package optuna: pip install 'rl-vlm[optuna]'.") from error
