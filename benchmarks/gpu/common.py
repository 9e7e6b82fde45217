"""What the GPU checks share: models of the published shapes with random weights, conversations, and a report in JSON.

They need torch, transformers, peft, pydantic, PyYAML, numpy and pillow: neither Ray nor vLLM nor a network. They need
no torchvision, because no picture is resized.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

import rl_vlm.zoo.tiny
from rl_vlm.config import PolicyConfig, apply_overrides, parse_config
from rl_vlm.learning.batching import Minibatch
from rl_vlm.learning.plan import UpdateBatch
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.models.images import TextSide
from rl_vlm.models.loading import disable_cudnn_attention, quiet_libraries
from rl_vlm.types import EncodedImage, Message, StopReason, Trajectory, TrajectoryStatus, Turn

SIZES = ("2b", "4b", "8b")
# The configurations of the published Qwen3-VL models, by size.
_PUBLISHED = Path(__file__).parents[2] / "tests/fixtures/qwen3_vl.json"
# The tiny model as it comes with the package: what builds it imports environments, and these gymnasium and more.
_TINY = Path(rl_vlm.zoo.tiny.__path__[0]) / "shipped" / "small"
_MAX_PIXELS = 1024 * 1024


@dataclass(slots=True)
class Report:
    """Figures by name, in the order in which they came."""

    name: str
    size: str
    device: str
    figures: dict[str, Any] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def add(self, name: str, **figures: Any) -> None:
        """Keep and print the figures of one measurement."""
        self.figures[name] = figures
        shown = ", ".join(f"{key} {_shown(value)}" for key, value in figures.items() if not isinstance(value, list))
        print(f"{name}: {shown}", flush=True)

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """What is measured in here may fail by itself, such as for want of memory: its error is the figure."""
        try:
            yield
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            self.failed.append(name)
            self.add(name, error=f"{type(error).__name__}: {reason}")
        free()

    def finish(self, out: Path | None) -> int:
        """Write JSON where asked for; 1 where something failed, whose name is printed."""
        if out is not None:
            out.write_text(json.dumps(self.as_dict(), indent=2) + "\n")
        for name in self.failed:
            print(f"failed: {name}", file=sys.stderr)
        return 1 if self.failed else 0

    def as_dict(self) -> dict[str, Any]:
        """The JSON that `--out` writes."""
        on_gpu = self.device == "cuda"
        return {
            "name": self.name,
            "size": self.size,
            "machine": {
                "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
                "memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 2) if on_gpu else None,
                "cuda": torch.version.cuda if on_gpu else None,
            },
            "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
            "figures": self.figures,
            "failed": self.failed,
        }


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def arguments(description: str | None, default: str) -> argparse.ArgumentParser:
    """The command line that all checks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("tiny", *SIZES), default=default or None, help="tiny: a CPU, in seconds")
    parser.add_argument("--out", type=Path, help="write JSON here")
    return parser


def device_of(size: str) -> str:
    """cuda, or cpu for the tiny size. Ends the program where a GPU is needed and there is none."""
    if torch.cuda.is_available():
        return "cuda"
    if size == "tiny":
        torch.set_num_threads(1)  # more would wait for each other
        return "cpu"
    sys.exit(f"Size {size} needs a GPU, and torch sees none: use --size tiny.")


@contextmanager
def scratch(size: str) -> Iterator[Path]:
    """A model folder without weights, which are drawn where a model is loaded while this lasts."""
    quiet_libraries()
    with tempfile.TemporaryDirectory(prefix="rl-vlm-gpu-") as place, random_weights():
        yield write_folder(Path(place) / "model", size)


