"""Plan, train, export and serve at the published widths of Qwen3-VL-2B, four layers of them, in bfloat16, with its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from real_shapes import build
from runs import ROOT, ServeProcess, finished, rl_vlm

TRAINING = (
    "model.dtype=bfloat16", "serving.num_replicas=1", "rollout.num_env_runners=1", "rollout.prompts_per_iteration=2",
    "rollout.group_size=2", "rollout.max_new_tokens_per_turn=4", "algorithm.iterations=1", "algorithm.minibatches=1",
    "evaluation.num_items=2", "evaluation.every=1",
)  # fmt: skip


@pytest.mark.acceptance
@pytest.mark.timeout(1800)
def test_a_model_of_true_widths(tmp_path: Path) -> None:
    published = json.loads((ROOT / "tests/fixtures/qwen3_vl.json").read_text())["2b"]
    text, settings = {**published["text_config"], "num_hidden_layers": 4}, {"tie_word_embeddings": True}
    folder = build(
        "qwen3_vl_published", tmp_path / "model", dtype="bfloat16", text=text, vision=published["vision_config"],
        settings=settings,
    )  # fmt: skip
    recipe, model = ROOT / "configs/geo3k_qwen3vl_2b.yaml", f"model.path={folder}"
    planned = rl_vlm("plan", recipe, model, "--gpu-gib", "24", "--json")
    assert planned.returncode == 0, planned.stderr
    run = finished(tmp_path / "run", model, *TRAINING, timeout=1200)
    assert run.result()["iterations"] == 1
    exported = rl_vlm("export", run.run_dir, tmp_path / "whole", timeout=300)
    assert exported.returncode == 0, exported.stderr
    assert json.loads((tmp_path / "whole/config.json").read_text())["text_config"]["hidden_size"] == 2048
    with ServeProcess(run.run_dir) as server:
        asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        reply = httpx.post(f"{server.url}/v1/chat/completions", json={**asked, "model": "policy"}, timeout=300)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] >= 1
