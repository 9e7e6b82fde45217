"""How fast is the learner on this GPU, and what does it hold? Random weights, bfloat16, LoRA of rank 32.

    python benchmarks/gpu/speed.py [--size 4b] [--out FILE]

An update is one optimiser step over a micro-batch of 8,192 packed tokens with images. MFU counts what an update with
frozen weights needs: two products forward and two backward for every weight and token, the head at sampled positions
alone, and attention between tokens that see each other. Without --size: 2b, 4b, 8b, in the published shapes. `--size
tiny` tries the same code on a CPU in seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Report, arguments, device_of, free, full_batch, make_policy, picture, run_config, scratch, seconds

from rl_vlm.learning.logprobs import token_logprobs
from rl_vlm.learning.optimizer import make_optimizer
from rl_vlm.learning.plan import UpdateStats
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.strategies import Strategy
from rl_vlm.learning.update import PolicyUpdater
from rl_vlm.models.families.qwen_vl import patchify
from rl_vlm.models.memory.reading import read_shape
from rl_vlm.models.memory.shape import ModelShape, gib
from rl_vlm.runs.memory_plan import plan_memory

_PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}  # bf16 FLOP/s, dense
_CARDS = {24: 23.6, 48: 47.4, 80: 79.15}  # GiB: as sold, as reported


class Update:
    """One policy and one packed minibatch, and the step on it."""

    def __init__(self, folder: Path, device: str, tokens: int, side: int, **dotted: Any) -> None:
        run = run_config(
            folder, "bfloat16", learner__micro_batch_tokens=tokens, serving__max_context=tokens // 2, **dotted
        )
        self.run, self.device = run, device
        self.policy: PolicyModel = make_policy(folder, run, device)
        self.updater = PolicyUpdater(self.policy, run)
        self.strategy = Strategy(self.policy, make_optimizer(self.policy, run))
        self.packed = self.updater.pack(full_batch(self.policy.text, tokens, side))[0]

    @property
    def tokens(self) -> int:
        """Packed tokens, padding left out."""
        return sum(int((micro.segments >= 0).sum()) for micro in self.packed)

    def step(self) -> None:
        """One optimiser step."""
        assert self.updater.step(self.strategy, self.packed, 1.0, UpdateStats())

    def flops(self, shape: ModelShape) -> float:
        """Of one step, as the module's docstring counts them."""
        text, total = shape.text, 0.0
        active = text.linear_parameters
        for micro in self.packed:
            lengths = (micro.segments >= 0).sum(1).astype(float)
            total += 4 * active * lengths.sum() + 4 * text.embedding * len(micro.target)
            # Scores and their product with the values for each seen pair, once forward and twice backward.
            pairs = sum(_seen_pairs(row) for row in micro.segments)
            total += 12 * text.layers * text.heads * text.head_dim * pairs
        return total


def _seen_pairs(segments: np.ndarray) -> float:
    """Pairs of a packed row that see each other: within the prompt, and each continuation with prompt and itself."""
    lengths = np.bincount(segments[segments >= 0]).astype(float)
    return float((lengths**2).sum() / 2 + lengths[0] * lengths[1:].sum())


@contextmanager
def an_update(*given: Any, **dotted: Any) -> Iterator[Update]:
    """An update that leaves nothing on the device."""
    update = Update(*given, **dotted)
    try:
        yield update
    finally:
        del update.policy, update.updater, update.strategy, update.packed
        free()


def peak_flops(device: str) -> float | None:
    """What the device can do at most, where it is known."""
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((value for key, value in _PEAK.items() if key in name), None)


