"""What `serving.vllm.rest_while_learning` frees on one GPU, how long it takes, and whether answers stay the same.

    python benchmarks/gpu_resting.py [--size 2b] [--rounds 5] [--out FILE]

vLLM's engine with random weights answers, rests, and lets this process allocate nine tenths of what it freed, as a learner would; then
it wakes and answers again. Exits with code 1 where less than nine tenths of its keys and values were freed, or where
greedy answers changed. `--size 6m --cpu` tries the same calls on a machine without a GPU, which frees nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from models import SHAPES, random_model
from report import Report
from serving_contender import Prompts

from rl_vlm.config import load_config
from rl_vlm.models.loading import load_text_side
from rl_vlm.serving.replica import build_engine
from rl_vlm.types import GenerationRequest

HERE = Path(__file__).parent
REQUESTS, KEYS_AND_VALUES_GIB = 8, 4
# The plan's share of a shared GPU is not what is measured here, so the bytes are given.
_GPU = (
    "model.dtype=bfloat16", "serving.gpus_per_replica=0.5", "learner.gpus_per_learner=0.5", "learner.num_learners=1",
    f"serving.vllm.gpu_kv_cache_gib={KEYS_AND_VALUES_GIB}",
)  # fmt: skip


def free_bytes() -> int:
    """Of the GPU, as the driver says; 0 without one."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


async def greedy_tokens(engine: Any, requests: Sequence[GenerationRequest]) -> list[list[int]]:
    """Of each sample."""
    return [sample.token_ids.tolist() for answer in await engine.generate(requests) for sample in answer.samples]


async def rounds_of(engine: Any, prompts: Prompts, count: int, report: Report) -> list[str]:
    """Rest and wake `count` times; returns what is wrong."""
    requests, faults = prompts.take(REQUESTS), []
    expected = await greedy_tokens(engine, requests)
    seconds: dict[str, list[float]] = {"rest": [], "wake": []}
    freed = []
    for _ in range(count):
        before, started = free_bytes(), time.perf_counter()
        await engine.sleep()
        seconds["rest"].append(time.perf_counter() - started)
        freed.append(free_bytes() - before)
        if torch.cuda.is_available():
            update = torch.empty(freed[-1] * 9 // 10, dtype=torch.uint8, device="cuda")
            del update
            torch.cuda.empty_cache()
        started = time.perf_counter()
        await engine.wake()
        seconds["wake"].append(time.perf_counter() - started)
        found = await greedy_tokens(engine, requests)
        if found != expected:
            changed = sum(one != other for one, other in zip(found, expected, strict=True))
            faults.append(f"answers changed: {changed} of {len(found)}")
    for name, values in seconds.items():
        report.add(name, values)
    report.add("freed", [size / 2**30 for size in freed], unit="GiB")
    if torch.cuda.is_available() and min(freed) < 0.9 * KEYS_AND_VALUES_GIB * 2**30:
        faults.append(f"only {min(freed) / 2**30:.2f} of {KEYS_AND_VALUES_GIB} GiB were freed")
    return faults


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SHAPES), default="2b")
    parser.add_argument("--cpu", action="store_true", help="no GPU, float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write JSON here")
    args = parser.parse_args()
    report = Report(f"Resting between rounds, {args.size}, engine vllm")
    with tempfile.TemporaryDirectory(prefix="rl-vlm-bench-") as scratch:
        place = {} if args.cpu else {"device": "cuda", "dtype": "bfloat16"}
        folder = random_model(Path(scratch) / "model", max_pixels=512 * 512, **place, **SHAPES[args.size])
        settings = (
            f"model.path={folder}", "serving.engine=vllm", "serving.num_replicas=1", "serving.max_context=512",
            "serving.vllm.rest_while_learning=true",
        )  # fmt: skip
        run = load_config(HERE.parent / "configs" / "quickstart.yaml", [*settings, *(() if args.cpu else _GPU)])
        engine = build_engine(folder, run)
        try:
            faults = asyncio.run(rounds_of(engine, Prompts(load_text_side(folder)), args.rounds, report))
        finally:
            asyncio.run(engine.close())
    report.finish(args.out)
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
