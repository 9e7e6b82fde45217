"""Does the learner compute the right thing on this GPU? Each check compares values with their thresholds."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    conversation,
    free,
    group,
    make_policy,
    one_step,
    picture,
    run_config,
)  # fmt: skip
from report import Report

from rl_vlm.config import PolicyConfig
from rl_vlm.learning.optimizer import make_optimizer
from rl_vlm.learning.plan import UpdateBatch, UpdateStats
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.strategies import Strategy
from rl_vlm.learning.update import PolicyUpdater
from rl_vlm.models.attention import SegmentLayout, segment_attention
from rl_vlm.models.families.qwen_vl import patchify
from rl_vlm.types import Trajectory

Gaps = Iterator[tuple[str, float, float]]  # name, value, threshold


class Bench:
    """The checks, each a generator of values and the thresholds that they must not exceed."""

    report: Report

    def __init__(self, folder: Path, size: str, device: str) -> None:
        self.folder, self.device = folder, device
        self.small = size == "tiny"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # float32 is the reference
        self.sides = (64, 96) if self.small else (224, 448)
        self.words, self.reply = (6, 8) if self.small else (64, 128)

    def policy(self, dtype: str, **dotted: Any) -> tuple[PolicyModel, PolicyConfig]:
        run = run_config(self.folder, dtype, **dotted)
        return make_policy(self.folder, run, self.device), run

    def minibatch(self, policy: PolicyModel, samples: int = 4) -> UpdateBatch:
        rng = np.random.default_rng(3)
        images = [picture(rng, side, side) for side in self.sides]
        return one_step(
            [group(policy.text, [image], self.words, self.reply, samples, seed) for seed, image in enumerate(images)]
        )

    def trajectories(self, policy: PolicyModel, equal: bool) -> list[Trajectory]:
        rng = np.random.default_rng(5)
        low, high = self.sides
        shapes = [(low, low)] * 3 if equal else [(low, high), (high, high), (high, low)]
        images = [picture(rng, *shape) for shape in shapes]
        return [
            conversation(policy.text, rng, images[:2], self.words, self.reply, "two"),
            conversation(policy.text, rng, images[2:], self.words, self.reply, "one"),
        ]

    # --- the checks

    def versions(self) -> None:
        """What the other checks run on; the first to import torch and transformers."""
        gpu = self.device == "cuda"
        self.report.add(
            "versions", python=platform.python_version(), cuda=torch.version.cuda if gpu else None,
            device=torch.cuda.get_device_name() if gpu else platform.processor() or platform.machine(),
            memory_gib=torch.cuda.get_device_properties(0).total_memory / 2**30 if gpu else None,
            **{name: version(name) for name in ("torch", "transformers", "peft", "pydantic")},
        )  # fmt: skip

    def backbone(self) -> Gaps:
        """Log-probabilities against transformers' plain forward pass: its own vision tower, positions and mask."""
        policy, run = self.policy("float32")
        updater = PolicyUpdater(policy, run)
        for name, equal in (("equal", True), ("mixed", False)):
            found = self.trajectories(policy, equal)
            ours = updater.recompute(found)
            gap = max(float(np.abs(a - self._plain(policy, one)).max()) for a, one in zip(ours, found, strict=True))
            yield f"backbone_{name}_images", gap, 2e-3

    @torch.no_grad()
    def _plain(self, policy: PolicyModel, one: Trajectory) -> np.ndarray:
        ids = torch.from_numpy(one.token_ids.astype(np.int64))[None].to(self.device)
        pixels, grids = zip(*(patchify(policy.text.images, image) for image in one.images), strict=True)
        logits = policy.model(
            input_ids=ids,
            pixel_values=torch.from_numpy(np.concatenate(pixels)).to(self.device),
            image_grid_thw=torch.tensor(grids, device=self.device),
            mm_token_type_ids=(ids == policy.model.config.image_token_id).int(),
            use_cache=False,
        ).logits[0]
        logits = logits[:-1].float() + policy.backbone.token_bias
        logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return logprobs.cpu().numpy()[one.loss_mask[1:]]

    def precision(self) -> Gaps:
        """bfloat16 against float32, same weights, in nats per token."""
        found = []
        for dtype, head in (("float32", "model"), ("bfloat16", "model"), ("bfloat16", "float32")):
            policy, run = self.policy(dtype, model__head_dtype=head)
            found.append(np.concatenate(PolicyUpdater(policy, run).recompute(self.trajectories(policy, False))))
            del policy
            free()
        for name, other in (("bf16_rms", found[1]), ("bf16_wide_head_rms", found[2])):
            yield name, float(np.sqrt(np.mean((found[0] - other) ** 2))), 0.05

    def wide_head(self) -> Gaps:
        """`model.head_dtype: float32` sums products of 16-bit numbers in float32; compared with float64."""
        policy, _ = self.policy("bfloat16", model__head_dtype="float32")
        weight = policy.backbone.lm_head.weight.detach()
        generator = torch.Generator(self.device).manual_seed(0)
        hidden = torch.randn(32, weight.shape[1], generator=generator, device=self.device).bfloat16().requires_grad_()
        logits = policy.backbone.logits(hidden)
        mixture = torch.randn(logits.shape, generator=generator, device=self.device)
        allowed = torch.isfinite(policy.backbone.token_bias)
        (logits * mixture)[:, allowed].sum().backward()
        exact = hidden.detach().double() @ weight.double().T
        slope = (mixture * allowed).double() @ weight.double()
        yield "wide_head", float((logits.detach() - exact)[:, allowed].abs().max() / exact.abs().max()), 1e-5
        assert hidden.grad is not None
        yield "wide_head_gradient", float((hidden.grad.double() - slope).norm() / slope.norm()), 0.01

    def packing(self) -> Gaps:
        """Samples that share a prompt in one row against a row each: losses and gradients in float32."""
        yield from self._two_ways("packed", "learner__share_prompts", 1e-3)

    def checkpointing(self) -> Gaps:
        """Layers computed again against layers that are kept."""
        yield from self._two_ways("checkpointing", "learner__checkpoint", 1e-4, ("all", "none"))

    def _two_ways(self, name: str, key: str, threshold: float, values: tuple[Any, Any] = (True, False)) -> Gaps:
        losses, gradients, tokens = [], [], []
        for value in values:
            policy, run = self.policy("float32", **{key: value})
            updater, stats = PolicyUpdater(policy, run), UpdateStats()
            (packed,) = updater.pack(self.minibatch(policy))
            for micro in packed:
                updater.loss(micro, stats).backward()
            tokens.append(sum(micro.input_ids.size for micro in packed))
            losses.append(stats["policy/token_logprob_mean"] / stats["tokens"])
            gradients.append(torch.cat([p.grad.reshape(-1) for p in policy.parameters if p.grad is not None]).cpu())
            del policy, updater, packed
            free()
        if key == "learner__share_prompts":  # else both ways would be one
            yield f"{name}_nothing", float(tokens[0] >= tokens[1]), 0.0
        yield f"{name}_logprob", abs(losses[0] - losses[1]), threshold
        yield f"{name}_gradient", float((gradients[0] - gradients[1]).norm() / gradients[1].norm()), threshold

    def first_ratio(self) -> Gaps:
        """The first ratios are exactly 1: the pass with a gradient gives what the one without gave."""
        policy, run = self.policy("bfloat16", learner__checkpoint="all")
        updater, stats = PolicyUpdater(policy, run), UpdateStats()
        (packed,) = updater.pack(self.minibatch(policy))
        for micro in packed:
            updater.loss(micro, stats)
        yield "first_ratio_error", stats["policy/first_ratio_error"], 0.0

    def kernels(self) -> Gaps:
        """Which kernels compute attention. The one called math, torch's last resort, writes out all scores."""
        for dtype in ("bfloat16", "float32"):
            policy, run = self.policy(dtype)
            updater = PolicyUpdater(policy, run)
            for length in (64, 128, 256) if self.small else (1024, 4096, 8192):
                rng = np.random.default_rng(length)
                image, samples = picture(rng, self.sides[0], self.sides[0]), 4
                each = (length - policy.text.images.count_tokens(image.width, image.height)) // (samples + 1)
                ((micro,),) = updater.pack(
                    one_step([group(policy.text, [image], each // 3, max(each - 64, 4), samples, 0)])
                )
                with (
                    torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
                    torch.no_grad(),
                ):
                    updater.logprobs(micro)
                names = {event.key.split("::")[-1] for event in profile.key_averages()}
                used = sorted(name for name in names if name.startswith(("_scaled_dot_product", "_varlen_attn")))
                print(f"  {dtype}, {length} tokens: {', '.join(used)}", flush=True)
                name = f"math_attention_{length}" + ("_float32" if dtype == "float32" else "")
                yield name, float(any("math" in name for name in used) or not used), 0.0
            del policy, updater
            free()

    def sequences(self) -> Gaps:
        """Packed rows as sequences of flash attention: outputs and gradients in bfloat16 against float32."""
        segments = np.full((2, 1000), -1)
        segments[0, :900] = np.repeat([0, 1, 2, 3], [300, 150, 200, 250])
        segments[1] = np.repeat([0, 1, 2], [200, 400, 400])
        layout, real = SegmentLayout.of(segments, self.device), torch.from_numpy(segments >= 0).to(self.device)
        generator = torch.Generator(self.device).manual_seed(0)
        drawn = [torch.randn(2, heads, 1000, 128, generator=generator, device=self.device) for heads in (32, 8, 8, 32)]
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            given = [tensor.to(dtype, copy=True).requires_grad_() for tensor in drawn[:3]]
            mixed = segment_attention(torch.nn.Module(), *given, None, segments=layout)[0]
            (mixed.float() * drawn[3].transpose(1, 2))[real].sum().backward()
            gradients = [tensor.grad.transpose(1, 2) for tensor in given if tensor.grad is not None]
            found.append([tensor.detach()[real].float() for tensor in (mixed, *gradients)])
        for name, exact, ours in zip(("output", "query", "key", "value"), *found, strict=True):
            yield f"sequences_{name}", float((ours - exact).norm() / exact.norm()), 0.01

    def moments(self) -> Gaps:
        """The optimiser's state goes to the CPU and back: the next step is the same, and the state is on the device."""
        policy, run = self.policy("bfloat16")
        updater, stats = PolicyUpdater(policy, run), UpdateStats()
        strategy = Strategy(policy, make_optimizer(policy, run))
        (packed,) = updater.pack(self.minibatch(policy))
        updater.step(strategy, packed, 1.0, stats)
        kept = [parameter.detach().clone() for parameter in policy.parameters]
        state = strategy.state()
        ends = []
        for restore in (False, True):
            with torch.no_grad():
                for parameter, value in zip(policy.parameters, kept, strict=True):
                    parameter.copy_(value)
            if restore:
                optimizer = make_optimizer(policy, run)
                strategy = Strategy(policy, optimizer)
                strategy.restore({name: tensor.clone() for name, tensor in state.items()})
                devices = {
                    value.device.type
                    for fields in optimizer.state.values()
                    for value in fields.values()
                    if torch.is_tensor(value)
                }
                yield "moments_elsewhere", float(devices != {self.device}), 0.0
            else:
                state = {name: tensor.clone() for name, tensor in state.items()}
            for parameter in policy.parameters:  # the same gradient both times
                parameter.grad = torch.full_like(parameter, 1e-3)
            strategy.step(1.0)
            ends.append(torch.cat([parameter.detach().reshape(-1).cpu() for parameter in policy.parameters]))
        yield "moments_restored", float((ends[0] - ends[1]).abs().max()), 0.0
