"""`rl-vlm eval` as users run it: killed and resumed, over HTTP against `rl-vlm serve`, and beside plain transformers."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from runs import QUICKSTART, CommandProcess, rl_vlm

pytestmark = pytest.mark.acceptance

ITEMS = 500


def lines(path: Path) -> list[dict[str, Any]]:
    """The finished items of an items file; a last line that was cut short is left out."""
    return [json.loads(line) for line in path.read_text().split("\n")[1:-1]] if path.exists() else []


def has_lines(path: Path, least: int) -> bool:
    return len(lines(path)) >= least


def test_an_evaluation_of_500_items_that_is_killed_twice_asks_each_item_once(tiny_folder: Path, tmp_path: Path) -> None:
    out, items = tmp_path / "results.json", tmp_path / "results.items.jsonl"
    words = [QUICKSTART, f"model.path={tiny_folder}", "serving.num_replicas=1", "--out", out]
    words += ["--episodes", ITEMS, "evaluation.at_once=4", "seed=1"]
    for resume, least in (([], 80), (["--resume"], 200)):
        enough = functools.partial(has_lines, items, least)
        with CommandProcess("eval", *words, *resume) as process:
            process.wait_until(enough, "the items", timeout=240)
            process.process.kill()
        kept = lines(items)
        assert least <= len(kept) < ITEMS and not out.exists()
        with items.open("a") as file:
            file.write('{"side": "pol')
    done = rl_vlm("eval", *words, "--resume", timeout=300)
    assert done.returncode == 0, done.stderr
    results, found = json.loads(out.read_text()), lines(items)
    assert results["asked"] == ITEMS - len(kept) and results["lost"] == 0
    assert sorted(line["index"] for line in found) == list(range(ITEMS))
    assert found[: len(kept)] == kept
    assert results["accuracy/default"] == pytest.approx(sum(line["correct"] for line in found) / ITEMS)


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
