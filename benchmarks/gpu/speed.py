"""How fast is the learner on this GPU, and what does it hold? Random weights, bfloat16, LoRA of rank 32.

An update is one optimiser step over a micro-batch of 8,192 packed tokens with images. MFU counts what an update with
frozen weights needs: two products forward and two backward for every weight and token, the head at sampled positions
alone, and attention between tokens that see each other.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import free, full_batch, make_policy, picture, run_config, seconds
from report import Report, SkippedError

from rl_vlm.config import PolicyConfig
from rl_vlm.learning.logprobs import token_logprobs
from rl_vlm.learning.optimizer import make_optimizer
from rl_vlm.learning.plan import UpdateStats
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.strategies import Strategy
from rl_vlm.learning.update import PolicyUpdater
from rl_vlm.models.families.qwen_vl import patchify
from rl_vlm.models.memory.reading import read_shape
from rl_vlm.models.memory.shape import GIB, ModelShape, gib
from rl_vlm.models.modules import text_model
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


def planned_learner(run: PolicyConfig, shape: ModelShape) -> float:
    """GiB of torch's own at the learner's peak, by the memory plan."""
    (card,) = plan_memory(run, shape, None).cards
    (learner,) = (process for process in card.processes if process.kind == "learner")
    return sum(part.bytes for part in learner.parts if part.name != "CUDA context") / GIB


def peak_flops(device: str) -> float | None:
    """What the device can do at most, where it is known."""
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((value for key, value in _PEAK.items() if key in name), None)


def kind_of_kernel(name: str) -> str:
    """What a kernel computes, by its name: `products` of matrices, `attention`, or the `rest`."""
    if re.search("flash|fmha|attention", name, re.IGNORECASE):
        return "attention"
    return "products" if re.search(r"gemm|nvjet|xmma|cutlass|linear|::(add|b)?mm\b", name, re.IGNORECASE) else "rest"


class Bench:
    """The measurements of one size."""

    report: Report

    def __init__(self, folder: Path, size: str, device: str) -> None:
        self.folder, self.device, self.small = folder, device, size == "tiny"
        self.tokens, self.side = (256, 64) if self.small else (8192, 448)
        self.repeats = 1 if self.small else 3
        self.shape = read_shape(folder)

    def _update(self, **dotted: Any) -> Update:
        return Update(self.folder, self.device, self.tokens, self.side, **dotted)

    def _time(self, name: str, update: Update) -> None:
        """Time a step, its peak memory, and what the plan says of it."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        taken = seconds(update.step, self.device, self.repeats)
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else None
        best = peak_flops(self.device)
        self.report.add(
            name, seconds=taken, tokens_per_s=update.tokens / taken, tflops=update.flops(self.shape) / taken / 1e12,
            mfu=update.flops(self.shape) / taken / best if best else None, peak_gib=peak / GIB if peak else None,
            peak_gib_planned=planned_learner(update.run, self.shape), tokens=update.tokens,
        )  # fmt: skip

    # --- the measurements

    def checkpointing(self) -> None:
        """An update as recipes have it."""
        self._time("checkpointing", self._update(learner__checkpoint="all"))

    def no_checkpointing(self) -> None:
        """An update that keeps what its layers computed."""
        self._time("no checkpointing", self._update(learner__checkpoint="none"))

    def images_not_kept(self) -> None:
        """An update with more images than the cache holds: each step decodes them again."""
        self._time("images not kept", self._update(model__image_cache_mib=0))

    def compiled(self) -> None:
        """An update with torch.compile of each layer, which the learner does not use."""
        if self.device != "cuda":
            raise SkippedError("It needs a GPU: compiling for a CPU takes minutes.")
        update = self._update(learner__checkpoint="all")
        for layer in text_model(update.policy.model).layers:
            layer.compile()
        self._time("compiled", update)

    def profile(self) -> None:
        """Where an update's time goes: matrix products, attention, the rest; and how long the device computes."""
        update = self._update(learner__checkpoint="all")
        taken, gpu = seconds(update.step, self.device, 1), self.device == "cuda"
        kinds = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if gpu else [])]) as profile:
            update.step()
            if gpu:
                torch.cuda.synchronize()
        busy: Counter[str] = Counter()
        for event in profile.key_averages():
            if not gpu or event.device_type == torch.autograd.DeviceType.CUDA:
                busy[kind_of_kernel(event.key)] += event.self_device_time_total if gpu else event.self_cpu_time_total
        total = sum(busy.values())
        shares = {kind: busy[kind] / total for kind in ("products", "attention", "rest")}
        self.report.add("profile", step_s=taken, busy_s=total / 1e6, **shares)

    def head(self) -> None:
        """Log-probabilities of sampled tokens, forward and backward."""
        backbone, rows, width = self._update().policy.backbone, self.tokens // 2, self.shape.text.hidden
        hidden = torch.randn(rows, width, device=self.device, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.randint(0, 200, (rows,), device=self.device)
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if self.device == "cuda" else 0

        def work() -> None:
            token_logprobs(backbone, hidden, targets, 1.0)[0].sum().backward()

        taken = seconds(work, self.device, self.repeats)
        peak = (torch.cuda.max_memory_allocated() - before) / GIB if self.device == "cuda" else None
        self.report.add("head", seconds=taken, rows=rows, peak_gib=peak)

    def images(self) -> None:
        """Milliseconds per image: decoding and cutting it on the CPU, and a pass of the tower."""
        backbone, rng = self._update().policy.backbone, np.random.default_rng(0)
        found = [picture(rng, self.side, self.side) for _ in range(2 if self.small else 32)]
        cut = seconds(lambda: [patchify(backbone.images, image) for image in found], self.device, self.repeats)

        def encode() -> None:
            backbone.forget_images()
            backbone.image_features(found)

        taken = seconds(encode, self.device, self.repeats)
        each = 1000 / len(found)
        self.report.add("images", png_ms=cut * each, png_and_tower_ms=taken * each, pixels=self.side**2)

    def cards(self) -> None:
        """Whether an update fits into the memory of smaller cards, and what the plan says of it."""
        if self.device != "cuda":
            raise SkippedError("It needs a GPU.")
        whole = torch.cuda.get_device_properties(0).total_memory
        for sold, reported in _CARDS.items():
            if gib(reported) > whole:
                continue
            torch.cuda.set_per_process_memory_fraction(gib(reported) / whole)
            try:
                self._time(f"a card of {sold} GB", self._update(learner__checkpoint="all"))
            except torch.OutOfMemoryError:  # a figure, not a failure
                self.report.add(f"a card of {sold} GB", fits=False)
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)
            free()
