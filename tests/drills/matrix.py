"""The drill matrix: parts x faults x lag x algorithm on three nodes that share nothing. Prints a table of what happened.

    python tests/drills/matrix.py --out FOLDER [--only "replica killed lag0 grpo" ...]

One run per lag and algorithm suffers all faults, one after the other: each when it has done iterations since the last. A run
that ended is resumed. Then every iteration must be there once, no sample older than the lag allows, engine and learner must agree
(a wrong version would not), and no label be lost. A cell that is done is not repeated. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[k] / name) for k, name in ((0, ""), (1, ""), (1, "e2e"))]

import httpx
from faults import FAULTS, PARTS, PLACES, inject
from node_cluster import NodeCluster, what_is_missing
from runs import QUICKSTART, ROOT, iterations_done

from rl_vlm.files import write_atomic
from rl_vlm.models.loading import resolve_model

DRIVER, WORK = '{"driver": 1}', '{"work": 1}'
SETTLED = 3  # iterations between two faults
_START_S, _WAIT_S = 900.0, 420.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One drill."""

    part: str
    fault: str
    lag: int
    algorithm: str

    @property
    def name(self) -> str:
        """For --only."""
        return f"{self.part} {self.fault} lag{self.lag} {self.algorithm}"

    def campaign(self) -> tuple[int, str]:
        """The run that it is done to."""
        return self.lag, self.algorithm


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened.

    seconds: from the fault (or its end, if it lasts) until every part is there again and a row of figures came after it.
    pause: the longest time without a row, from the last one before the fault to the last that was waited for; one that
    lasts is in it.
    """

    how: str  # "goes on", "resumed", "ended" or "not done"
    seconds: float
    pause: float
    problems: list[str]


def cells() -> list[Cell]:
    """All that can be: the preference loop has no lag, and links belong to nodes."""
    found = []
    for part, fault in itertools.product((*PARTS, *PLACES), FAULTS):
        if fault in ("cut", "slow") and part != "node":
            continue
        if fault == "shm full" and part not in ("replica", "driver"):
            continue
        if part in ("raylet", "head") and fault != "killed":
            continue
        if fault == "disk full" and part != "driver":  # it alone writes what must not be lost
            continue
        found += [Cell(part, fault, lag, "grpo") for lag in (0, 2)]
        if part != "env runner":  # the driver steps the environments itself
            found.append(Cell(part, fault, 0, "preference"))
    return found


class Rows:
    """When the rows of figures of a run came."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.times = run_dir, [time.monotonic()]
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        seen = 0
        while not self._ended.wait(0.2):
            if (now := iterations_done(self.run_dir)) > seen:
                self.times.append(time.monotonic())
                seen = now

    def longest_pause(self, since: float) -> float:
        """Seconds, from the last row before `since` on."""
        first = sum(moment <= since for moment in self.times) - 1
        times = self.times[max(first, 0) :]
        return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)

    def close(self) -> None:
        """Watch no longer."""
        self._ended.set()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A disk of 64 MB."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Campaign:
    """A run on a cluster of its own, to which faults are done."""

    def __init__(self, lag: int, algorithm: str, folder: Path) -> None:
        self.lag, self.algorithm, self.folder = lag, algorithm, folder
        self.disk = folder / "disk"  # a small one, that can be full
        self.run_dir = self.disk / "run"
        self.jobs: list[str] = []
        self.whole: Counter[str] = Counter()

    def run(self, cells: Sequence[Cell], tell: Callable[[Cell, Outcome], None]) -> None:
        """Do these cells. Raises AssertionError and TimeoutError when the run does not go on: the rest is not done then."""
        if self.folder.exists():
            self.folder.rename(self.folder.with_name(f"{self.folder.name}-{int(time.time())}"))
        (project := self.folder / "project").mkdir(parents=True)
        source = QUICKSTART if self.algorithm == "grpo" else ROOT / "configs/rl_vlm_f/cartpole_tiny.yaml"
        shutil.copy(source, project / "config.yaml")
        models = [resolve_model("tiny"), resolve_model("tiny-labeller")]
        with (
            contextlib.closing(Rows(self.run_dir)) as self.rows,
            small_disk(self.disk),
            NodeCluster([2, 2, 2], [DRIVER, WORK, WORK]) as self.cluster,
        ):
            for node, model in itertools.product(self.cluster.workers, models):
                shutil.copytree(model, node.folder / "home/.cache/rl_vlm" / model.name)
            self.submit()
            self.wait_iterations(SETTLED, _START_S)
            # Once: for a while after a driver was killed its replicas are there beside the new ones.
            self.whole = self.parts()
            for cell in cells:
                outcome, broken = self.drill(cell)
                tell(cell, outcome)
                if broken:
                    raise TimeoutError("the run did not go on")

    def drill(self, cell: Cell) -> tuple[Outcome, bool]:
        """One fault, and whether the run is broken after it."""
        job, first, since = self.jobs[-1], iterations_done(self.run_dir), time.monotonic()
        try:
            undo = inject(self.cluster, cell.part, cell.fault, self.run_dir)
        except LookupError as error:
            return Outcome("not done", 0.0, 0.0, [str(error)]), False
        before, started = iterations_done(self.run_dir), time.monotonic()
        seconds = 0.0
        try:
            self.wait_iterations(before + 1, _WAIT_S, self.whole)
            seconds = round(time.monotonic() - started, 1)
            undo()
            self.wait_iterations(iterations_done(self.run_dir) + SETTLED, _WAIT_S)
        except (AssertionError, TimeoutError) as error:
            return Outcome("ended", seconds, 0.0, [last_line(str(error))]), True
        finally:
            undo()
        how = "goes on" if self.jobs[-1] == job else "resumed"
        return Outcome(how, seconds, round(self.rows.longest_pause(since), 1), self.problems(first)), False

    def parts(self) -> Counter[str]:
        """How many processes of each part there are."""
        return Counter({
            part: sum(len(node.processes(title)) for node in self.cluster.nodes if node.process is not None)
            for part, title in PARTS.items()
        })  # fmt: skip

    def submit(self, *more: str) -> None:
        """Start the run, or resume it."""
        if self.algorithm == "grpo":
            changes = [
                "evaluation.num_items=32", "evaluation.every=0", "rollout.prompts_per_iteration=4", "logging.checkpoint_every=2",
                "algorithm.iterations=100000", f"rollout.max_policy_lag={self.lag}", "resources.env_runners_on=work",
            ]  # fmt: skip
        else:
            changes = [
                "preference.total_steps=1000000", "preference.steps_per_iteration=200", "preference.evaluation.every=0",
                "preference.max_feedback=100000", "logging.checkpoint_every=1",
            ]  # fmt: skip
        changes += ["learner.num_learners=1", "learner.cpus_per_learner=0.5", "resources.replicas_on=work"]
        command = [
            "rl-vlm",
            "train",
            "config.yaml",
            *changes,
            "resources.learners_on=work",
            "--run-dir",
            str(self.run_dir),
        ]
        self.jobs.append(f"run{len(self.jobs)}")
        self.cluster.submit(
            self.jobs[-1], self.folder / "project", [*command, *more], options=["--entrypoint-resources", DRIVER]
        )

    def wait_iterations(self, count: int, timeout: float, whole: Counter[str] | None = None) -> None:
        """Wait for iterations, and for as many processes of each part as in `whole`.

        Starts again what has gone, as a supervisor of the nodes and of the run would.
        """
        deadline, resumed = time.monotonic() + timeout, 0
        while iterations_done(self.run_dir) < count or not (whole or Counter()) <= self.parts():
            self.cluster.revive()
            try:
                ended = self.cluster.status(self.jobs[-1]) not in ("PENDING", "RUNNING")
            except (httpx.HTTPError, KeyError, ValueError):  # the head is away
                ended = False
            if ended and len(self.cluster.alive()) == len(self.cluster.nodes):
                assert resumed < 2, self.cluster.logs(self.jobs[-1])[-3000:]
                resumed += 1
                self.submit("--resume")
            if time.monotonic() > deadline:
                missing = ", ".join((whole - self.parts()) if whole else ())
                raise TimeoutError(f"{missing or f'iteration {count}'} did not come within {timeout:g} s")
            time.sleep(0.3)

    def problems(self, first: int) -> list[str]:
        """What was lost, done twice, or sampled by a wrong version since iteration `first`."""
        with (self.run_dir / "progress.csv").open() as file:
            rows = list(csv.DictReader(file))
        numbers = [int(row["iteration"]) for row in rows]
        each = numbers[0]  # 1, or the steps of an iteration of the preference loop
        found = (
            [] if numbers == [each * (k + 1) for k in range(len(numbers))] else ["iterations are lost, or there twice"]
        )
        if self.algorithm == "preference":
            labels = [float(row["labels/total"]) for row in rows if row.get("labels/total")]
            return found + ([] if labels == sorted(labels) else ["labels were lost"])
        rows = rows[first:]
        lags = [float(row["rollout/lag_max"]) for row in rows if row.get("rollout/lag_max")]
        if max(lags, default=0) > self.lag:
            found.append(f"a sample was {max(lags):g} versions old")
        # With a lag, the difference is that of versions too.
        mismatch = [abs(float(row["mismatch/kl"])) for row in rows if row.get("mismatch/kl") and not self.lag]
        if max(mismatch, default=0) > 1e-4:
            found.append(f"engine and learner differ by {max(mismatch):.1e} nats")
        return found


