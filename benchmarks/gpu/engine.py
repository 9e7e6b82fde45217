"""The transformers engine on this GPU: tokens per second, its gap to the learner, and an adapter's way into it.

    python benchmarks/gpu/engine.py [--size 2b] [--out FILE]

Random weights of the published shapes, bfloat16, LoRA of rank 32. The gap is |log-probability of the engine minus
that of the learner| per sampled token, before the first and after ten optimiser steps. The adapter of 8b has 349 MB.
`--size tiny` tries the same code on a CPU in seconds; there the learner beside the engine is a thread instead of a
process.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Report, arguments, device_of, full_batch, make_policy, picture, random_weights, run_config, scratch

from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.learning.optimizer import make_optimizer
from rl_vlm.learning.plan import UpdateStats
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.strategies import Strategy
from rl_vlm.learning.update import PolicyUpdater
from rl_vlm.models.lora import lora_factors
from rl_vlm.types import Completion, GenerationRequest, Message, SamplingParams, Trajectory, TrajectoryStatus, Turn

_START_S = 240.0  # until the learning process has done its first step
_STOP_S = 30.0


class Bench:
    """An engine and a learner of the same model on one device."""

    def __init__(self, report: Report, folder: Path, size: str, device: str) -> None:
        self.report, self.folder, self.device, self.small = report, folder, device, size == "tiny"
        self.rows = (1, 4) if self.small else (1, 8, 64, 256)
        self.new, self.side = (8, 64) if self.small else (64, 224)
        self.tokens = 256 if self.small else 8192
        self.engine = TransformersEngine(
            folder, dtype="bfloat16", device=device, max_context=1024, num_threads=1 if self.small else None
        )
        self.run = run_config(
            folder, "bfloat16", learner__micro_batch_tokens=self.tokens, serving__max_context=self.tokens // 2,
            learner__checkpoint="all",
        )  # fmt: skip
        self.policy: PolicyModel = make_policy(folder, self.run, device)
        self.updater = PolicyUpdater(self.policy, self.run)
        self.version = 0

    def generate(self, rows: int, seed: int = 0) -> list[Completion]:
        """That many samples, of one prompt with one image per eight."""
        rng = np.random.default_rng(seed)
        requests = []
        for number in range(max(rows // 8, 1)):
            count = min(rows, 8)
            image = picture(rng, self.side, self.side)
            span = self.policy.text.codec.encode_prompt([Message.of("user", image, "1 2 3")])
            sampling = SamplingParams(self.new, n=count, seeds=tuple(range(count)), ignore_eos=True)
            requests.append(
                GenerationRequest(f"{seed}-{number}", span.token_ids, sampling, span.images, min_version=self.version)
            )
        answers = asyncio.run(_answers(self.engine, requests))
        self.images = [request.images for request in requests]
        return answers

    def decode_rate(self, rows: int, repeats: int) -> tuple[float, int]:
        """(new tokens per second, new tokens), after one round that is not counted."""
        self.generate(rows)
        started, tokens = time.perf_counter(), 0
        for _ in range(repeats):
            tokens += sum(len(sample.token_ids) for answer in self.generate(rows) for sample in answer.samples)
        return tokens / (time.perf_counter() - started), tokens

    # --- the measurements

    def decoding(self) -> None:
        """Tokens per second by the number of samples at once."""
        for rows in self.rows:
            with self.report.measured(f"decode {rows}"):
                if self.device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                rate, _ = self.decode_rate(rows, 1 if self.small else 3)
                peak = torch.cuda.max_memory_allocated() / 2**30 if self.device == "cuda" else None
                self.report.add(f"decode {rows}", tokens_per_s=rate, rows=rows, peak_gib=peak)

    def adapter(self) -> None:
        """Seconds to build, check, read and load a version of the adapter."""
        with self.report.measured("adapter"):
            started = time.perf_counter()
            payload = self.policy.payload(self.version + 1)
            built = time.perf_counter()
            payload.verify()
            hashed = time.perf_counter()
            shapes = {
                name: (module.out_features, module.in_features)
                for name, module in self.engine.backbone.model.named_modules()
                if isinstance(module, torch.nn.Linear)
            }
            read = len(lora_factors(payload, shapes))
            parsed = time.perf_counter()
            asyncio.run(self.engine.load_adapter(payload))
            self.version += 1
            self.report.add(
                "adapter", build_s=built - started, hash_s=hashed - built, read_s=parsed - hashed,
                load_s=time.perf_counter() - parsed, bytes=len(payload.tensors), layers=read,
            )  # fmt: skip

    def gap(self) -> None:
        """Engine against learner, before and after ten steps on what the engine has not seen."""
        with self.report.measured("gap"):
            optimizer = make_optimizer(self.policy, self.run)
            for group in optimizer.param_groups:
                group["lr"] = 1e-4
            strategy = Strategy(self.policy, optimizer)
            self.report.add("gap before", **self._gap())
            batch = full_batch(self.policy.text, self.tokens, self.side, samples=4 if self.small else 8)
            for _ in range(10):
                (packed,) = self.updater.pack(batch)
                assert self.updater.step(strategy, packed, 1.0, UpdateStats())
            asyncio.run(self.engine.load_adapter(self.policy.payload(self.version + 1)))
            self.version += 1
            self.report.add("gap after ten steps", **self._gap())

    def _gap(self) -> dict[str, float]:
        answers = self.generate(self.rows[-1] if self.small else 64, seed=9)
        found = [
            one for answer, images in zip(answers, self.images, strict=True) for one in _trajectories(answer, images)
        ]
        learner = np.concatenate(self.updater.recompute(found))
        engine = np.concatenate([one.logprobs[one.loss_mask] for one in found])
        gap = np.abs(learner - engine)
        return {
            "mean_nats": float(gap.mean()),
            "max_nats": float(gap.max()),
            # NeMo-RL's figure, whose median its CI holds below 1.05.
            "token_mult_prob_error": float(np.exp(gap).mean()),
            "tokens": len(gap),
        }

    def beside_a_learner(self) -> None:
        """Decoding while another process takes optimiser steps on the same device, and what those take."""
        rows = self.rows[-1] if self.small else 64
        with self.report.measured("decode beside a learner"):
            repeats = 1 if self.small else 5
            alone, _ = self.decode_rate(rows, repeats)
            with _learning(self) as steps:
                before, started = steps(), time.perf_counter()
                beside, _ = self.decode_rate(rows, repeats)
                rate = (steps() - before) / (time.perf_counter() - started)
            self.report.add(
                "decode beside a learner", tokens_per_s=beside, alone_tokens_per_s=alone, ratio=beside / alone,
                learner_steps_per_s=rate, rows=rows,
            )  # fmt: skip


async def _answers(engine: TransformersEngine, requests: list[GenerationRequest]) -> list[Completion]:
    return await engine.generate(requests)


def _trajectories(answer: Completion, images: tuple[Any, ...]) -> Iterator[Trajectory]:
    """The samples of a completion as the learner takes them."""
    prompt = len(answer.prompt_ids)
    for number, sample in enumerate(answer.samples):
        ids = np.concatenate([answer.prompt_ids, sample.token_ids]).astype(np.int32)
        mask = np.arange(len(ids)) >= prompt
        logprobs = np.concatenate([np.zeros(prompt, dtype=np.float32), sample.logprobs]).astype(np.float32)
        turn = Turn(prompt, len(ids), answer.policy_version, sample.stop_reason, 0.0)
        name = f"{answer.request_id}-{number}"
        yield Trajectory(name, ids, mask, logprobs, (turn,), TrajectoryStatus.COMPLETED, images).check()


def learn_until(stop: Any, steps: Any, folder: Path, tokens: int, side: int, device: str) -> None:
    """Optimiser steps on one batch until `stop` is set; `steps` counts them."""
    with random_weights():
        run = run_config(
            folder, "bfloat16", learner__micro_batch_tokens=tokens, serving__max_context=tokens // 2,
            learner__checkpoint="all",
        )  # fmt: skip
        policy = make_policy(folder, run, device)
    updater, strategy = PolicyUpdater(policy, run), Strategy(policy, make_optimizer(policy, run))
    (packed,) = updater.pack(full_batch(policy.text, tokens, side, samples=4))
    while not stop.is_set():
        updater.step(strategy, packed, 1.0, UpdateStats())
        if device == "cuda":
            torch.cuda.synchronize()
        steps.value += 1


@contextmanager
def _learning(bench: Bench) -> Iterator[Any]:
    """While another process (or thread, at the tiny size) learns on the device: a function that counts its steps."""
    context = multiprocessing.get_context("spawn")
    stop, steps = context.Event(), context.Value("q", 0)
    given = (stop, steps, bench.folder, bench.tokens, bench.side, bench.device)
    kind: Any = threading.Thread if bench.small else context.Process
    worker = kind(target=learn_until, args=given, daemon=True)
    worker.start()
    try:
        deadline = time.monotonic() + _START_S
        while not steps.value:
            if not worker.is_alive() or time.monotonic() > deadline:
                raise RuntimeError("The learner beside the engine did not take its first step.")
            time.sleep(0.05)
        yield lambda: steps.value
    finally:
        stop.set()
        worker.join(_STOP_S)
        if worker.is_alive() and not bench.small:
            worker.kill()


def main(arguments_given: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    args = arguments(__doc__, "2b").parse_args(arguments_given)
    device = device_of(args.size)
    report = Report("engine", args.size, device)
    with scratch(args.size) as folder:
        bench = Bench(report, folder, args.size, device)
        try:
            bench.decoding()
            bench.adapter()
            bench.gap()
            bench.beside_a_learner()
        finally:
            asyncio.run(bench.engine.close())
    return report.finish(args.out)


if __name__ == "__main__":
    sys.exit(main())
