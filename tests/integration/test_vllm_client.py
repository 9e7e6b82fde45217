"""`vllm bench serve`, the load generator that users of vLLM's server have, runs unchanged against ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_support import EngineBackend, Server, serving, tiny_engine

pytestmark = pytest.mark.timeout(400)

# The entry point asks for the version of a distribution `vllm`, which the build for CPUs is not called.
CLIENT = """
import importlib.metadata as metadata, sys
version = metadata.version
def known(name):
    try:
        return version(name)
    except metadata.PackageNotFoundError:
        return version(name + "-cpu")
metadata.version = known
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    sys.argv[0] = "vllm"
    main()
"""
REQUESTS, TOKENS = 6, 20


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[Server]:
    with tiny_engine(tiny_folder) as engine, serving(EngineBackend(engine), tiny_folder) as server:
        yield server


@pytest.mark.acceptance
def test_its_chat_requests_with_random_images_all_succeed(server: Server, tiny_folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    arguments = [
        "bench", "serve", "--backend", "openai-chat", "--base-url", server.url, "--endpoint", "/v1/chat/completions",
        "--model", "tiny", "--tokenizer", str(tiny_folder), "--dataset-name", "random-mm", "--seed", "1",
        "--num-prompts", str(REQUESTS), "--random-input-len", "24", "--random-output-len", str(TOKENS),
        "--random-mm-base-items-per-request", "1", "--random-mm-num-mm-items-range-ratio", "0",
        "--random-mm-limit-mm-per-prompt", '{"image": 1, "video": 0}',
        "--random-mm-bucket-config", "{(64, 96, 1): 1.0}",
        "--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json", "--ignore-eos",
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": ""}
    # Under the other name vLLM does not know itself as the build for CPUs, and loads kernels that not every CPU can run.
    environment["VLLM_TARGET_DEVICE"] = "cpu"
    done = subprocess.run(
        [sys.executable, str(script), *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    assert result["total_output_tokens"] == REQUESTS * TOKENS  # ignore_eos was kept to