class Speed:
    """The measurements of one size."""

    def __init__(self, report: Report, folder: Path, size: str, device: str) -> None:
        self.report, self.folder, self.device, self.size = report, folder, device, size
        self.tokens, self.side = (256, 64) if size == "tiny" else (8192, 448)
        self.repeats = 1 if size == "tiny" else 3
        self.shape = read_shape(folder)

    def update(self, name: str, **dotted: Any) -> None:
        """Time a step, its peak memory, and what the plan says of it."""
        with (
            self.report.measured(f"{self.size} {name}"),
            an_update(self.folder, self.device, self.tokens, self.side, **dotted) as update,
        ):
            if self.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            taken = seconds(update.step, self.device, self.repeats)
            peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else None
            best = peak_flops(self.device)
            learner = next(
                process
                for card in plan_memory(update.run, self.shape, None).cards
                for process in card.processes
                if process.kind == "learner"
            )
            planned = sum(part.bytes for part in learner.parts if part.name != "CUDA context")
            self.report.add(
                f"{self.size} {name}", seconds=taken, tokens_per_s=update.tokens / taken,
                tflops=update.flops(self.shape) / taken / 1e12,
                mfu=update.flops(self.shape) / taken / best if best else None, peak_gib=peak / 2**30 if peak else None,
                planned_gib=planned / 2**30, tokens=update.tokens,
            )  # fmt: skip

    def updates(self) -> None:
        """The update as it is, and with one thing changed at a time."""
        self.update("update", learner__checkpoint="all")
        self.update("update, no checkpointing", learner__checkpoint="none")
        # More images than the cache holds: each step decodes them again.
        self.update("update, images not kept", model__image_cache_mib=0)

    def head(self) -> None:
        """Log-probabilities of sampled tokens, forward and backward."""
        with (
            self.report.measured(f"{self.size} head"),
            an_update(self.folder, self.device, self.tokens, self.side) as update,
        ):
            backbone, rows, width = update.policy.backbone, self.tokens // 2, self.shape.text.hidden
            hidden = torch.randn(rows, width, device=self.device, dtype=torch.bfloat16, requires_grad=True)
            targets = torch.randint(0, 200, (rows,), device=self.device)
            if self.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if self.device == "cuda" else 0

            def work() -> None:
                token_logprobs(backbone, hidden, targets, 1.0)[0].sum().backward()

            taken = seconds(work, self.device, self.repeats)
            peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if self.device == "cuda" else None
            self.report.add(f"{self.size} head", seconds=taken, rows=rows, peak_gib=peak)

    def images(self) -> None:
        """Milliseconds per image: decoding and cutting it on the CPU, and a pass of the tower."""
        with (
            self.report.measured(f"{self.size} images"),
            an_update(self.folder, self.device, self.tokens, self.side) as update,
        ):
            backbone, rng = update.policy.backbone, np.random.default_rng(0)
            found = [picture(rng, self.side, self.side) for _ in range(2 if self.size == "tiny" else 32)]
            cut = seconds(lambda: [patchify(backbone.images, image) for image in found], self.device, self.repeats)

            def encode() -> None:
                backbone.forget_images()
                backbone.image_features(found)

            taken = seconds(encode, self.device, self.repeats)
            each = 1000 / len(found)
            self.report.add(
                f"{self.size} images", png_ms=cut * each, png_and_tower_ms=taken * each, pixels=self.side**2
            )

    def cards(self) -> None:
        """Whether an update fits into the memory of smaller cards, and what the plan says of it."""
        whole = torch.cuda.get_device_properties(0).total_memory
        for sold, reported in _CARDS.items():
            if gib(reported) > whole:
                continue
            torch.cuda.set_per_process_memory_fraction(gib(reported) / whole)
            try:
                self.update(f"update, a card of {sold} GB", learner__checkpoint="all")
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)


def main(arguments_given: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    args = arguments(__doc__, "").parse_args(arguments_given)
    chosen = [args.size] if args.size else ["2b", "4b", "8b"]
    device = device_of(chosen[0])
    report = Report("speed", ", ".join(chosen), device)
    for size in chosen:
        with scratch(size) as folder:
            speed = Speed(report, folder, size, device)
            speed.updates()
            speed.head()
            speed.images()
            if device == "cuda":
                speed.cards()
    # A card that is too small for a size is a figure.
    report.failed = [name for name in report.failed if "a card of" not in name]
    return report.finish(args.out)


if __name__ == "__main__":
    sys.exit(main())
