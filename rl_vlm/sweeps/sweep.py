"""Runs a sweep with Ray Tune: trials side by side, checkpoints, early stopping, and going on after a kill."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import yaml
from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining
from ray.tune.search import BasicVariantGenerator

from rl_vlm.config import TrainConfig, save_config
from rl_vlm.config.loading import changes_since
from rl_vlm.config.sweep import SweepConfig, Values, changed
from rl_vlm.files import write_atomic
from rl_vlm.runs.ray_session import prepare_ray, ray_cluster
from rl_vlm.runs.remote_folder import is_remote
from rl_vlm.runs.run_folder import check_is_kept, held
from rl_vlm.runs.signals import InterruptedRun, StopRequest
from rl_vlm.runs.surroundings import available_cpus, gpu_sizes, joins_cluster
from rl_vlm.runs.train import inspect_run, kind_of
from rl_vlm.serving.service import started_service
from rl_vlm.sweeps.results import SweepProgress, TrialResult, read_results, write_results
from rl_vlm.types import RLVLMError, UserInputError

if TYPE_CHECKING:
    from rl_vlm.algorithms.base import RunAlgorithm

_TUNE = "tune"  # Tune's folder inside the sweep's
_MARKER = ".rl_vlm_sweep"  # locked by the process that runs the sweep
# For Tune.
_TUNE_VARIABLES = {
    "RAY_AIR_NEW_OUTPUT": "0",  # which is for terminals only
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # paths are those of the sweep's working directory
    # A metric may begin later, as the mean of episodes does, and no trial ends for that.
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # it would end as if all were done; see _interrupt_tune
}
_GOES_ON = "--resume goes on from each trial's last evaluation"
_ENDLESS = 1 << 40  # iterations
_MAX_FAILURES = 2  # of one trial, each from its last checkpoint


class SweepError(RLVLMError):
    """No trial of a sweep came to its end.

    Do: read `error.txt` in a trial's folder.
    """


def run_sweep(config: TrainConfig, sweep: SweepConfig, folder: Path, *, resume: bool = False) -> list[TrialResult]:
    """Run all trials and return them, best first. Raises UserInputError (first), InterruptedRun, SweepError."""
    sweep.check_space(config)
    trial = sweep.prepared(config)
    inspect_run(trial)
    sweep.check_space(trial)
    if not resume:  # what has begun may go on
        sweep.check_evaluations(trial)
    check_folder(config, sweep, folder, resume)
    for name, value in _TUNE_VARIABLES.items():
        os.environ.setdefault(name, value)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # of an earlier sweep of this process
    stop = StopRequest(_interrupt_tune, f"Stopping; {_GOES_ON}. Once more to stop at once.")
    stop.starting = False
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserInputError(f"The folder {folder} cannot be made ({error.strerror}): choose another.") from error
    with held(folder, _MARKER):
        check_folder(config, sweep, folder, resume)  # another process may have begun meanwhile
        begin = partial(write_settings, config, sweep, folder)
        try:
            with stop.installed(partial(print, flush=True)):
                results = _run_trials(trial, sweep, folder, resume, begin)
        except KeyboardInterrupt:
            stop.signal = stop.signal or signal.SIGINT
        if stop.signal is not None:
            raise InterruptedRun(stop.signal, _GOES_ON)
        configs = [trial.config for trial in results._experiment_analysis.trials]  # also of trials that failed to start
        trials = read_results(results, configs, sweep)
        write_results(folder, trials, config, sweep)
    if not any(trial.finished for trial in trials):
        raise SweepError(f"Every trial failed; the first said: {trials[0].error if trials else 'nothing'}")
    if all(math.isnan(trial.best) for trial in trials):
        raise SweepError(f"No trial recorded {sweep.metric}: name a column of progress.csv as the metric.")
    return trials


def sweep_folder(run_dir: str | Path) -> Path:
    """The folder of a sweep, absolute. Raises UserInputError."""
    if is_remote(run_dir):
        raise UserInputError(
            f"A sweep needs a folder, and {run_dir} is a URL: give one on this machine, or on storage that all nodes "
            "mount."
        )
    folder = Path(run_dir).absolute()
    check_is_kept(folder)
    return folder


def _text(sweep: SweepConfig) -> str:
    return str(yaml.safe_dump(sweep.model_dump(mode="json", exclude_unset=True), sort_keys=False))


def write_settings(config: TrainConfig, sweep: SweepConfig, folder: Path) -> None:
    save_config(config, folder / "config.yaml")
    write_atomic(folder / "sweep.yaml", _text(sweep))


def check_folder(config: TrainConfig, sweep: SweepConfig, folder: Path, resume: bool) -> None:
    """Raise UserInputError if a folder is there that does not fit."""
    if resume:
        known = folder / "sweep.yaml"
        if not known.is_file():
            raise UserInputError(f"{folder} holds no sweep to resume: leave out --resume, or choose another --run-dir.")
        if known.read_text() != _text(sweep):
            raise UserInputError(f"{known} differs from the given space: resume with that file, or start a new sweep.")
        # How a cluster is started may differ.
        differing = [key for key in changes_since(folder / "config.yaml", config) if not key.startswith("resources.")]
        if differing:
            raise UserInputError(
                f"The sweep in {folder} began with other values of {', '.join(differing)}: resume with the "
                "configuration that it began with (its config.yaml), or start a new sweep."
            )
        return
    if folder.exists() and (not folder.is_dir() or any(entry.name != _MARKER for entry in folder.iterdir())):
        raise UserInputError(f"{folder} exists: choose another --run-dir, or add --resume.")


def _interrupt_tune() -> None:
    """Let Tune save its state and end: it takes this signal as it takes Ctrl-C."""
    if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:  # Tune does not run yet
        raise KeyboardInterrupt
    os.kill(os.getpid(), signal.SIGUSR1)


def _run_trials(
    config: TrainConfig, sweep: SweepConfig, folder: Path, resume: bool, begin: Callable[[], None]
) -> tune.ResultGrid:
    prepare_ray()
    from rl_vlm.sweeps.trial import SLOT, TrialResources, trial_class, trials_at_once

    # In a private cluster trials wait for a slot, so that they leave room for each other's replicas: Tune alone decides
    # when those of a population, and of a sweep that is resumed, go on.
    private, slots = not (ray.is_initialized() or joins_cluster()), {}
    algorithm = kind_of(config).algorithm_class(config)
    needs, cluster = TrialResources.of(config, sweep, trial_class(algorithm)), config
    if private:
        # They bound how much starts, not what it may use.
        wanted = needs.common["CPU"] + min(sweep.max_concurrent or 1, sweep.num_trials) * needs.each["CPU"]
        cpus = config.resources.num_cpus or max(available_cpus(), math.ceil(wanted))
        cluster = changed(config, {"resources.num_cpus": cpus})
        if needs.has_replicas:
            fitting = needs.holds({"CPU": cpus, "GPU": len(gpu_sizes()) if needs.each["GPU"] else 0})
            slots = {SLOT: float(max(min(sweep.max_concurrent or fitting, fitting), 1))}
    with ray_cluster(cluster, slots):
        at_once = trials_at_once(sweep, needs, ray.cluster_resources(), slots=bool(slots))
        if not resume:
            begin()
        trainable = trial_class(algorithm, dict.fromkeys(slots, 1.0))
        # A service that trials share does not end for want of tenants.
        with started_service(config) if config.serving.shared else nullcontext():
            return _tune(config, sweep, folder, resume, at_once, trainable)


def _tune(
    config: TrainConfig, sweep: SweepConfig, folder: Path, resume: bool, at_once: int, trainable: type[RunAlgorithm]
) -> tune.ResultGrid:
    space = {"run_config": config.model_dump(exclude_unset=True), **{key: _domain(v) for key, v in sweep.space.items()}}
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
                failure_config=tune.FailureConfig(max_failures=max(_MAX_FAILURES, config.learner.max_restarts)),
                checkpoint_config=tune.CheckpointConfig(
                    # Population-based training lets others begin at any trial's checkpoint, which may be neither the
                    # best nor the last.
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


def _domain(values: Values) -> Any:
    if values.grid is not None:
        return tune.grid_search(values.grid)
    if values.choice is not None:
        return tune.choice(values.choice)
    kind = next(name for name in ("uniform", "loguniform", "randint") if getattr(values, name) is not None)
    return getattr(tune, kind)(*getattr(values, kind))


def _within(space: Mapping[str, Values], config: dict[str, Any]) -> dict[str, Any]:
    """A configuration that PBT has scaled, within the space."""
    for key, values in space.items():
        if values.bounds is not None and key in config:
            least, most = values.ends
            config[key] = min(max(config[key], least), most)
    return config


def _scheduler(sweep: SweepConfig) -> Any:
    stopping = sweep.stopping
    if stopping.name == "none":
        return None
    if stopping.name == "pbt":
        return PopulationBasedTraining(
            time_attr="training_iteration",
            perturbation_interval=stopping.grace_period,
            # A list moves to a neighbour, a range is scaled or drawn anew.
            hyperparam_mutations={key: values.choice or _domain(values) for key, values in sweep.space.items()},
            custom_explore_fn=partial(_within, sweep.space),
            synch=True,
            require_attrs=False,
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
        return BasicVariantGenerator(max_concurrent=at_once, random_state=sweep.seed)
    try:
        from ray.tune.search.optuna import OptunaSearch

        return OptunaSearch(seed=sweep.seed)
    except (ImportError, AssertionError) as error:
        raise UserInputError("sweep search optuna needs the package optuna: pip install 'rl-vlm[optuna]'.") from error
