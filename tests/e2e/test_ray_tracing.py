"""Where Ray's own tracing is on, its spans of remote calls belong to the iteration's trace."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from head import RayHead
from runs import ROOT, TrainingProcess
from traces_support import read_trace

from rl_vlm.models.loading import resolve_model

pytestmark = pytest.mark.acceptance


def test_rays_spans_join_the_trace_of_an_iteration(tmp_path: Path) -> None:
    resolve_model("tiny")
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
