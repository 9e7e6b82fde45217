"""Running the command line as a user does, in processes of their own, and finding what to kill inside them."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpx
import psutil

from rl_vlm.cli import run

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"

# Process titles of the actors that a run consists of; RLlib wraps its learners.
REPLICA, ENV_RUNNER = "ray::ServeReplica", "ray::VLMEnvRunner"
REGISTRY, LEARNER = "ray::VersionRegistry", "ray::_WrappedExecutable"


def environment(**changes: str) -> dict[str, str]:
    """The environment of a run: offline, and not inside another cluster."""
    kept = ("RAY_worker_niceness",)  # no address, token or session
    clean = {
        name: value
        for name, value in os.environ.items()
        if name in kept or (not name.startswith("RAY_") and name != "WANDB_API_KEY")
    }
    return {**clean, "HF_HUB_OFFLINE": "1", **changes}


class Done(NamedTuple):
    """A command that has ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def rl_vlm(*arguments: object, timeout: float | None = None, **changes: str) -> Done:
    """Run `rl-vlm ...` to its end: in this process, which has imported torch already, or with a deadline or another
    environment in one of its own."""
    words = list(map(str, arguments))
    if changes or timeout:
        command = [sys.executable, "-m", "rl_vlm.cli", *words]
        kept: dict[str, Any] = {"capture_output": True, "text": True, "timeout": timeout or 120, "check": False}
        done = subprocess.run(command, env=environment(**changes), cwd=ROOT, **kept)
        return Done(done.returncode, done.stdout, done.stderr)
    with chdir(ROOT), redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = run(words)
    return Done(code, out.getvalue(), err.getvalue())


def iterations_done(run_dir: Path) -> int:
    """How many iterations progress.csv holds."""
    try:
        return max(len((run_dir / "progress.csv").read_text().splitlines()) - 1, 0)
    except OSError:
        return 0


class CommandProcess:
    """`rl-vlm ...` in the background, and everything that it starts."""

    program: tuple[object, ...] = (sys.executable, "-m", "rl_vlm.cli")

    def __init__(self, *arguments: object, **changes: str) -> None:
        # Not beside the run folder: its disk may be made full.
        self.log = Path(tempfile.mkdtemp(prefix="rl-vlm-test-")) / "output.log"
        command = [*self.program, *arguments]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                list(map(str, command)),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(**changes),
                cwd=ROOT,
                start_new_session=True,
            )
        self.everyone: dict[int, psutil.Process] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remember()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in self.survivors():
            process.kill()

    def remember(self) -> list[psutil.Process]:
        """All processes of the run that are alive; the ones seen once are remembered for `survivors`."""
        try:
            alive = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            alive = []
        self.everyone.update({process.pid: process for process in alive})
        return alive

    def actors(self, title: str) -> list[psutil.Process]:
        """The run's processes with this title."""
        found = []
        for process in self.remember():
            try:
                if process.cmdline()[0].startswith(title):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.ZombieProcess, IndexError):
                continue
        return found

    def survivors(self, grace: float = 15.0) -> list[psutil.Process]:
        """Processes of the run that are still there `grace` seconds after its end."""
        _, alive = psutil.wait_procs(list(self.everyone.values()), timeout=grace)
        return [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    def wait_until(self, condition: Callable[[], Any], what: str, timeout: float = 300) -> None:
        """Wait for something while the command runs."""
        deadline = time.monotonic() + timeout
        while not condition():
            self.remember()
            assert self.process.poll() is None, f"the command ended early:\n{self.output()[-3000:]}"
            assert time.monotonic() < deadline, f"{what} did not come:\n{self.output()[-3000:]}"
            time.sleep(0.1)

    def kill(self, title: str) -> int:
        """SIGKILL one actor with this title; returns its pid."""
        victim = self.actors(title)[0]
        victim.send_signal(signal.SIGKILL)
        return int(victim.pid)

    def wait(self, timeout: float = 600) -> int:
        """Wait for the end; returns the exit code."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            self.remember()
            assert time.monotonic() < deadline, f"the run did not end:\n{self.output()[-3000:]}"
            time.sleep(0.2)
        return int(self.process.returncode)

    def output(self) -> str:
        """What the run printed."""
        return self.log.read_text()


class RunFolder:
    """What a run has written."""

    run_dir: Path

    def iterations(self) -> int:
        """How many iterations progress.csv holds."""
        return iterations_done(self.run_dir)

    def result(self) -> dict[str, Any]:
        """result.json."""
        return json.loads((self.run_dir / "result.json").read_text())  # type: ignore[no-any-return]


class FinishedRun(RunFolder):
    """A run that has ended, and what it printed."""

    def __init__(self, run_dir: Path, printed: str) -> None:
        self.run_dir, self.printed = run_dir, printed

    def output(self) -> str:
        return self.printed


class TrainingProcess(RunFolder, CommandProcess):
    """`rl-vlm train ...` in the background."""

    def __init__(self, run_dir: Path, *arguments: object, config: Path = QUICKSTART, **changes: str) -> None:
        self.run_dir = run_dir
        super().__init__("train", config, *arguments, "--run-dir", run_dir, **changes)

    def wait_for_iteration(self, number: int, timeout: float = 300) -> None:
        """Wait until the run has done that many iterations."""
        self.wait_until(lambda: self.iterations() >= number, f"iteration {number}", timeout)


def finished(run_dir: Path, *arguments: object, config: Path = QUICKSTART, timeout: float | None = None) -> FinishedRun:
    """A run that has ended well: with a deadline in a process of its own."""
    done = rl_vlm("train", config, *arguments, "--run-dir", run_dir, timeout=timeout)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return FinishedRun(run_dir, done.stdout + done.stderr)


def trained(config: str, folder: Path, *changes: object, timeout: float = 1100) -> tuple[list[dict[str, Any]], float]:
    """The evaluations of a run of configs/CONFIG.yaml in the order of their iterations, and its seconds of training."""
    run = finished(folder / "run", *changes, timeout=timeout, config=ROOT / f"configs/{config}.yaml")
    evaluations = [json.loads(line) for line in (run.run_dir / "eval.jsonl").read_text().splitlines()]
    evaluations.sort(key=lambda entry: int(entry["iteration"]))
    return evaluations, float(run.result()["train_seconds"])


class ServeProcess(CommandProcess):
    """`rl-vlm serve`, on a free port unless one is given."""

    def __init__(self, *arguments: object, port: int = 0, **changes: str) -> None:
        super().__init__("serve", *arguments, "--port", port, **changes)
        self.wait_until(lambda: "Serving on" in self.output(), "the server", timeout=180)
        found = re.search(r"http://\S+", self.output())
        assert found is not None
        self.url = found.group()

    def busy(self, seconds: float = 0.5) -> float:
        """CPUs that the replica uses."""
        (replica,) = self.actors(REPLICA)
        before = replica.cpu_times()
        time.sleep(seconds)
        after = replica.cpu_times()
        return float(after.user + after.system - before.user - before.system) / seconds


class ServeRun(CommandProcess):
    """`serve run CONFIG` in a private cluster."""

    program = (Path(sys.executable).parent / "serve", "run", "--address", "local")

    def wait_until_healthy(self, url: str) -> None:
        def answers() -> bool:
            try:
                return httpx.get(f"{url}/health", timeout=5).status_code == 200
            except httpx.HTTPError:
                return False

        self.wait_until(answers, "the application", timeout=240)
