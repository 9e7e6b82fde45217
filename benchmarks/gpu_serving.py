"""Tokens per second of Qwen3-VL-2B and -4B on one GPU: the same contenders as `serving.py`, random weights, no hub.

    python benchmarks/gpu_serving.py [--size 2b] [--engine vllm] [--quick] [--out FILE]

bfloat16, prompts of 116 tokens with one new 224² image, 64 new tokens, greedy; 1, 8, 32, 64 and 256 requests at a time. The
contenders share the card, so each engine takes a fifth of its memory: 16 GiB must be left for each at 4B. `--size 6m --cpu`
tries the same code on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from models import SHAPES, random_model
from report import Report
from serving import Setup, measure

_GPU = ("model.dtype=bfloat16", "serving.gpus_per_replica=1", "serving.vllm.gpu_memory_utilization=0.2")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("2b", "4b", "6m"), action="append", help="2b and 4b by default")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="vllm")
    parser.add_argument("--cpu", action="store_true", help="no GPU, float32")
    parser.add_argument("--quick", action="store_true", help="our own contenders at 8 and 32 requests only")
    parser.add_argument("--out", type=Path, help="write JSON here; the size is added to its name")
    args = parser.parse_args()
    how: dict[str, Any] = {"counts": (1, 8, 32, 64, 256)}
    if args.quick:
        how = {"counts": (8, 32), "rounds": 2, "kinds": ("raw", "handle", "http")}
    for size in args.size or ("2b", "4b"):
        report = Report(f"Serving Qwen3-VL-{size.upper()}, engine {args.engine}")
        with tempfile.TemporaryDirectory(prefix="rl-vlm-bench-") as scratch:
            place = {} if args.cpu else {"device": "cuda", "dtype": "bfloat16"}
            folder = random_model(Path(scratch) / "model", max_pixels=512 * 512, **place, **SHAPES[size])
            measure(Setup(folder, args.engine, () if args.cpu else _GPU, **how), report)
        report.finish(args.out.with_stem(f"{args.out.stem}-{size}") if args.out else None)


if __name__ == "__main__":
    main()
