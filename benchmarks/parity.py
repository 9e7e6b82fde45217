"""Do engine and learner compute what transformers computes, for a family of models?

    python benchmarks/parity.py --family NAME [--folder MODEL] [--out FILE]

Prompts of 0, 1 and 2 images of several sizes, of one and two turns, are encoded, answered by the transformers engine
and scored by the learner. The reference is `AutoProcessor` and the model's plain forward pass. Without --folder a model
of the family's true form with random weights is built (tests/real_shapes). Exits with 1 where a cell of float32 is
beyond 1e-4. `--family all` prints the table of docs/models.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from rl_vlm.config import PolicyConfig, apply_overrides, parse_config
from rl_vlm.engines.base import Engine
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.engines.vllm_engine import VLLMEngine
from rl_vlm.learning.batching import Minibatch
from rl_vlm.learning.optimizer import make_optimizer
from rl_vlm.learning.plan import UpdateBatch, UpdateStats
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.strategies import Strategy
from rl_vlm.learning.update import PolicyUpdater
from rl_vlm.models.loading import quiet_libraries
from rl_vlm.types import (
    EncodedImage,
    GenerationRequest,
    Message,
    SamplingParams,
    Trajectory,
    TrajectoryStatus,
    Turn,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from real_shapes import FAMILIES, build

LIMIT = 1e-4
_EXACT = ("learner", "engine", "adapter", "packed", "packed gradient", "micro-batches")  # in nats, or relative


def _picture(rng: np.random.Generator, width: int, height: int) -> EncodedImage:
    return EncodedImage.from_pil(Image.fromarray(rng.integers(0, 256, (height, width, 3)).astype(np.uint8)))


def conversations(seed: int = 0) -> dict[str, list[Message]]:
    """By name; what is asked last is answered."""
    rng = np.random.default_rng(seed)
    wide, small, tall = _picture(rng, 100, 60), _picture(rng, 40, 40), _picture(rng, 33, 80)
    return {
        "no image": [Message.of("user", "Who is there?")],
        "one image": [Message.of("user", wide, "What is it?")],
        "two images": [Message.of("user", small, "and", tall, "Which one?")],
        "two turns": [
            Message.of("user", small, "One"), Message.of("assistant", "it is a"), Message.of("user", tall, "Two"),
        ],
    }  # fmt: skip


def _shown(image: Image.Image | EncodedImage) -> Image.Image:
    return image.to_pil() if isinstance(image, EncodedImage) else image


def _configured(base: dict[str, Any], changes: dict[str, Any]) -> PolicyConfig:
    config = parse_config(apply_overrides(base, changes))
    assert isinstance(config, PolicyConfig)
    return config


class Parity:
    """One folder's figures; `run()` returns them by name."""

    def __init__(
        self, folder: Path, dtype: str = "float32", engine: str = "transformers", targets: str = "", device: str = "cpu"
    ) -> None:
        quiet_libraries()
        self.dtype, self.device = dtype, device
        on_vllm = engine == "vllm"  # which adapts no tower
        self.run_config = _configured({}, {
            "model.path": str(folder), "model.dtype": dtype, "serving.max_context": 2048,
            "model.lora.target_modules": targets or ("all" if on_vllm else "vision"),
            "learner.micro_batch_tokens": 8192, "serving.engine": engine,
            **({"serving.vllm.max_num_seqs": 8} if on_vllm else {}),
            "serving.gpus_per_replica": int(device == "cuda"),
        })  # fmt: skip
        self.policy = PolicyModel(folder, self.run_config, device)
        self.updater = PolicyUpdater(self.policy, self.run_config)
        self.text = self.policy.text
        self.engine: Engine = (
            VLLMEngine(folder, self.run_config) if on_vllm
            else TransformersEngine(folder, dtype=dtype, device=device, max_context=2048)  # type: ignore[arg-type]
        )  # fmt: skip
        self.processor: Any = AutoProcessor.from_pretrained(folder)
        self.plain: Any = (
            AutoModelForImageTextToText.from_pretrained(folder, dtype=getattr(torch, dtype)).eval().to(device)
        )
        self.plain.generation_config.eos_token_id = self.text.codec.end_of_turn_id

    def rendered(self, messages: Sequence[Message]) -> dict[str, Any]:
        """The processor's own inputs. Where several images of one prompt change how each is shown, each is shown as if
        it were alone."""
        parts = [
            {"role": one.role, "content": [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": _shown(part)}
                for part in one.parts
            ]}
            for one in messages
        ]  # fmt: skip
        images = [_shown(part) for one in messages for part in one.parts if not isinstance(part, str)]
        if self.plain.config.model_type == "llava_onevision" and len(images) > 1:
            # Its processor shows several images of a prompt without tiles; here each is shown as if it were alone.
            placeholders = [self.processor.image_token] * len(images)
            shown = dict(
                self.processor(images=[[one] for one in images], text=placeholders, padding=True, return_tensors="pt")
            )
            span = self.text.codec.encode_prompt(messages)
            ids = self.text.expand(span.token_ids, span.images).astype(np.int64)
            whole = torch.from_numpy(ids)[None]
            return self._moved({**shown, "input_ids": whole, "attention_mask": torch.ones_like(whole)})
        options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        return self._moved(dict(self.processor.apply_chat_template(parts, tokenize=True, **options)))

    def _moved(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {name: one.to(self.device) if isinstance(one, torch.Tensor) else one for name, one in inputs.items()}

    @torch.no_grad()
    def reference(self, messages: Sequence[Message], said: np.ndarray) -> np.ndarray:
        """float32 [T]: log-probabilities of an answer by the plain forward pass."""
        logits = self.plain_logits(self.plain, messages, said) + self.policy.backbone.token_bias
        ids = torch.from_numpy(said.astype(np.int64)).to(self.device)
        return torch.log_softmax(logits, dim=-1).gather(1, ids[:, None])[:, 0].cpu().numpy()  # type: ignore[no-any-return]

    def plain_logits(self, model: Any, messages: Sequence[Message], said: np.ndarray) -> torch.Tensor:
        """float32 [T, V]: what a model's own forward pass predicts at an answer's places."""
        inputs = self.rendered(messages)
        prompt = inputs["input_ids"].shape[1]
        more = torch.from_numpy(said.astype(np.int64))[None].to(self.device)
        inputs["input_ids"] = torch.cat([inputs["input_ids"], more], dim=1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        for name in ("token_type_ids", "mm_token_type_ids"):
            if name in inputs:
                inputs[name] = torch.cat([inputs[name], torch.zeros_like(more)], dim=1)
        if self.text.images.axes > 1:
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == self.text.images.image_token_id).int()
        return model(**inputs).logits[0, prompt - 1 : -1].float()  # type: ignore[no-any-return]

    def answers(self, messages: Sequence[Message], name: str, **sampling: Any) -> list[Trajectory]:
        """The engine's samples, as trajectories of one turn."""
        return self.answers_together([messages], name, **sampling)

    def answers_together(
        self, conversations: Sequence[Sequence[Message]], name: str = "asked", **sampling: Any
    ) -> list[Trajectory]:
        """The samples of several prompts, asked for in one call."""
        spans = [self.text.codec.encode_prompt(messages) for messages in conversations]
        requests = [
            GenerationRequest(f"{name}-{k}", span.token_ids, SamplingParams(**sampling), span.images)
            for k, span in enumerate(spans)
        ]
        made = []
        for span, found in zip(spans, asyncio.run(self.engine.generate(requests)), strict=True):
            for number, sample in enumerate(found.samples):
                prompt, ids = len(found.prompt_ids), np.concatenate([found.prompt_ids, sample.token_ids])
                logprobs = np.concatenate([np.zeros(prompt, dtype=np.float32), sample.logprobs])
                one = Trajectory(
                    f"{found.request_id}-{number}", ids, np.arange(len(ids)) >= prompt, logprobs,
                    (Turn(prompt, len(ids), 0, sample.stop_reason, 1.0),), TrajectoryStatus.COMPLETED, span.images,
                )  # fmt: skip
                made.append(one.check())
        return made

    def run(self) -> dict[str, Any]:
        """Gaps of log-probabilities (nats, the largest), and whether ids and greedy answers are the same."""
        found: dict[str, Any] = {"ids": True, "greedy": True, "learner": 0.0, "engine": 0.0}
        groups, gaps = [], dict[str, float]()
        for name, messages in conversations().items():
            span = self.text.codec.encode_prompt(messages)
            theirs = self.rendered(messages)["input_ids"][0].tolist()
            found["ids"] &= self.text.expand(span.token_ids, span.images).tolist() == theirs
            group = self.answers(messages, name, max_new_tokens=12, n=3, seeds=(1, 2, 3), ignore_eos=True)
            groups.append(group)
            ours = self.updater.recompute(group)
            plain = [self.reference(messages, one.token_ids[one.loss_mask]) for one in group]
            gaps[name] = float(max(np.abs(a - b).max() for a, b in zip(ours, plain, strict=True)))
            sampled = [one.logprobs[one.loss_mask] for one in group]
            found["engine"] = max(
                found["engine"], *(float(np.abs(a - b).max()) for a, b in zip(sampled, plain, strict=True))
            )
            found["greedy"] &= self._greedy_is_the_same(messages, name)
        found["learner"] = max(gaps.values())
        found["text alone"] = gaps["no image"]
        found |= self._updates(groups)
        found["adapter"] = self._adapter_gap()
        seen = groups[1][0]
        blank = replace(
            seen, images=tuple(EncodedImage.from_pil(Image.new("RGB", (i.width, i.height))) for i in seen.images)
        )
        true, unseen = self.updater.recompute([seen])[0], self.updater.recompute([blank])[0]
        found["a blank image changes"] = float(np.abs(true - unseen).max())
        return found

    def _greedy_is_the_same(self, messages: Sequence[Message], name: str) -> bool:
        (ours,) = self.answers(messages, name, max_new_tokens=8, temperature=0.0)
        suppressed = self.text.codec.suppressed_token_ids(self.text.vocab_size).tolist()
        inputs = self.rendered(messages)
        theirs = self.plain.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=8,
            suppress_tokens=suppressed,
            pad_token_id=self.text.codec.pad_token_id,
        )
        return bool(theirs[0, inputs["input_ids"].shape[1] :].tolist() == ours.token_ids[ours.loss_mask].tolist())

    def _adapter_gap(self) -> float:
        """Of what the engine samples with an adapter on language model and tower, from the learner."""
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in self.policy.parameters:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        asyncio.run(self.engine.load_adapter(self.policy.payload(1)))
        gaps = []
        for name, messages in conversations(1).items():
            group = self.answers(messages, name, max_new_tokens=6, n=2, seeds=(1, 2), ignore_eos=True)
            pairs = zip(self.updater.recompute(group), group, strict=True)
            gaps += [float(np.abs(ours - one.logprobs[one.loss_mask]).max()) for ours, one in pairs]
        return max(gaps)

    def _updates(self, groups: list[list[Trajectory]]) -> dict[str, float]:
        """One update in separate rows, packed, and in small micro-batches: losses and gradients against each other."""
        results = {}
        for name, share, tokens in (("separate", False, 8192), ("packed", True, 8192), ("small", False, 1)):
            changes = {"learner.share_prompts": share, "learner.micro_batch_tokens": tokens}
            config = _configured(self.run_config.model_dump(), changes)
            results[name] = self._gradient(groups, config)
        (loss, slope), (packed, packed_slope), (small, _) = (results[name] for name in ("separate", "packed", "small"))
        return {
            "packed": abs(packed - loss), "micro-batches": abs(small - loss),
            "packed gradient": float((packed_slope - slope).norm() / slope.norm()),
        }  # fmt: skip

    def _gradient(self, groups: list[list[Trajectory]], config: PolicyConfig) -> tuple[float, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.policy.parameters:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
                parameter.grad = None
        updater = PolicyUpdater(self.policy, config)
        weights = {one.trajectory_id: 1.0 / (len(group) * one.num_sampled) for group in groups for one in group}
        advantages = {
            one.trajectory_id: np.full(one.num_sampled, 1.0 - 2.0 * (k % 2), dtype=np.float32)
            for group in groups for k, one in enumerate(group)
        }  # fmt: skip
        batch = UpdateBatch([Minibatch(groups, weights)], [True], advantages, {}, [0.0])
        strategy, loss = Strategy(self.policy, make_optimizer(self.policy, config)), 0.0
        for micro in updater.pack(batch)[0]:
            one = updater.loss(micro, UpdateStats())
            strategy.backward(one)
            loss += float(one.detach())
        slopes = [parameter.grad.flatten() for parameter in self.policy.parameters if parameter.grad is not None]
        with torch.no_grad():
            for parameter in self.policy.parameters:
                parameter.zero_()
        return loss, torch.cat(slopes)


def measure(family: str, folder: Path | None = None, device: str = "cpu") -> dict[str, Any]:
    """The cells of a family: float32, and the gaps of bfloat16 with and without images."""
    with tempfile.TemporaryDirectory() as place:
        folder = folder or build(family, Path(place) / family)
        exact, rounded = (Parity(folder, dtype, device=device).run() for dtype in ("float32", "bfloat16"))
    return {**exact, "bf16": rounded["learner"], "bf16 text alone": rounded["text alone"]}


def wrong(cells: dict[str, Any]) -> list[str]:
    """The names of cells that are not as they must be."""
    beyond = [name for name in _EXACT if not cells[name] <= LIMIT]
    blind = [] if cells["a blank image changes"] > 100 * LIMIT else ["a blank image changes"]
    return beyond + blind + [name for name in ("ids", "greedy") if not cells[name]]


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=("all", *FAMILIES), required=True)
    parser.add_argument("--folder", type=Path, help="a model folder of that family")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="write JSON here")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # else the plain forward pass rounds a patch embedding to ten bits
    names = list(FAMILIES) if args.family == "all" else [args.family]
    table = {name: measure(name, args.folder, args.device) for name in names}
    columns = list(table[names[0]])
    print(f"| family | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name, cells in table.items():
        shown = ("yes" if cell is True else "no" if cell is False else f"{cell:.1e}" for cell in cells.values())
        print(f"| {name} | {' | '.join(shown)} |")
    if args.out:
        args.out.write_text(json.dumps(table, indent=2) + "\n")
    for name, cells in table.items():
        for cell in wrong(cells):
            print(f"{name}: {cell} is {cells[cell]}", file=sys.stderr)
    return 1 if any(map(wrong, table.values())) else 0


if __name__ == "__main__":
    sys.exit(main())
