"""Things die in the middle of a run; the run reaches its accuracy all the same."""

from __future__ import annotations

import csv
import random
import signal
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from runs import ENV_RUNNER, LEARNER, REGISTRY, REPLICA, ROOT, TrainingProcess, finished

ONE_LEARNER_ACTOR = ("learner.num_learners=1", "learner.cpus_per_learner=0.25", "logging.checkpoint_every=10")


@pytest.mark.real
def test_a_run_survives_the_kill_of_every_kind_of_actor(tmp_path: Path) -> None:
    # A checkpoint after every iteration: the learner is as likely to die while one is made as anywhere else.
    short = ("algorithm.iterations=18", "evaluation.num_items=64", "logging.checkpoint_every=1")
    with TrainingProcess(tmp_path / "run", *ONE_LEARNER_ACTOR, *short) as run:
        run.wait_for_iteration(4)
        for title in (REPLICA, ENV_RUNNER, REGISTRY, LEARNER):
            run.kill(title)
            run.wait_for_iteration(run.iterations() + 2)
        assert run.wait() == 0, run.output()[-3000:]
        assert run.survivors(grace=60) == []  # Ray's own agents notice later
    result = run.result()
    assert result["status"] == "done"
    assert result["restarts"] == {"env_runner": 1, "learner": 1}
    assert result["dropped"]["runner_died"] == 1
    assert len(result["requests_by_replica"]) == 3  # the two, and the one that replaced the dead
    assert run.iterations() == result["iterations"]  # repeated iterations are listed once


def test_agents_go_on_when_replicas_die_in_the_middle_of_episodes(tmp_path: Path) -> None:
    """Their calls are made again at another replica, so that each iteration has all of its episodes."""
    agent = (f"env.id={ROOT / 'examples/agent.py'}", "env.kwargs={num_train: 4096, num_test: 512}")
    with TrainingProcess(tmp_path / "run", *agent, "algorithm.iterations=8", "evaluation.num_items=32") as run:
        for iteration in (2, 5):
            run.wait_for_iteration(iteration)
            run.kill(REPLICA)
        assert run.wait() == 0, run.output()[-3000:]
    assert sum(run.result()["requests_by_replica"].values()) == 8 * 128  # each episode has one turn
    assert run.result()["restarts"]["env_runner"] == 0


@pytest.mark.acceptance  # `make test` interrupts a run that goes on
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_a_checkpoint_and_resume_finishes(number: signal.Signals, tmp_path: Path) -> None:
    arguments = (
        "algorithm.iterations=12",
        "evaluation.num_items=32",
        "serving.num_replicas=1",
        "rollout.num_env_runners=1",
    )
    with TrainingProcess(tmp_path / "run", *arguments) as run:
        run.wait_for_iteration(3)
        run.process.send_signal(number)
        assert run.wait(timeout=120) == 128 + number, run.output()[-3000:]
        assert run.survivors() == []
    interrupted = run.result()
    assert interrupted["status"] == "interrupted"
    run = finished(tmp_path / "run", *arguments, "--resume")
    result = run.result()
    assert (result["status"], result["iterations"]) == ("done", 12)
    assert f"Resumed from iteration {interrupted['iterations']}" in run.output()
    rows = (run.run_dir / "progress.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows[1:]] == [str(k) for k in range(1, 13)]
    assert result["accuracy_before"] == interrupted["accuracy_before"]


@pytest.mark.acceptance
@pytest.mark.parametrize("title", [REPLICA, ENV_RUNNER, REGISTRY, LEARNER])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_kill_at_a_random_moment_costs_no_accuracy(title: str, seed: int, tmp_path: Path) -> None:
    moments = random.Random(f"{title}{seed}")
    with TrainingProcess(tmp_path / "run", *ONE_LEARNER_ACTOR, f"seed={seed}") as run:
        for _ in range(3):
            run.wait_for_iteration(run.iterations() + moments.randint(5, 35))
            run.kill(title)
        assert run.wait() == 0, run.output()[-3000:]
    assert run.result()["accuracy_after"] >= 0.90


@pytest.mark.acceptance
def test_pairs_go_on_without_one_of_each(tmp_path: Path) -> None:
    """Two replicas and two learners in turns, of which a replica dies while learners work, and a learner."""
    pairs = ("resources.placement=pairs", "serving.num_replicas=2", "learner.num_learners=2")
    with TrainingProcess(tmp_path / "run", *pairs, *ONE_LEARNER_ACTOR[1:]) as run:
        for title in (REPLICA, LEARNER):
            run.wait_for_iteration(run.iterations() + 5)
            run.kill(title)
        assert run.wait() == 0, run.output()[-3000:]
    result = run.result()
    assert result["accuracy_after"] >= 0.90 and result["restarts"]["learner"] == 1


@pytest.mark.acceptance
def test_sharded_learners_of_all_weights_go_on_without_one(tmp_path: Path) -> None:
    full = ("model.train=full", "learner.lr=1e-3", "learner.strategy=fsdp2", "learner.num_learners=2")
    with TrainingProcess(tmp_path / "run", *full, *ONE_LEARNER_ACTOR[1:]) as run:
        run.wait_for_iteration(12)
        run.kill(LEARNER)
        assert run.wait() == 0, run.output()[-3000:]
    result = run.result()
    assert result["accuracy_after"] >= 0.90 and result["restarts"]["learner"] == 1


@pytest.mark.acceptance
def test_a_killed_driver_is_resumed(tmp_path: Path) -> None:
    with TrainingProcess(tmp_path / "run", "logging.checkpoint_every=10") as run:
        run.wait_for_iteration(47)
        run.process.kill()
        run.process.wait()
        # Ray's own agents notice later; what holds models, environments and memory must be gone.
        left = [process.name() for process in run.survivors(grace=60)]
        assert not [name for name in left if name.startswith((REPLICA, ENV_RUNNER, REGISTRY))], left
    run = finished(tmp_path / "run", "logging.checkpoint_every=10", "--resume")
    assert "Resumed from iteration 40" in run.output()
    assert run.result()["accuracy_after"] >= 0.90


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("fault", "every"), [("raise", 400), ("hang", 2000), ("nonsense", 400)])
def test_an_environment_that_fails_now_and_then_costs_no_accuracy(fault: str, every: int, tmp_path: Path) -> None:
    """A hang costs seconds: its deadline, and a new env runner in place of the one whose thread it holds."""
    env = Path(__file__).parent / "flaky_shapes.py"
    arguments = (f"env.id={env}", f"env.kwargs={{fault: {fault}, every: {every}}}", "env.step_timeout_s=2")
    run = finished(tmp_path / "run", *arguments, timeout=1200)
    result = run.result()
    assert result["accuracy_after"] >= 0.90
    assert sum(result["dropped"].values()) > 0