def write_folder(folder: Path, size: str) -> Path:
    """Configuration, tokenizer and image settings of a size: the published shapes with the tiny model's tokenizer."""
    like = AutoConfig.from_pretrained(_TINY)
    config = like
    if size != "tiny":
        data = json.loads(_PUBLISHED.read_text())[size]
        for section in ("text_config", "vision_config"):
            # As published: weights drawn as widely as the tiny model's would make bfloat16's rounding grow from layer
            # to layer.
            data[section] = {**like.to_dict()[section], "initializer_range": 0.02, **data[section]}
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            data["text_config"][name] = getattr(like.text_config, name)
        tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        config = type(like)(**data | {name: getattr(like, name) for name in tokens})
    shutil.copytree(_TINY, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config.save_pretrained(folder)
    processor = json.loads((folder / "processor_config.json").read_text())
    processor["image_processor"]["size"]["longest_edge"] = _MAX_PIXELS
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


@contextmanager
def random_weights(seed: int = 0) -> Iterator[None]:
    """While this lasts, learner and engine draw a model's weights on its device instead of reading tens of gigabytes.

    They are drawn in bfloat16, so that a model in float32 has exactly those of one in bfloat16.
    """

    def drawn(
        folder: Path,
        dtype: str = "float32",
        device: str = "cpu",
        quantization: str = "none",
        *,
        layers_on_host: bool = False,
    ) -> Any:
        assert quantization == "none" and not layers_on_host
        disable_cudnn_attention(device)
        torch.manual_seed(seed)
        with torch.device(device):
            model = AutoModelForImageTextToText.from_config(
                AutoConfig.from_pretrained(folder), dtype=torch.bfloat16, attn_implementation="sdpa"
            )
        return model.to(getattr(torch, dtype)).requires_grad_(False).eval()

    with (
        mock.patch("rl_vlm.learning.policy_model.load_model", drawn),
        mock.patch("rl_vlm.engines.transformers_engine.load_model", drawn),
    ):
        yield


def run_config(folder: Path, dtype: str, **dotted: Any) -> PolicyConfig:
    """A run on that folder; `learner__lr` means `learner.lr`."""
    changes = {
        "model.path": str(folder), "model.dtype": dtype, "model.lora.rank": 32, "model.lora.alpha": 64,
        "learner.micro_batch_tokens": 8192, **{key.replace("__", "."): value for key, value in dotted.items()},
    }  # fmt: skip
    return parse_config(apply_overrides({}, changes))


def make_policy(folder: Path, run: PolicyConfig, device: str, scale: float = 0.01) -> PolicyModel:
    """A policy whose adapter changes the model: both of its matrices are drawn, always the same."""
    policy = PolicyModel(folder, run, device)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return policy


def picture(rng: np.random.Generator, width: int, height: int) -> EncodedImage:
    """Smooth noise; sizes are multiples of 32, which nothing resizes."""
    small = rng.integers(0, 256, (max(height // 16, 1), max(width // 16, 1), 3), dtype=np.uint8)
    return EncodedImage.from_pil(Image.fromarray(small).resize((width, height), Image.Resampling.BILINEAR))


def conversation(
    text: TextSide, rng: np.random.Generator, images: Sequence[EncodedImage], words: int, reply: int, name: str
) -> Trajectory:
    """One prompt of images and about `words` tokens, and a random reply of `reply` tokens."""
    codec = text.codec
    span = codec.encode_prompt([Message.of("user", *images, "1 " * words)])
    prompt = text.expand(span.token_ids, images)
    forbidden = {*codec.suppressed_token_ids(text.vocab_size).tolist(), codec.end_of_turn_id}
    allowed = np.array([token for token in range(min(text.vocab_size, 400)) if token not in forbidden])
    ids = np.concatenate([prompt, rng.choice(allowed, reply - 1), [codec.end_of_turn_id]]).astype(np.int32)
    mask = np.arange(len(ids)) >= len(prompt)
    logprobs = np.where(mask, -5.0, 0.0).astype(np.float32)
    turn = Turn(len(prompt), len(ids), 0, StopReason.END_OF_TURN, 1.0)
    return Trajectory(name, ids, mask, logprobs, (turn,), TrajectoryStatus.COMPLETED, tuple(images)).check()


def group(
    text: TextSide, images: Sequence[EncodedImage], words: int, reply: int, samples: int, seed: int
) -> list[Trajectory]:
    """Answers to one prompt."""
    rng = np.random.default_rng(seed)
    return [conversation(text, rng, images, words, reply, f"{seed}-{k}") for k in range(samples)]


def one_step(groups: list[list[Trajectory]]) -> UpdateBatch:
    """An update of one step on these groups, with alternating advantages."""
    weights = {one.trajectory_id: 1.0 / (len(group) * one.num_sampled) for group in groups for one in group}
    advantages = {
        one.trajectory_id: np.full(one.num_sampled, 1.0 - 2.0 * (k % 2), dtype=np.float32)
        for group in groups
        for k, one in enumerate(group)
    }
    return UpdateBatch([Minibatch(groups, weights)], [True], advantages, {}, [0.0])


def full_batch(text: TextSide, tokens: int, side: int, samples: int = 8) -> UpdateBatch:
    """Groups of one image and `samples` replies each, of at most `tokens` packed tokens together.

    The prompts are longer than the replies, so that a learner packs each group into one row.
    """
    rng = np.random.default_rng(7)
    share = tokens // 2  # two groups
    image_tokens = text.images.count_tokens(side, side)
    reply = max((share - image_tokens - 64) // (samples + 2), 4)
    return one_step([group(text, [picture(rng, side, side)], reply, reply, samples, seed) for seed in (0, 1)])


def synchronize(device: str) -> None:
    """Wait for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], Any], device: str, repeats: int = 3) -> float:
    """The median time of `work`, after one run that is not counted."""
    work()
    taken = []
    for _ in range(repeats):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        taken.append(time.perf_counter() - started)
    return float(np.median(taken))


def free() -> None:
    """Give back GPU memory that no tensor uses any more; small models on a CPU are not worth the search."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
