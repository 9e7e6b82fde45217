"""`rl-vlm eval` as users run it, beside plain transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import rl_vlm

pytestmark = pytest.mark.acceptance


def test_plain_transformers_gives_the_same_tokens_and_is_slower(tmp_path: Path) -> None:
    words = ["--model", "tiny", "--env", "Shapes-v0", "serving.num_replicas=1", "--episodes", 8]
    words += ["--max-new-tokens", 64, "--benchmark-runs", 5, "--compare-hf", "--out", tmp_path / "results.json"]
    done = rl_vlm("eval", *words, timeout=400)
    assert done.returncode == 0, done.stderr
    block = json.loads((tmp_path / "results.json").read_text())["throughput"]
    assert block["runs"] == 5 and block["new_tokens"] == 64
    for batch, least in (("1", 1.0), ("8", 1.3)):
        row = block["batches"][batch]
        assert row["same_answers"] == 1.0
        assert row["ratio"] >= least, block
        assert 0 < row["first_token_s"] < 64 * int(batch) / row["tokens_per_s_mean"]
    assert "ours / theirs" in (tmp_path / "results.md").read_text()
