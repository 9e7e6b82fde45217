"""The drill matrix: parts x faults x lag x algorithm on three nodes that share nothing. Prints a table of what happened.

    python tests/drills/matrix.py --out FOLDER [--only "replica killed lag0 grpo" ...]

Each cell trains a small run, does its fault to it in the middle, and resumes it if it ended. Then every iteration must be there
once, no sample older than the lag allows, engine and learner must agree (a wrong version would not), and no label be lost. A
cell that is done is not repeated. Needs root.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "e2e")]

from faults import FAULTS, PARTS, PLACES, inject
from node_cluster import NodeCluster, allowed
from runs import QUICKSTART, ROOT

from rl_vlm.files import write_atomic
from rl_vlm.models.loading import resolve_model

DRIVER = '{"driver": 1}'
ITERATIONS = 24
STEPS = 3000
_WAIT_S = 420.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One drill."""

    part: str
    fault: str
    lag: int
    algorithm: str

    @property
    def name(self) -> str:
        """For --only, and of its folder."""
        return f"{self.part} {self.fault} lag{self.lag} {self.algorithm}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened. seconds: from the fault (or its end, if it lasts) to the next row of figures."""

    how: str  # "goes on" or "resumed"
    seconds: float
    restarts: dict[str, int]
    problems: list[str]


def cells() -> list[Cell]:
    """All that can be: the preference loop has no lag, and links belong to nodes."""
    found = []
    for part, fault in itertools.product((*PARTS, *PLACES), FAULTS):
        if fault in ("cut", "slow") and part != "node":
            continue
        if fault == "shm full" and part not in ("replica", "driver"):
            continue
        if part == "raylet" and fault != "killed":
            continue
        found += [Cell(part, fault, lag, "grpo") for lag in (0, 2)]
        if part != "env runner":  # the driver steps the environments itself
            found.append(Cell(part, fault, 0, "preference"))
    return found


