"""Proofs that the preference loop learns, and that a killed run goes on: minutes each."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from preference_loop import build, content, train_to
from runs import ServeProcess, TrainingProcess, finished

from rl_vlm.algorithms.preference_sac import PreferenceSAC
from rl_vlm.config import PolicyConfig, load_config, parse_config
from rl_vlm.labelling.labels import Label
from rl_vlm.labelling.store import LabelStore
from rl_vlm.runs.ray_session import ray_cluster

ROOT = Path(__file__).resolve().parents[2]
CARTPOLE = ROOT / "configs" / "rl_vlm_f" / "cartpole_tiny.yaml"
SOLVED = -800.0  # true return of 100 steps; 0 is perfect, a fallen pole -2800


def evaluate(run: PolicyConfig, folder: Path) -> float:
    """Train to the end; the mean true return of the evaluation episodes."""
    with ray_cluster(run):
        algorithm: Any = build(run, folder)
        assert isinstance(algorithm, PreferenceSAC)
        train_to(algorithm, run.preference.total_steps)
        results = algorithm.evaluate_policy(film=False)
        algorithm.stop()
    mean = sum(result.true_return for result in results) / len(results)
    print(f"{run.name}, seed {run.seed}: true return {mean:.0f} after {run.preference.total_steps} steps")
    return mean


@pytest.mark.timeout(400)
def test_a_short_run_with_a_served_labeller_goes_through_all_its_stages(tmp_path: Path) -> None:
    """Labels, reward model, relabelling, evaluation, records: what the proofs below do for minutes."""
    settings = (
        "preference.total_steps=1200", "preference.evaluation.every=600", "preference.evaluation.episodes=2",
        "serving.num_replicas=1", "model.path=tiny",  # comes with the package; it prefers what is shown first
    )  # fmt: skip
    run = finished(tmp_path / "run", *settings, config=CARTPOLE)
    assert run.result()["status"] == "done" and "Labels so far:" in run.output()
    labels = [label for _, labels in LabelStore(tmp_path / "run/labels").sessions() for label in labels]
    assert len(labels) == 200 and not any(label.error for label in labels)
    assert {"curve.png", "eval.csv", "vlm_query_log.csv"} <= {path.name for path in (tmp_path / "run").iterdir()}


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sac_alone_swings_the_pendulum_up(seed: int, tmp_path: Path) -> None:
    run = parse_config(
        {
            "seed": seed,
            "algorithm": {"name": "preference_sac"},
            "env": {"id": "Pendulum-v1"},
            "preference": {
                "reward": "gt_task_reward", "total_steps": 10_000, "random_steps": 100, "exploration_steps": 0,
                "sac": {  # Stable-Baselines3's hyperparameters; RL-VLM-F's are slower here
                    "hidden": 256, "depth": 2, "batch_size": 256, "init_alpha": 1.0, "alpha_lr": 3e-4,
                    "target_update_every": 1, "compile": "off",
                },
            },
        }
    )  # fmt: skip
    assert evaluate(run, tmp_path) > -250  # random actions: about -1200


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("teacher", ["labels.teacher.eps_mistake=0.2", "labels.teacher.eps_mistake=0"])
def test_cartpole_is_balanced_from_the_pictures_that_a_teacher_prefers(seed: int, teacher: str, tmp_path: Path) -> None:
    settings = [f"seed={seed}", "preference.labels.source=scripted", f"preference.{teacher}"]
    assert evaluate(load_config(CARTPOLE, settings), tmp_path) > SOLVED


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cartpole_is_balanced_from_the_tiny_vlms_labels(seed: int, tmp_path: Path) -> None:
    run = finished(tmp_path / "run", f"seed={seed}", config=CARTPOLE)
    result = run.result()
    print(f"seed {seed}: {result['evaluation_reward_after']:.0f} in {result['train_seconds']:.0f} s")
    assert result["evaluation_reward_after"] > SOLVED
    assert result["labels"]["usable"] > 100


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
def test_cartpole_is_not_balanced_from_coin_flips(tmp_path: Path) -> None:
    returns = []
    for seed in range(3):
        with TrainingProcess(
            tmp_path / str(seed), f"seed={seed}", "preference.labels.coin_flips=true", config=CARTPOLE
        ) as run:
            assert run.wait() == 0, run.output()[-3000:]
        returns.append(run.result()["evaluation_reward_after"])
    print(f"coin flips: {returns}")
    # Coins that the ensemble has learned by heart are a reward too, a random one: now and then one likes an upright pole.
    assert statistics.median(returns) < -1000 and statistics.mean(returns) < -1000


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
def test_a_run_that_is_killed_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    settings = (
        "deterministic=true", "preference.labels.source=scripted", "preference.total_steps=1500",
        "preference.steps_per_iteration=50", "logging.checkpoint_every=2", "preference.evaluation.every=0",
        "logging.keep_checkpoints=99",
    )  # fmt: skip
    finished(tmp_path / "straight", *settings, config=CARTPOLE)
    for round_, rows in enumerate((4, 12, 18, 22, 26)):
        resume = ("--resume",) if round_ else ()
        with TrainingProcess(tmp_path / "killed", *settings, *resume, config=CARTPOLE) as run:
            run.wait_for_iteration(rows)
            run.process.kill()
            run.process.wait()
    finished(tmp_path / "killed", *settings, "--resume", config=CARTPOLE)
    last = "checkpoints/step-00001500"
    assert content(tmp_path / "straight" / last) == content(tmp_path / "killed" / last)
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("straight", "killed")]
    assert results[0]["evaluation_reward_after"] == results[1]["evaluation_reward_after"]
    assert (tmp_path / "straight" / "eval.csv").read_text() == (tmp_path / "killed" / "eval.csv").read_text()


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
def test_a_run_waits_for_a_labeller_that_is_down_and_one_that_waited_long_enough_is_resumed(tmp_path: Path) -> None:
    run_dir, settings = (
        tmp_path / "run",
        (
            "preference.labels.source=endpoint",
            "preference.labels.endpoint.model=tiny-labeller", "preference.labels.deadline_s=5",
            "preference.total_steps=2500", "preference.steps_per_iteration=50", "preference.evaluation.every=0",
        ),
    )  # fmt: skip

    def labels() -> list[Label]:
        return [label for _, labels in LabelStore(run_dir / "labels").sessions() for label in labels]

    def server(port: int = 0) -> ServeProcess:
        return ServeProcess("tiny-labeller", "serving.max_context=512", port=port)

    with server() as labeller:
        port = int(labeller.url.rpartition(":")[2])
        where = f"preference.labels.endpoint.url={labeller.url}/v1"
        with TrainingProcess(run_dir, *settings, where, "preference.labeller_patience_s=0", config=CARTPOLE) as run:
            run.wait_until(lambda: (run_dir / "vlm_query_log.csv").exists(), "the first session")
            labeller.process.kill()
            assert run.wait() == 1
    assert "pairs could be labelled" in run.output() and "Start the labeller again" in run.output()
    assert "Traceback" not in run.output() and not [label.error for label in labels() if label.error]
    known = len(labels())
    with TrainingProcess(run_dir, *settings, where, "--resume", config=CARTPOLE) as run:
        run.wait_until(lambda: "Waiting up to" in run.output(), "the wait for the labeller")
        assert len(labels()) <= known
        with server(port):
            assert run.wait() == 0, run.output()[-3000:]
    assert run.result()["status"] == "done" and len(labels()) > known
    assert not [label.error for label in labels() if label.error]
