"""A sweep's file says what varies; its results are ranked, grouped by setting, and the best one can be used at once."""

from __future__ import annotations

import csv
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from tables import table

from rl_vlm.config import load_config
from rl_vlm.config.sweep import SweepConfig, load_sweep
from rl_vlm.runs import run_folder
from rl_vlm.runs.signals import InterruptedRun
from rl_vlm.runs.train import kind_of
from rl_vlm.sweeps.results import _markdown, group_by_setting, read_results, write_results
from rl_vlm.sweeps.sweep import _MARKER, check_folder, run_sweep, write_settings
from rl_vlm.sweeps.trial import TrialResources, trial_class, trials_at_once
from rl_vlm.types import UserInputError

TABLES = table("settings")

ROOT = Path(__file__).resolve().parents[2]
RUN = load_config(ROOT / "configs/quickstart.yaml")
SPACE = {"learner.lr": {"grid": [0.001, 0.002]}, "seed": {"grid": [0, 1]}}


def sweep(**keys: Any) -> SweepConfig:
    return SweepConfig.model_validate({"space": SPACE, **keys})


def write_trial(
    folder: Path, name: str, settings: dict[str, Any], values: list[float], kept: int | None = None, error: str = ""
) -> Any:
    """What Tune says and writes of a trial, as far as results are read from it, and its settings; `kept` is the iteration
    of a checkpoint."""
    trial = folder / "tune" / f"trial-{name}"
    trial.mkdir(parents=True)
    rows = [
        {"training_iteration": k, "time_total_s": 2.0 * k, "held_out": {"accuracy": value}, "held_out_before": {"accuracy": 0.25}}
        for k, value in enumerate(values, 1)
    ]  # fmt: skip
    (trial / "result.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    checkpoints = []
    for place, iteration in enumerate([kept, len(values)] if kept else [], 1):
        checkpoint = trial / f"checkpoint_{place:06}"
        (checkpoint / "adapter").mkdir(parents=True)
        (checkpoint / "adapter" / "adapter_config.json").write_text(f"of iteration {iteration}")
        checkpoints.append((SimpleNamespace(path=str(checkpoint)), {"training_iteration": iteration}))
    failed = RuntimeError(error) if error else None
    return SimpleNamespace(path=str(trial), error=failed, best_checkpoints=checkpoints), settings


@pytest.mark.parametrize("file", sorted((ROOT / "tune/spaces").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_spaces_fit_the_quickstart(file: Path) -> None:
    load_sweep(file).check_space(RUN)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"space": {}}, "space"),
        ({"space": {"learner.lr": {}}}, "give one of choice, grid, uniform"),
        ({"space": {"learner.lr": {"choice": [1.0], "grid": [2.0]}}}, "give one of choice, grid, uniform"),
        ({"space": {"learner.lr": {"uniform": [2, 1]}}}, "the first of uniform must be below the second"),
        ({"space": {"learner.lr": {"loguniform": [0, 1]}}}, "loguniform needs numbers above 0"),
        ({"space": SPACE, "search": "optuna"}, "use choice in place of grid"),
        ({"space": SPACE, "num_sample": 4}, "Did you mean num_samples"),
        ({"space": SPACE, "metric": "held_out/acuracy"}, "held-out metrics are held_out/accuracy and held_out/reward"),
    ],
)
def test_a_wrong_file_gets_one_sentence(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    file = tmp_path / "space.yaml"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(UserInputError, match=message):
        load_sweep(file)


@pytest.mark.parametrize(("space", "message"), TABLES["each_value_is_checked_before_anything_starts"])
def test_each_value_is_checked_before_anything_starts(space: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        SweepConfig.model_validate({"space": space}).check_space(RUN)


def test_values_that_only_some_combinations_contradict_are_taken() -> None:
    space = {
        "algorithm.estimator": {"choice": ["group", "reinforce_pp"]},  # `group` needs groups of more than one
        "rollout.group_size": {"choice": [1, 4]},
    }
    for seed in range(8):
        SweepConfig.model_validate({"space": space, "seed": seed}).check_space(RUN)
    rare = {**space, "rollout.group_size": {"choice": [1] * 99 + [4]}}  # and what one of a hundred takes
    SweepConfig.model_validate({"space": rare}).check_space(RUN)
    del space["algorithm.estimator"]
    with pytest.raises(UserInputError, match="rollout.group_size"):
        SweepConfig.model_validate({"space": space}).check_space(RUN)


def test_trials_are_ranked_and_those_that_differ_in_the_seed_are_one_setting(tmp_path: Path) -> None:
    results = [
        write_trial(tmp_path, "a", {"learner.lr": 0.001, "seed": 0}, [0.3, 0.6]),
        write_trial(tmp_path, "b", {"learner.lr": 0.001, "seed": 1}, [0.3, 0.8]),
        write_trial(tmp_path, "c", {"learner.lr": 0.002, "seed": 0}, [0.9, 0.5], kept=1),
        write_trial(tmp_path, "d", {"learner.lr": 0.002, "seed": 1}, [0.1], error="Traceback\nValueError: no memory\n"),
    ]
    found = sweep()
    trials = read_results(*zip(*results, strict=True), found)
    assert [(trial.name, trial.best, trial.last) for trial in trials[:3]] == [
        ("trial-c", 0.9, 0.5), ("trial-b", 0.8, 0.8), ("trial-a", 0.6, 0.6),
    ]  # fmt: skip
    assert (trials[3].finished, trials[3].error) == (False, "ValueError: no memory")
    settings = group_by_setting(trials, found)
    last = [(name, sorted(one.last for one in members)) for name, members in settings.items()]
    assert last == [("lr 0.001", [0.6, 0.8]), ("lr 0.002", [0.5])]
    assert settings["lr 0.001"][0].points[0] == (0, 0.25)  # before training

    write_results(tmp_path, trials, RUN, found)
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [row["trial"][-1] for row in rows] == ["c", "b", "a", "d"]
    # Student's interval of .6 and .8: t(.975, 1) = 12.706 times .1.
    shown = _markdown(trials, settings, sweep(metric="held_out/reward"))
    assert "| lr 0.001 | 2 | 0.700 | -0.571 to 1.971 |" in shown
    # No accuracy lies outside of 0 to 1.
    assert "| lr 0.001 | 2 | 0.700 | 0.000 to 1.000 |" in (tmp_path / "results.md").read_text()
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    # Of the two checkpoints that were kept, that of the best evaluation.
    assert (tmp_path / "best/adapter/adapter_config.json").read_text() == "of iteration 1"
    assert load_config(tmp_path / "best/config.yaml").learner.lr == 0.002


@pytest.mark.parametrize("stopping", ["asha", "pbt"])
def test_trials_are_not_stopped_by_a_figure_that_is_not_there_yet(stopping: str) -> None:
    space = {"learner.lr": {"loguniform": [1e-4, 1e-2]}}
    for grace, metric in ((60, "held_out/accuracy"), (20, "reward/mean")):
        sweep(space=space, metric=metric, stopping={"name": stopping, "grace_period": grace}).check_evaluations(RUN)
    with pytest.raises(UserInputError, match="evaluation.every"):
        sweep(space=space, stopping={"name": stopping, "grace_period": 20}).check_evaluations(RUN)


def test_less_is_better_with_mode_min(tmp_path: Path) -> None:
    results = [write_trial(tmp_path, name, {"seed": name}, [value]) for name, value in (("a", 0.4), ("b", 0.2))]
    trials = read_results(*zip(*results, strict=True), sweep(mode="min"))
    assert [trial.name for trial in trials] == ["trial-b", "trial-a"]


@pytest.mark.parametrize(("changes", "message"), TABLES["population_based_training_needs_values_that_it_can_vary"])
def test_population_based_training_needs_values_that_it_can_vary(changes: dict[str, object], message: str) -> None:
    given = {"space": {"learner.lr": {"loguniform": [1e-4, 1e-2]}}, "stopping": {"name": "pbt"}}
    SweepConfig.model_validate(given)
    with pytest.raises(ValidationError, match=message):
        SweepConfig.model_validate({**given, **changes})


# --- how many trials fit


ALGORITHM = kind_of(RUN).algorithm_class(RUN)
NEEDS = TrialResources.of(RUN, sweep(), trial_class(ALGORITHM))


def test_a_trial_takes_what_tune_reserves_and_its_replicas() -> None:
    """RLlib reserves a CPU for the trial itself, which no section of the configuration names."""
    assert NEEDS.each == {"CPU": 1 + 2 * 0.25 + 2 * 0.5, "GPU": 0.0}
    assert [NEEDS.holds({"CPU": cpus}) for cpus in (2, 2.5, 4, 8)] == [0, 1, 1, 3]
    shared = TrialResources.of(sweep(shared=True).prepared(RUN), sweep(), trial_class(ALGORITHM))
    assert shared.each["CPU"] == 1.5 and shared.common["CPU"] == 1.0
    assert [shared.holds({"CPU": cpus}) for cpus in (2, 4, 8)] == [0, 2, 4]


def test_a_space_that_varies_sizes_needs_room_for_the_largest() -> None:
    space = {"serving.num_replicas": {"grid": [1, 4]}, "rollout.num_env_runners": {"randint": [1, 4]}}
    needs = TrialResources.of(RUN, SweepConfig.model_validate({"space": space}), trial_class(ALGORITHM))
    assert needs.each["CPU"] == 1 + 3 * 0.25 + 4 * 0.5


def test_no_more_trials_start_than_fit_with_their_replicas() -> None:
    assert trials_at_once(sweep(), NEEDS, {"CPU": 8}) == 3
    assert trials_at_once(sweep(max_concurrent=2), NEEDS, {"CPU": 8}) == 2
    assert trials_at_once(sweep(max_concurrent=4), NEEDS, {"CPU": 8}) == 3
    with pytest.raises(UserInputError, match="2.5 CPUs"):
        trials_at_once(sweep(), NEEDS, {"CPU": 2})


def test_a_population_takes_turns_only_where_nobody_starves() -> None:
    pbt = sweep(space={"learner.lr": {"loguniform": [1e-4, 1e-2]}}, stopping={"name": "pbt"}, num_samples=4)
    assert trials_at_once(pbt, NEEDS, {"CPU": 8}, slots=True) == trials_at_once(pbt, NEEDS, {"CPU": 10}) == 0
    with pytest.raises(UserInputError, match="holds 3"):
        trials_at_once(pbt, NEEDS, {"CPU": 8})


def test_settings_that_contradict_each_other_fail_their_trial_and_not_the_sweep() -> None:
    """Tune asks for a trial's resources in its own loop, where an error would end all trials."""
    trial = trial_class(ALGORITHM, {"slot": 1.0})
    given = {"run_config": RUN.model_dump(exclude_unset=True), "rollout.prompts_per_iteration": 2}
    assert trial.default_resource_request({**given, "algorithm.minibatches": 4}).bundles == [{"CPU": 1.0}]
    main, *runners = trial.default_resource_request({**given, "algorithm.minibatches": 2}).bundles
    assert main == {"CPU": 1.0, "slot": 1.0} and len(runners) == 2


# --- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("tune_runs", [True, False])
def test_a_signal_ends_a_sweep_as_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals, tune_runs: bool
) -> None:
    told: list[int] = []

    def trials(*_: Any) -> None:
        if tune_runs:  # which ends as if all were done
            signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
        os.kill(os.getpid(), number)

    monkeypatch.setattr("rl_vlm.sweeps.sweep.inspect_run", lambda run: None)
    monkeypatch.setattr("rl_vlm.sweeps.sweep._run_trials", trials)
    before = signal.getsignal(signal.SIGUSR1)
    try:
        with pytest.raises(InterruptedRun, match=f"Interrupted by {number.name}; --resume goes on") as ended:
            run_sweep(RUN, sweep(), tmp_path / "sweep")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended.value.exit_code == 128 + number and told == ([signal.SIGUSR1] if tune_runs else [])


# --- folders


def test_a_sweep_is_resumed_with_the_configuration_that_it_began_with(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    check_folder(RUN, sweep(), folder, resume=False)
    folder.mkdir()
    write_settings(RUN, sweep(), folder)
    with pytest.raises(UserInputError, match="--run-dir"):
        check_folder(RUN, sweep(), folder, resume=False)
    check_folder(load_config(ROOT / "configs/quickstart.yaml", ["resources.num_cpus=4"]), sweep(), folder, resume=True)
    other = load_config(ROOT / "configs/quickstart.yaml", ["algorithm.iterations=7", "env.kwargs.task=color"])
    with pytest.raises(UserInputError, match="algorithm.iterations"):
        check_folder(other, sweep(), folder, resume=True)


def test_two_processes_do_not_run_one_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sweep"
    monkeypatch.setattr("rl_vlm.sweeps.sweep.inspect_run", lambda run: None)
    monkeypatch.setattr(run_folder, "_PATIENCE_S", 0.0)
    tried: list[str] = []

    def trials(run: Any, sweep_: Any, folder: Path, resume: bool, begin: Any) -> None:
        if not resume:
            begin()
        if not tried:
            tried.append("while it runs")
            for again in (True, False):
                with pytest.raises(UserInputError, match="Another process is writing|exists"):
                    run_sweep(RUN, sweep(), folder, resume=again)
        raise KeyboardInterrupt

    monkeypatch.setattr("rl_vlm.sweeps.sweep._run_trials", trials)
    for resume in (False, True):  # the first process has ended when the second one resumes
        with pytest.raises(InterruptedRun):
            run_sweep(RUN, sweep(), folder, resume=resume)
    assert tried and (folder / _MARKER).is_file()
