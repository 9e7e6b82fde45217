"""What labelling costs beside the engine's own time: 40 pairs in one session, in this process and through Ray Serve.

    python benchmarks/labels.py [--quick] [--out FILE]

The engine's own time is one call with the same requests (two calls where a label takes two steps), pictures encoded
beforehand. The labeller's time is all of a session: encoding pictures, prompts, requests, reading and combining answers.
Interleaved, with two models: the tiny labeller, which needs half a millisecond for a question about two pictures of 64², so
that overheads weigh more than with any other model, and a random one of 6 M parameters with pictures of 224².
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import numpy as np
import ray
from models import SIX_MILLION, random_model
from report import Report

from rl_vlm.asking.endpoints import Client, EngineClient, ServedEndpoint
from rl_vlm.config import LabelsSection, parse_config
from rl_vlm.control_envs.cartpole_drawing import draw_cartpole
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.labelling.labeller import VLMLabeller
from rl_vlm.labelling.prompts import task_prompts
from rl_vlm.labelling.types import Segment, SegmentPair
from rl_vlm.models.loading import load_text_side, resolve_model
from rl_vlm.models.reference import ModelReference
from rl_vlm.serving.client import PolicyClient
from rl_vlm.serving.service import PolicyService
from rl_vlm.types import Completion, GenerationRequest

PAIRS = 40
LIMIT = 1.3
PICTURES = {"tiny labeller": 64, "6 M parameters": 224}  # pixels a side
CASES = {
    "one step": LabelsSection(steps=1),
    "two steps": LabelsSection(steps=2, describe_tokens=32),
}


class Recorder:
    """A client that keeps the requests of a session, step by step."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.first: list[GenerationRequest] = []
        self.second: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> Completion:
        """Keep and pass on."""
        (self.first if request.images else self.second).append(request)
        return await self._client.generate(request)


def random_pairs(seed: int, size: int) -> list[SegmentPair]:
    """Pairs that were not shown before: neither side may live on the engine's cache of pictures."""
    angles = np.random.default_rng(seed).uniform(-math.pi / 6, math.pi / 6, (PAIRS, 2))

    def segment(angle: float) -> Segment:
        empty = np.zeros((1, 1), np.float32)
        return Segment(empty, empty, np.zeros(1, np.float32), draw_cartpole(angle, size)[None])

    return [SegmentPair(segment(first), segment(second)) for first, second in angles]


async def timed(work: Awaitable[Any]) -> float:
    """Seconds that it took."""
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


async def measure(
    report: Report, name: str, model: Path, engine: TransformersEngine, client: Client, rounds: int
) -> None:
    """All cases with one model, interleaved."""
    other = TransformersEngine(model)
    text = load_text_side(model)
    prompts = task_prompts("cartpole-tiny")
    size = PICTURES[name]
    seed = 0
    for case, options in CASES.items():
        own: list[float] = []
        inside: list[float] = []
        served: list[float] = []
        for number in range(rounds + 1):
            labellers = {}
            for way, answerer in (("inside", EngineClient(engine)), ("served", client)):
                labellers[way] = VLMLabeller(ServedEndpoint(answerer, text), prompts, options)
            seed += 1
            # Recorded elsewhere: the engine that is measured has not seen these pictures before.
            recorder = Recorder(EngineClient(other))
            await VLMLabeller(ServedEndpoint(recorder, text), prompts, options).label(random_pairs(seed, size))
            seconds = await timed(engine.generate(recorder.first))
            if recorder.second:
                seconds += await timed(engine.generate(recorder.second))
            took: dict[str, float] = {}
            for place, (way, labeller) in enumerate(labellers.items()):
                took[way] = await timed(labeller.label(random_pairs(seed + 100_000 * (place + 1), size)))
            if number:  # the first round warms everything up
                own.append(seconds)
                inside.append(took["inside"])
                served.append(took["served"])
        label = f"{name}, {case}"
        report.add(f"{label}: engine's own time", own)
        report.add(f"{label}: labeller, engine in this process", inside)
        report.add(f"{label}: labeller through Serve", served)
        base = statistics.median(own)
        report.ratios[f"limit / ours, {label}, in this process"] = LIMIT * base / statistics.median(inside)
        report.ratios[f"limit / ours, {label}, through Serve"] = LIMIT * base / statistics.median(served)
    await other.close()


def run_model(report: Report, name: str, model: Path, rounds: int) -> None:
    """Measure with one model, served and in this process."""
    settings = {"num_replicas": 1, "cpus_per_replica": 1, "engine": "transformers"}
    run = parse_config({"model": {"path": str(model)}, "serving": settings})
    engine = TransformersEngine(model, max_context=run.serving.max_context)
    service = PolicyService(run, "label-benchmark", ModelReference.of(str(model)))
    try:
        service.wait_until_ready()

        async def everything() -> None:
            client = PolicyClient("label-benchmark", deadline_s=300.0, homes=(0,))
            await measure(report, name, model, engine, client, rounds)
            await engine.close()

        asyncio.run(everything())
    finally:
        service.stop()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the tiny labeller only, 3 rounds instead of 15")
    parser.add_argument("--out", type=Path, help="write JSON here")
    args = parser.parse_args()
    report = Report(f"Labels of {PAIRS} pairs, both orders")
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        run_model(report, "tiny labeller", resolve_model("tiny-labeller"), 3 if args.quick else 15)
        if not args.quick:
            with tempfile.TemporaryDirectory(prefix="rl-vlm-bench-") as scratch:
                large = random_model(Path(scratch) / "model", max_pixels=512 * 512, **SIX_MILLION)
                run_model(report, "6 M parameters", large, 5)
    finally:
        ray.shutdown()
    report.finish(args.out)


if __name__ == "__main__":
    main()
