"""The trace of a real run: spans of all processes nest, and their times add up."""

from __future__ import annotations

import csv
import json
import os
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from head import RayHead
from runs import ROOT, TrainingProcess, finished
from traces_support import Written, read_trace

from rl_vlm.ownership import files_in, run_files

pytestmark = pytest.mark.acceptance

SLACK_NS = 50_000_000  # between processes, whose clocks are read one after the other on a busy machine
HELD_UP_S = 1.0  # a span lies inside what the figure measures; a busy machine may hold it up in between
GROUPS = 4


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traced") / "run"
    settings = (
        "logging.traces=2", "algorithm.iterations=3", f"rollout.prompts_per_iteration={GROUPS}", "rollout.group_size=4",
        "algorithm.minibatches=2", "evaluation.every=0", "evaluation.num_items=8", "rollout.open_ahead=false", "learner.num_learners=1",
    )  # fmt: skip
    finished(folder, *settings)
    return folder


@pytest.fixture(scope="module")
def spans(run_dir: Path) -> list[Written]:
    """The spans of the one iteration that was traced."""
    (path,) = (run_dir / "traces").iterdir()
    assert path.name == "iteration-000002.jsonl"
    return read_trace(path)


def test_every_part_of_an_iteration_is_there(spans: list[Written]) -> None:
    counts = Counter((span.name, span.service.split("-")[0]) for span in spans)
    one = {"iteration", "sample", "sight", "advantages", "learn", "publish"}
    assert {name for (name, service), count in counts.items() if service == "driver" and count == 1} == one
    for name, service in (
        ("group", "env_runner"),
        ("open", "env_runner"),
        ("request", "env_runner"),
        ("engine", "replica"),
    ):
        assert counts[name, service] == GROUPS, name
    for name in ("admit", "queue", "generate"):
        assert counts[name, "replica"] == GROUPS, name
    assert counts["environment", "env_runner"] == GROUPS  # one turn each
    assert counts["update", "learner"] == counts["pack", "learner"] == 1
    assert 1 <= counts["optimizer_step", "learner"] <= 2
    assert not [span for span in spans if span.error]


def test_spans_nest_across_processes(spans: list[Written]) -> None:
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans) and len({span.trace_id for span in spans}) == 1
    parents = {
        "sample": "iteration", "learn": "iteration", "sight": "iteration", "advantages": "iteration", "publish": "learn",
        "group": "sample", "open": "group", "request": "group", "environment": "group", "reward": "group", "engine": "request",
        "admit": "engine", "queue": "engine", "generate": "engine", "update": "learn", "pack": "update", "optimizer_step": "update",
    }  # fmt: skip
    for span in spans:
        if span.name == "iteration":
            assert span.parent_id == ""
            continue
        parent = by_id[span.parent_id]
        assert parent.name == parents[span.name]
        slack = 0 if span.service == parent.service else SLACK_NS
        assert parent.start_ns - slack <= span.start_ns <= span.end_ns <= parent.end_ns + slack, span.name


def test_times_add_up(spans: list[Written], run_dir: Path) -> None:
    children: defaultdict[str, list[Written]] = defaultdict(list)
    for span in spans:
        children[span.parent_id].append(span)
    (root,) = children[""]
    # What follows each other is at most as long as what holds it.
    for span in spans:
        if span.name in ("iteration", "learn", "engine", "update"):
            assert sum(child.seconds for child in children[span.span_id]) <= span.seconds + SLACK_NS / 1e9, span.name
    # The driver's spans are the figures that are logged.
    row = list(csv.DictReader((run_dir / "progress.csv").open()))[1]
    for span in children[root.span_id]:
        assert -HELD_UP_S < span.seconds - float(row[f"time/{span.name}"]) < 1e-3, span.name
    assert -HELD_UP_S < root.seconds - float(row["time/step"]) < 1e-3
    assert sum(span.seconds for span in children[root.span_id]) > root.seconds - HELD_UP_S
    # Sampling is spans of groups from its begin to its end: nothing long is left out.
    (sample,) = (span for span in spans if span.name == "sample")
    assert max(span.seconds for span in spans if span.name == "group") <= sample.seconds
    tokens = sum(int(span.attributes["tokens"]) for span in spans if span.name == "engine")
    assert tokens == float(row["rollout/tokens"])


def test_traces_are_files_of_the_run(run_dir: Path) -> None:
    assert run_files(run_dir) == files_in(run_dir)


# --- Where Ray's own tracing is on, its spans of remote calls belong to the iteration's trace


def test_rays_spans_join_the_trace_of_an_iteration(tmp_path: Path) -> None:
    hooked = tmp_path / "ray"
    hooked.mkdir()
    path = os.pathsep.join(filter(None, [str(ROOT / "tests/e2e"), os.environ.get("PYTHONPATH")]))
    settings = (
        "logging.traces=2", "algorithm.iterations=3", "rollout.prompts_per_iteration=4", "rollout.group_size=4",
        "evaluation.every=0", "evaluation.num_items=8",
    )  # fmt: skip
    with (
        RayHead("--tracing-startup-hook=ray_hook:setup_tracing", PYTHONPATH=path, RAY_HOOK_FOLDER=str(hooked)) as head,
        TrainingProcess(tmp_path / "run", *settings, **head.joining) as run,
    ):
        assert run.wait() == 0, run.output()[-3000:]
    ours = read_trace(tmp_path / "run/traces/iteration-000002.jsonl")
    (root,) = (span for span in ours if not span.parent_id)
    rays = [json.loads(line) for file in hooked.glob("*.jsonl") for line in file.read_text().splitlines()]
    joined = [one for one in rays if one["context"]["trace_id"] == f"0x{root.trace_id}"]
    assert len(joined) < len(rays)  # other iterations are traced by Ray alone
    called = [one["name"] for one in joined if "sample" in one["name"]]
    assert any("ray.remote" in name for name in called), {one["name"] for one in joined}
    # The caller's spans are children of the span that is open there, the callees' of the callers'.
    (sample,) = (span for span in ours if span.name == "sample")
    assert f"0x{sample.span_id}" in {one["parent_id"] for one in joined}