def last_line(text: str) -> str:
    """For the table."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "unknown"


def table(done: dict[str, dict[str, object]]) -> str:
    """As Markdown."""
    lines = ["| drill | | whole again after, s | longest pause, s | problems |", "|---|---|---|---|---|"]
    for name, outcome in done.items():
        problems = "; ".join(map(str, outcome["problems"])) or "none"  # type: ignore[call-overload]
        lines.append(f"| {name} | {outcome['how']} | {outcome['seconds']} | {outcome['pause']} | {problems} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run what is not done yet; 1 if a cell has a problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder of the results")
    parser.add_argument("--only", nargs="*", help="cells by their names; all by default")
    given = parser.parse_args()
    if missing := what_is_missing():
        print(f"error: {missing}", file=sys.stderr)
        return 2
    wanted = [cell for cell in cells() if not given.only or cell.name in given.only]
    if given.only and len(wanted) != len(given.only):
        print(f"error: cells are: {'; '.join(cell.name for cell in cells())}", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    kept = given.out / "drills.json"
    done = json.loads(kept.read_text()) if kept.is_file() else {}
    left_over = [cell for cell in wanted if cell.name not in done or done[cell.name]["problems"]]

    def tell(cell: Cell, outcome: Outcome) -> None:
        done[cell.name] = asdict(outcome)
        print(
            f"{cell.name}: {outcome.how}, {outcome.seconds} s, pause {outcome.pause} s {outcome.problems or ''}",
            flush=True,
        )
        write_atomic(kept, json.dumps(done, indent=1))
        write_atomic(given.out / "drills.md", table(done))

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the cluster ends with us
    for (lag, algorithm), chosen in itertools.groupby(sorted(left_over, key=Cell.campaign), Cell.campaign):
        left = list(chosen)
        while left:
            campaign = Campaign(lag, algorithm, given.out.absolute() / f"{algorithm}-lag{lag}")
            count = len(left)

            def told(cell: Cell, outcome: Outcome, left: list[Cell] = left) -> None:
                left.remove(cell)
                tell(cell, outcome)

            try:
                campaign.run(list(left), told)
            except (AssertionError, TimeoutError) as error:
                print(f"{algorithm} lag {lag}: {last_line(str(error))}; the rest begins anew", flush=True)
            if len(left) == count:  # not even its start
                for cell in left:
                    tell(cell, Outcome("not done", 0.0, 0.0, ["the run did not start"]))
                break
    return int(any(done[cell.name]["problems"] for cell in wanted))


if __name__ == "__main__":
    sys.exit(main())
