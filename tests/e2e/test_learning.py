"""Learning is proven by learning: several seeds of each configuration, and a control that must fail."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from runs import LEARNER, ROOT, TrainingProcess, finished, rl_vlm, trained

from rl_vlm.runs.reproduce import Expected, claims

FULL = ROOT / "configs/full_tiny.yaml"
STRATEGIES = ["fsdp2", "zero1", "zero2", "zero3"]

CLAIMS = claims()
OF_POLICIES = [name for name, claim in CLAIMS.items() if not claim.teacher and "/" not in name]
Figures = dict[str, Any]  # of a held-out evaluation, by greedy answers on the test split


def learned_to_count(before: Figures, after: Figures, share: float = 0.9) -> bool:
    return before["accuracy/default"] <= 0.35 and after["accuracy/default"] >= share


def run_and_check(config: str, expected: Expected, folder: Path, *changes: str) -> None:
    """Train, print the first and last evaluation, and check them."""
    evaluations, seconds = trained(config, folder, *changes, timeout=2300)
    before, after = evaluations[0], evaluations[-1]
    moved = {name: (before.get(name), value) for name, value in after.items() if name.count("/")}
    print(f"{config} {changes}: {moved} in {seconds:.0f} s")
    assert not expected.misses(before, after)


@pytest.mark.acceptance
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("config", OF_POLICIES)
def test_the_policy_learns(config: str, seed: int, tmp_path: Path) -> None:
    run_and_check(config, CLAIMS[config], tmp_path, f"seed={seed}")
    if config.startswith("ppo"):
        rows = list(csv.DictReader((tmp_path / "run/progress.csv").open()))
        assert mean(float(row["value/explained_variance"]) for row in rows[-20:]) >= 0.5


@pytest.mark.acceptance
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("config", OF_POLICIES)
def test_a_control_does_not_learn(config: str, tmp_path: Path) -> None:
    control = CLAIMS[config].control
    run_and_check(config, control, tmp_path, *control.change)


@pytest.mark.acceptance
@pytest.mark.timeout(2400)
def test_a_broken_learner_is_found(tmp_path: Path) -> None:
    """The sign of the loss is flipped in every process of `rl-vlm reproduce`."""
    (tmp_path / "sitecustomize.py").write_text(
        "from rl_vlm.learning import losses\n"
        "own = losses.LOSSES['clipped']\n"
        "def flipped(tokens, settings):\n"
        "    terms = own(tokens, settings)\n"
        "    return losses.LossTerms(-terms.loss, terms.ratio, terms.clipped)\n"
        "losses.LOSSES['clipped'] = flipped\n"
    )
    run = ("reproduce", "quickstart", "--seeds", "7", "--run-dir", tmp_path / "runs")
    done = rl_vlm(*run, timeout=2300, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 1 and "quickstart: NOT reproduced" in done.stdout, done


def strategy(name: str) -> tuple[str, ...]:
    return f"learner.strategy={name}", "learner.num_learners=2", "learner.cpus_per_learner=0.25"


WAYS = {
    "two turns": ("env.kwargs={task: count, turns: 2}", "rollout.max_turns=2", "algorithm.iterations=250"),
    "a model of another family": ("model.path=tiny-smol",),
    "the same on vLLM": ("model.path=tiny-smol", "serving.engine=vllm", "serving.num_replicas=1"),
    "sampling overlaps learning": ("rollout.max_policy_lag=1",),
    "an agent asks": (f"env.id={ROOT / 'examples/agent.py'}", "env.kwargs={num_train: 4096, num_test: 512}"),
    **{name: (*strategy(name), "logging.checkpoint_every=10") for name in STRATEGIES},
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_teacher_teaches_without_rewards(quickstart_run: Path, tmp_path: Path) -> None:
    """640 answers are enough, where the quickstart needs thousands."""
    evaluations = distilled(quickstart_run, tmp_path, "algorithm.iterations=20", "algorithm.shuffle_rewards=true")
    assert learned_to_count(evaluations[0], evaluations[-1], 0.8)


@pytest.mark.acceptance
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("divergence", ["forward", "jsd", "reverse"])
def test_every_divergence_teaches(divergence: str, seed: int, quickstart_run: Path, tmp_path: Path) -> None:
    more = ("algorithm.iterations=120",) if divergence == "reverse" else ()
    changes = (f"teacher.divergence={divergence}", f"seed={seed}", *more)
    evaluations = distilled(quickstart_run, tmp_path, *changes)
    assert learned_to_count(evaluations[0], evaluations[-1], 0.95)


@pytest.mark.acceptance
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("view", ["blank", "swapped"])
def test_a_teacher_that_does_not_see_teaches_nothing(view: str, quickstart_run: Path, tmp_path: Path) -> None:
    evaluations = distilled(quickstart_run, tmp_path, f"teacher.view={view}")
    assert evaluations[-1]["accuracy/default"] <= 0.35


def distilled(teacher: Path, folder: Path, *changes: str) -> list[Figures]:
    evaluations, _ = trained("distill_tiny", folder, f"teacher.adapter={teacher}", *changes, timeout=2300)
    return evaluations


@pytest.mark.acceptance
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", WAYS)
def test_the_quickstart_is_learned_in_other_ways(way: str, tmp_path: Path) -> None:
    run = finished(tmp_path / "run", *WAYS[way], timeout=3500)
    result = run.result()
    assert result["accuracy_after"] >= 0.90
    assert "too_old" not in result["dropped"]


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", [(), ("model.path=tiny-wide", "serving.engine=vllm", "serving.num_replicas=1")])
def test_the_quickstart_is_learned_with_answers_of_one_form(engine: tuple[str, ...], tmp_path: Path) -> None:
    """A form that leaves 110 numbers; ratios and the agreement of engine and learner are as exact as without it."""
    run = finished(tmp_path / "run", "rollout.format.regex='<answer>[0-9]{1,2}</answer>'", *engine, timeout=1100)
    rows = list(csv.DictReader((tmp_path / "run/progress.csv").open()))
    assert all(float(row["policy/first_ratio_error"]) == 0 and abs(float(row["mismatch/kl"])) < 1e-6 for row in rows)
    assert run.result()["accuracy_after"] >= 0.9 and run.result()["skipped_steps"] == 0


@pytest.mark.acceptance
def test_two_runs_fit_on_one_machine(tmp_path: Path) -> None:
    short = ("algorithm.iterations=30", "evaluation.num_items=64")
    with TrainingProcess(tmp_path / "a", *short) as one, TrainingProcess(tmp_path / "b", *short, "seed=1") as two:
        assert one.wait() == 0, one.output()[-3000:]
        assert two.wait() == 0, two.output()[-3000:]
    assert one.result()["iterations"] == two.result()["iterations"] == 30


@pytest.mark.acceptance
@pytest.mark.timeout(1800)
def test_a_killed_replica_costs_a_run_with_all_weights_nothing(tmp_path: Path) -> None:
    short = ("algorithm.iterations=40", "evaluation.num_items=64")
    with TrainingProcess(tmp_path / "run", *short, config=FULL) as run:
        for iteration in (5, 15, 25):
            run.wait_for_iteration(iteration)
            run.kill("ray::ServeReplica")
        assert run.wait(timeout=1700) == 0, run.output()[-3000:]
    assert run.result()["policy_version"] == run.result()["iterations"] == 40


@pytest.mark.acceptance
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_killed_learner_is_replaced_from_the_last_checkpoint(name: str, tmp_path: Path) -> None:
    short = ("algorithm.iterations=25", "evaluation.num_items=32", "logging.checkpoint_every=10")
    with TrainingProcess(tmp_path / "run", *strategy(name), *short) as run:
        run.wait_for_iteration(12)
        run.kill(LEARNER)
        assert run.wait(timeout=1500) == 0, run.output()[-3000:]
    result = run.result()
    assert result["iterations"] == 25
    assert result["restarts"]["learner"] >= 1
    assert 0 < result["dropped"]["iterations_repeated"] < 10