@pytest.mark.acceptance
def test_a_full_disk_costs_files_but_not_the_run(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(small)], check=True)  # needs root
    try:
        filler = small / "filler"
        with TrainingProcess(small / "run", "logging.checkpoint_every=10", "logging.trajectories_every=0") as run:
            run.wait_for_iteration(25)
            with pytest.raises(OSError, match="No space"), open(filler, "wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)
            # progress.csv cannot tell how far it is.
            run.wait_until(
                lambda: run.output().count("Could not write a checkpoint") >= 3, "the full disk", timeout=120
            )
            filler.unlink()
            assert run.wait() == 0, run.output()[-3000:]
        result = run.result()
        assert result["accuracy_after"] >= 0.90
        assert result["write_errors"] > 0
    finally:
        subprocess.run(["umount", "-l", str(small)], check=False)


# --- Sampling and learning at the same time, group by group, while things die


ASYNC = ROOT / "configs" / "async_tiny.yaml"


@pytest.mark.acceptance
def test_no_group_is_too_old_or_missing_when_a_runner_and_a_replica_die(tmp_path: Path) -> None:
    short = ("algorithm.iterations=50", "evaluation.num_items=64", "evaluation.every=25")
    with TrainingProcess(tmp_path / "run", *short, config=ASYNC) as run:
        run.wait_for_iteration(12)
        run.kill(ENV_RUNNER)
        run.wait_for_iteration(run.iterations() + 6)
        run.kill(REPLICA)
        assert run.wait() == 0, run.output()[-3000:]
        assert run.survivors() == []
    result = run.result()
    assert (result["status"], result["iterations"], result["trajectories"]) == ("done", 50, 50 * 16 * 8)
    assert result["restarts"]["env_runner"] == result["dropped"]["runner_died"] == 1
    assert not {"too_old", "group_lost"} & result["dropped"].keys()
    with open(run.run_dir / "progress.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 50
    lags = [float(row["rollout/lag_max"]) for row in rows]
    assert max(lags) <= 2 and max(lags[3:]) >= 1  # groups of older versions are learned from, and none is too old


@pytest.mark.acceptance
@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_turns_go_on_with_newer_weights(tmp_path: Path, mode: str) -> None:
    arguments = (
        f"rollout.in_flight_updates={mode}",
        "algorithm.iterations=20",
        "evaluation.num_items=64",
        "logging.trajectories_every=1",
        "logging.trajectories_per_dump=128",
    )
    run = finished(tmp_path / "run", *arguments, config=ASYNC)
    assert run.result()["trajectories"] == 20 * 16 * 8
    rows = [
        row
        for path in sorted((run.run_dir / "trajectories").glob("*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]
    mixed = [turn for row in rows for turn in row["turns"] if turn["pieces"]]
    assert mixed
    for turn in mixed:
        counts, versions = zip(*turn["pieces"], strict=True)
        assert sum(counts) == turn["stop"] - turn["start"] and min(counts) > 0
        assert list(versions) == sorted(set(versions)) and turn["policy_version"] == versions[0]


@pytest.mark.acceptance
def test_what_was_under_way_is_resumed(tmp_path: Path) -> None:
    arguments = ("algorithm.iterations=20", "evaluation.num_items=64", "logging.checkpoint_every=5")
    with TrainingProcess(tmp_path / "run", *arguments, config=ASYNC) as run:
        run.wait_for_iteration(12)
        run.process.kill()
        run.process.wait()
        run.survivors(grace=60)
    run = finished(tmp_path / "run", *arguments, "--resume", config=ASYNC)
    assert "Resumed from iteration 10" in run.output()
    assert run.result()["trajectories"] == 20 * 16 * 8
