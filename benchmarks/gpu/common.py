"""What the GPU checks share: models of the published shapes with random weights, and conversations.

They need torch, transformers, peft, pydantic, PyYAML, numpy and pillow: neither Ray nor vLLM nor a network. They need
no torchvision, because no picture is resized.
"""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from report import SkippedError
from transformers import AutoConfig, AutoModelForImageTextToText

import rl_vlm.zoo.tiny
from rl_vlm.config import PolicyConfig, apply_overrides, parse_config
from rl_vlm.engines import transformers_engine
from rl_vlm.learning import policy_model
from rl_vlm.learning.batching import Minibatch
from rl_vlm.learning.plan import UpdateBatch
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.models.images import TextSide
from rl_vlm.models.loading import disable_cudnn_attention, quiet_libraries
from rl_vlm.types import EncodedImage, Message, StopReason, Trajectory, TrajectoryStatus, Turn

# The configurations of the published Qwen3-VL models, by size.
_PUBLISHED = Path(__file__).parents[2] / "tests/fixtures/qwen3_vl.json"
# The tiny model as it comes with the package: what builds it imports environments, and these gymnasium and more.
_TINY = Path(rl_vlm.zoo.tiny.__path__[0]) / "shipped" / "small"
_MAX_PIXELS = 1024 * 1024


def prepare(work: Path, size: str) -> tuple[Path, str]:
    """The model folder of a size in `work`, and the device; from now on models of this process have drawn weights."""
    device, folder = device_of(size), work / f"model-{size}"
    quiet_libraries()
    draw_weights()
    return folder if folder.is_dir() else write_folder(folder, size), device


def device_of(size: str) -> str:
    """cuda, or cpu for the tiny size. Raises SkippedError where a GPU is needed and there is none."""
    if torch.cuda.is_available():
        return "cuda"
    if size == "tiny":
        torch.set_num_threads(1)  # more would wait for each other
        return "cpu"
    raise SkippedError(f"Size {size} needs a GPU, and torch sees none: use --size tiny.")


def write_folder(folder: Path, size: str) -> Path:
    """Configuration, tokenizer and image settings of a size: the published shapes with the tiny model's tokenizer."""
    like = AutoConfig.from_pretrained(_TINY)
    config = like
    if size == "tiny":  # vLLM's attention on a CPU wants heads of 32
        config.text_config.head_dim = 32
        config.text_config.rope_parameters["mrope_section"] = [8, 4, 4]
    else:
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


def draw_weights(seed: int = 0) -> None:
    """Let learner and engine draw a model's weights on its device instead of reading tens of gigabytes.

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

    policy_model.load_model = transformers_engine.load_model = drawn


def run_config(folder: Path, dtype: str, **dotted: Any) -> PolicyConfig:
    """A run on that folder; `learner__lr` means `learner.lr`."""
    changes = {
        "model.path": str(folder), "model.dtype": dtype, "model.lora.rank": 32, "model.lora.alpha": 64,
        "learner.micro_batch_tokens": 8192, **{key.replace("__", "."): value for key, value in dotted.items()},
    }  # fmt: skip
    return parse_config(apply_overrides({}, changes))


def make_policy(folder: Path, run: PolicyConfig, device: str, scale: float = 0.01) -> PolicyModel:
    """A policy whose adapter, if it trains one, changes the model: both of its matrices are drawn, always the same."""
    policy = PolicyModel(folder, run, device)
    if run.model.train == "lora":
        draw_adapter(policy, 1, scale)
    return policy


@torch.no_grad()
def draw_adapter(policy: PolicyModel, seed: int, scale: float = 0.01) -> None:
    """Draw both matrices of every LoRA layer anew; a seed gives always the same."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


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