class Drill:
    """One cell on a cluster of its own."""

    def __init__(self, cell: Cell, folder: Path) -> None:
        self.cell, self.folder, self.run_dir = cell, folder, folder / "run"

    def run(self) -> Outcome:
        """Do it. Raises AssertionError and TimeoutError when it does not come to its end."""
        shutil.rmtree(self.folder, ignore_errors=True)
        (project := self.folder / "project").mkdir(parents=True)
        source = QUICKSTART if self.cell.algorithm == "grpo" else ROOT / "configs/rl_vlm_f/cartpole_tiny.yaml"
        shutil.copy(source, project / "config.yaml")
        models = [resolve_model("tiny"), resolve_model("tiny-labeller")]
        with NodeCluster([2, 2, 2], [DRIVER] * 3) as cluster:
            for node, model in itertools.product(cluster.workers, models):
                shutil.copytree(model, node.folder / "home/.cache/rl_vlm" / model.name)
            self._submit(cluster, "first")
            self._wait_rows(cluster, "first", 4)
            undo = inject(cluster, self.cell.part, self.cell.fault, self.run_dir)
            before, started = self.rows(), time.monotonic()
            how = "goes on"
            try:
                while self.rows() <= before:
                    if cluster.status("first") not in ("PENDING", "RUNNING"):
                        how = "resumed"
                        self._submit(cluster, "again", "--resume")
                        self._wait_rows(cluster, "again", before + 1)
                    if time.monotonic() - started > _WAIT_S:
                        raise TimeoutError(f"nothing happened for {_WAIT_S:g} s:\n{cluster.logs('first')[-1500:]}")
                    time.sleep(0.3)
                seconds = time.monotonic() - started
            finally:
                undo()
            job = "again" if how == "resumed" else "first"
            status = cluster.wait_for_end(job, 600)
            if status != "SUCCEEDED" and job == "first":  # it went on a while, then ended
                how, job = "resumed", "again"
                self._submit(cluster, job, "--resume")
                status = cluster.wait_for_end(job, 600)
            assert status == "SUCCEEDED", cluster.logs(job)[-2000:]
        result = json.loads((self.run_dir / "result.json").read_text())
        return Outcome(how, round(seconds, 1), result.get("restarts", {}), self.problems())

    def _submit(self, cluster: NodeCluster, name: str, *more: str) -> None:
        if self.cell.algorithm == "grpo":
            changes = [
                "evaluation.num_items=32", "evaluation.every=0", "rollout.prompts_per_iteration=4", "logging.checkpoint_every=2",
                "learner.num_learners=1", "learner.cpus_per_learner=0.5", f"algorithm.iterations={ITERATIONS}",
                f"rollout.max_policy_lag={self.cell.lag}",
            ]  # fmt: skip
        else:
            changes = [
                f"preference.total_steps={STEPS}", "preference.steps_per_iteration=200", "preference.evaluation.every=0",
                "logging.checkpoint_every=1", "learner.num_learners=1", "learner.cpus_per_learner=0.5",
            ]  # fmt: skip
        command = ["rl-vlm", "train", "config.yaml", *changes, "--run-dir", str(self.run_dir), *more]
        cluster.submit(name, self.folder / "project", command, options=["--entrypoint-resources", DRIVER])

    def rows(self) -> int:
        """Rows of figures so far."""
        try:
            return len((self.run_dir / "progress.csv").read_text().splitlines()) - 1
        except OSError:
            return 0

    def _wait_rows(self, cluster: NodeCluster, job: str, count: int) -> None:
        deadline = time.monotonic() + _WAIT_S
        while self.rows() < count:
            assert cluster.status(job) in ("PENDING", "RUNNING"), cluster.logs(job)[-2000:]
            if time.monotonic() > deadline:
                raise TimeoutError(f"row {count} did not come:\n{cluster.logs(job)[-1500:]}")
            time.sleep(0.3)

    def problems(self) -> list[str]:
        """What was lost, done twice, or sampled by a wrong version."""
        with (self.run_dir / "progress.csv").open() as file:
            rows = list(csv.DictReader(file))
        found = []
        numbers = [row[next(iter(row))] for row in rows]
        if len(set(numbers)) != len(numbers):
            found.append("a row is there twice")
        if self.cell.algorithm == "grpo":
            if numbers != [str(k) for k in range(1, ITERATIONS + 1)]:
                found.append(f"iterations {numbers[0]} to {numbers[-1]}, {len(numbers)} of {ITERATIONS}")
            lags = [float(row["rollout/lag_max"]) for row in rows if row.get("rollout/lag_max")]
            if max(lags, default=0) > self.cell.lag:
                found.append(f"a sample was {max(lags):g} versions old")
            mismatch = [abs(float(row["mismatch/kl"])) for row in rows if row.get("mismatch/kl")]
            if max(mismatch, default=0) > 1e-4:
                found.append(f"engine and learner differ by {max(mismatch):.1e} nats")
        else:
            labels = [float(row["labels/total"]) for row in rows if row.get("labels/total")]
            if labels != sorted(labels):
                found.append("labels were lost")
        return found


def table(done: dict[str, dict[str, object]]) -> str:
    """As Markdown."""
    lines = ["| drill | | seconds | restarts | problems |", "|---|---|---|---|---|"]
    for name, outcome in done.items():
        problems = "; ".join(map(str, outcome["problems"])) or "none"  # type: ignore[call-overload]
        lines.append(f"| {name} | {outcome['how']} | {outcome['seconds']} | {outcome['restarts']} | {problems} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run what is not done yet; 1 if a cell has a problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder of the results")
    parser.add_argument("--only", nargs="*", help="cells by their names; all by default")
    given = parser.parse_args()
    if not allowed():
        print("error: the drills make network namespaces: run them as root.", file=sys.stderr)
        return 2
    wanted = [cell for cell in cells() if not given.only or cell.name in given.only]
    if given.only and len(wanted) != len(given.only):
        print(f"error: cells are: {'; '.join(cell.name for cell in cells())}", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    kept = given.out / "drills.json"
    done = json.loads(kept.read_text()) if kept.is_file() else {}
    for cell in wanted:
        if cell.name in done and not done[cell.name]["problems"]:
            continue
        try:
            outcome = Drill(cell, given.out.absolute() / cell.name.replace(" ", "-")).run()
        except (AssertionError, TimeoutError, LookupError) as error:
            outcome = Outcome(
                "ended", 0.0, {}, [str(error).strip().splitlines()[0][:200] if str(error) else repr(error)]
            )
        done[cell.name] = asdict(outcome)
        print(f"{cell.name}: {outcome}", flush=True)
        write_atomic(kept, json.dumps(done, indent=1))
        write_atomic(given.out / "drills.md", table(done))
    return int(any(done[cell.name]["problems"] for cell in wanted))


if __name__ == "__main__":
    sys.exit(main())
