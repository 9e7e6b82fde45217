"""Runs where vLLM is installed; its command asks for a distribution `vllm`, which the build for CPUs is not called."""

import os
import subprocess
import sys

from cells import MODEL, URL, cell

from rl_vlm.zoo.tiny.model import tiny_model_path

START = """
import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
TOKENIZER = os.environ.get("CLIENT_TOKENIZER") or str(tiny_model_path(variant="wide" if "wide" in MODEL else "small"))
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PICTURES = [
    "--random-mm-base-items-per-request", "2", "--random-mm-limit-mm-per-prompt", '{"image": 3, "video": 0}',
    "--random-mm-bucket-config", "{(64, 64, 1): 0.5, (96, 64, 1): 0.5}",
]  # fmt: skip
RUNS = {
    "chat": ["--backend", "openai-chat", "--endpoint", CHAT, "--dataset-name", "random"],
    "completions": ["--backend", "openai", "--endpoint", TEXT, "--dataset-name", "random", "--logprobs", "1"],
    "chat, random-mm": ["--backend", "openai-chat", "--endpoint", CHAT, "--dataset-name", "random-mm", *PICTURES],
}
for name, arguments in RUNS.items():

    @cell(name, tries=1)
    def _():
        shared = [
            "--base-url", URL.removesuffix("/v1"), "--model", MODEL, "--tokenizer", TOKENIZER, "--num-prompts", "8",
            "--random-input-len", "32", "--random-output-len", "16", "--ignore-eos",
        ]  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", START, *shared, *arguments],
            env={**os.environ, "VLLM_NO_USAGE_STATS": "1"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        sys.stderr.write(done.stderr[-9000:])
        told = done.stdout.split()
        assert done.returncode == 0 and told[told.index("Successful") + 2] == "8", done.stdout[-500:]
