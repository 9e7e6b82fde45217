"""`rl-vlm train` as a Ray job on a head with token authentication: refused without it, followed, stopped, resumed, two at a time."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from head import RayHead
from jobs import wait_until
from runs import QUICKSTART, REPLICA, ROOT, iterations_done

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(900)]

SMALL = [
    "evaluation.num_items=64",
    "rollout.prompts_per_iteration=4",
    "logging.checkpoint_every=2",
    "serving.num_replicas=1",
]


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with RayHead() as head:
        yield head


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What a user submits: a folder with a configuration."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "config.yaml").write_text(QUICKSTART.read_text())
    return folder


def train(run_dir: object, iterations: int, *more: str) -> list[str]:
    return [
        "rl-vlm",
        "train",
        "config.yaml",
        *SMALL,
        f"algorithm.iterations={iterations}",
        "--run-dir",
        str(run_dir),
        *more,
    ]


def test_without_the_token_nothing_is_accepted(head: RayHead, project: Path) -> None:
    assert head.get("/api/jobs/", token=None).status_code == 401
    assert head.get("/api/jobs/", token="wrong" * 8).status_code in (401, 403)
    refused = head.job("submit", "--", "true", RAY_AUTH_MODE="disabled", RAY_AUTH_TOKEN_PATH="")
    assert refused.returncode != 0


def test_a_job_is_followed_stopped_and_resumed(head: RayHead, project: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    head.submit("first", project, train(run_dir, 500), RAY_JOB_STOP_WAIT_TIME_S="120")
    head.wait_until(lambda: iterations_done(run_dir) >= 3, "first")
    assert "Starting Ray" in head.logs("first")
    stopped = head.job("stop", "first")
    assert stopped.returncode == 0, stopped.stderr
    assert head.wait_for_end("first") == "STOPPED"
    result = json.loads((run_dir / "result.json").read_text())
    assert result["status"] == "interrupted" and iterations_done(run_dir) == result["iterations"]
    assert (run_dir / "checkpoints" / f"iteration-{result['iterations']:06d}").is_dir()
    iterations = result["iterations"] + 3
    head.submit("again", project, train(run_dir, iterations, "--resume"))
    assert head.wait_for_end("again") == "SUCCEEDED", head.logs("again")[-3000:]
    assert (
        json.loads((run_dir / "result.json").read_text())["status"] == "done" and iterations_done(run_dir) == iterations
    )
    assert not head.actors(REPLICA)


def test_two_jobs_at_a_time(head: RayHead, project: Path, tmp_path: Path) -> None:
    for name in ("left", "right"):
        head.submit(name, project, train(tmp_path / name, 4, f"name={name}"))
    for name in ("left", "right"):
        assert head.wait_for_end(name) == "SUCCEEDED", head.logs(name)[-3000:]
        assert iterations_done(tmp_path / name) == 4


def test_a_script_of_tune_is_stopped_and_resumed(head: RayHead, tmp_path: Path) -> None:
    project, out = tmp_path / "project", tmp_path / "losses"
    for folder in ("tune", "configs"):
        shutil.copytree(ROOT / folder, project / folder, ignore=shutil.ignore_patterns("__pycache__"))
    changes = (
        "algorithm.iterations=8",
        "evaluation.every=4",
        "evaluation.num_items=64",
        "rollout.prompts_per_iteration=4",
    )
    script = ["python", "tune/compare_losses.py", "--quick", "--out", str(out), *changes]
    head.submit("sweep", project, script, RAY_JOB_STOP_WAIT_TIME_S="120")

    def ended() -> list[Path]:
        return [path for path in out.glob("tune/trial-*/result.json") if path.read_text()]

    head.wait_until(ended, "sweep")
    assert head.job("stop", "sweep").returncode == 0
    assert head.wait_for_end("sweep") == "STOPPED"
    assert "--resume goes on from each trial's last evaluation" in " ".join(head.logs("sweep").split())
    assert not (out / "results.csv").exists()
    head.submit("sweep-again", project, [*script, "--resume"])
    assert head.wait_for_end("sweep-again", 600) == "SUCCEEDED", head.logs("sweep-again")[-3000:]
    rows = (out / "results.csv").read_text().splitlines()
    assert len(rows) == 1 + 6 and all(",True," in row for row in rows[1:])
    assert (out / "best/adapter/adapter_model.safetensors").is_file()


def test_a_run_folder_inside_the_job_is_refused(head: RayHead, project: Path) -> None:
    head.submit("inside", project, ["rl-vlm", "train", "config.yaml"])
    assert head.wait_for_end("inside") == "FAILED"
    assert "give --run-dir a folder that stays" in " ".join(head.logs("inside").split())


def test_the_replicas_of_a_killed_driver_end_by_themselves(head: RayHead, project: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    head.submit("killed", project, train(run_dir, 500))
    head.wait_until(lambda: iterations_done(run_dir) >= 1, "killed")
    assert head.actors(REPLICA)
    (driver,) = [
        process
        for process in head.everyone.values()
        if process.is_running() and str(run_dir) in process.cmdline() and "rl-vlm" in " ".join(process.cmdline()[:3])
        and "sh" not in Path(process.cmdline()[0]).name
    ]  # fmt: skip
    driver.send_signal(signal.SIGKILL)
    assert head.wait_for_end("killed") == "FAILED"
    wait_until(lambda: not head.actors(REPLICA), "end of the replicas", 180)
    head.submit("resumed", project, train(run_dir, iterations_done(run_dir) + 2, "--resume"))
    assert head.wait_for_end("resumed") == "SUCCEEDED", head.logs("resumed")[-3000:]
