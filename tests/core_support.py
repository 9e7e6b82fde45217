"""What the tests of the core share: pictures, trajectories without an engine, and an independent forward pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from rl_vlm.config import LearnerSection, PolicyConfig, RolloutSection, apply_overrides, parse_config
from rl_vlm.config.learner import AlgorithmSection
from rl_vlm.learning.batching import BatchBuilder, Minibatch
from rl_vlm.learning.experience import Estimate
from rl_vlm.learning.plan import (
    UpdateBatch,
    UpdateStats,
    divide,
    estimate_advantages,
    make_experience,
    update_batches,
)
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.update import PolicyUpdater
from rl_vlm.models.images import TextSide
from rl_vlm.models.loading import load_text_side, quiet_libraries
from rl_vlm.types import (
    Completion,
    EncodedImage,
    GenerationRequest,
    Message,
    SamplingParams,
    StopReason,
    TokenSegment,
    Trajectory,
    TrajectoryGroup,
    TrajectoryStatus,
    Turn,
)

quiet_libraries()
torch.set_num_threads(1)
_numbers = itertools.count()  # of conversations without a name


@lru_cache(maxsize=4)
def text_side(folder: Path) -> TextSide:
    """The codec and image geometry of a model folder."""
    return load_text_side(folder)


@lru_cache(maxsize=4)
def processor(folder: Path) -> Any:
    """The folder's own Hugging Face processor."""
    return AutoProcessor.from_pretrained(folder)


def plain_model(folder: Path) -> Any:
    """The model as transformers loads it."""
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def picture(rng: np.random.Generator, width: int = 32, height: int = 32) -> EncodedImage:
    """Noise of a given size."""
    return EncodedImage.from_pil(Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)))


def pictures(rng: np.random.Generator, count: int) -> list[EncodedImage]:
    """Noise of various sizes; of most, positions and tokens differ in number."""
    sizes = [(96, 64), (32, 32), (64, 128), (70, 40), (128, 128)]
    return [picture(rng, *sizes[k % len(sizes)]) for k in range(count)]


def run_config(folder: Path, **dotted: Any) -> PolicyConfig:
    """A run on the tiny model; keyword `learner__lr` means `learner.lr`."""
    overrides = {key.replace("__", "."): value for key, value in dotted.items()}
    return parse_config(apply_overrides({"model": {"path": str(folder)}}, overrides))


def adapted_policy(folder: Path, seed: int = 1, scale: float = 0.2, **dotted: Any) -> PolicyModel:
    """A policy whose adapter is random and changes the model a lot."""
    policy = PolicyModel(folder, run_config(folder, **dotted))
    randomize(policy, seed, scale)
    return policy


def randomize(policy: PolicyModel, seed: int, scale: float = 0.2) -> None:
    """Draw both matrices of every LoRA layer anew."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.normal_(0.0, scale, generator=generator)


def allowed_ids(text: TextSide) -> np.ndarray:
    """Every id that the policy may sample, end-of-turn left out."""
    forbidden = {*text.codec.suppressed_token_ids(text.vocab_size).tolist(), text.codec.end_of_turn_id}
    return np.array([i for i in range(text.vocab_size) if i not in forbidden])


def request(
    text: TextSide, parts: Sequence[str | EncodedImage], *, name: str = "r", **sampling: Any
) -> GenerationRequest:
    """A request of one user message; `min_version` and the sampling parameters by keyword."""
    version = sampling.pop("min_version", 0)
    span = text.codec.encode_prompt([Message("user", tuple(parts))])
    params = SamplingParams(**{"max_new_tokens": 8, **sampling})
    return GenerationRequest(name, span.token_ids, params, span.images, min_version=version)


def conversation(
    text: TextSide,
    rng: np.random.Generator,
    prompt: Sequence[str | EncodedImage],
    replies: Sequence[int],
    later: Sequence[Sequence[str | EncodedImage]] = (),
    name: str = "",
) -> Trajectory:
    """A trajectory of random replies of the given lengths; `later` are the messages between them."""
    name = name or f"t{next(_numbers)}"
    codec = text.codec
    span = codec.encode_prompt([Message("user", tuple(prompt))])
    pieces, masks, images = [expand(text, span.token_ids, span.images)], [False], list(span.images)
    turns: list[Turn] = []
    ids = allowed_ids(text)
    for number, length in enumerate(replies):
        start = sum(map(len, pieces))
        pieces.append(np.append(rng.choice(ids, length - 1), codec.end_of_turn_id).astype(np.int32))
        masks.append(True)
        turns.append(Turn(start, start + length, 0, StopReason.END_OF_TURN, float(rng.integers(2))))
        if number + 1 < len(replies):
            span = codec.encode_continuation([Message("user", tuple(later[number]))], ended=True)
            pieces.append(expand(text, span.token_ids, span.images))
            masks.append(False)
            images.extend(span.images)
    mask = np.concatenate([np.full(len(piece), sampled) for piece, sampled in zip(pieces, masks, strict=True)])
    logprobs = np.where(mask, -rng.uniform(0.1, 6.0, len(mask)), 0.0).astype(np.float32)
    token_ids = np.concatenate(pieces)
    return Trajectory(name, token_ids, mask, logprobs, tuple(turns), TrajectoryStatus.COMPLETED, tuple(images)).check()


def segmented_episode(
    text: TextSide, rng: np.random.Generator, shown: Sequence[EncodedImage], name: str, count: int
) -> Trajectory:
    """Hand-made: `count` segments of one to three turns, which show the first count + 1 pictures."""
    parts = [
        conversation(text, rng, [f"part {k}", shown[k]], [3 + k, *[4] * k], [[shown[k + 1], "on"]] * k, name=name)
        for k in range(count)
    ]
    starts = np.cumsum([0, *map(len, parts)]).tolist()
    return Trajectory(
        name,
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.loss_mask for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        tuple(
            replace(turn, start=turn.start + start, stop=turn.stop + start, reward=float(rng.normal()))
            for part, start in zip(parts, starts, strict=False)
            for turn in part.turns
        ),
        parts[0].status,
        tuple(shown[: count + 1]),
        segments=tuple(
            TokenSegment(starts[k], starts[k + 1], (k, *[k + 1] * k)) for k in range(count)
        ),
    ).check()  # fmt: skip


def expand(text: TextSide, token_ids: np.ndarray, images: Sequence[EncodedImage]) -> np.ndarray:
    """Ids with every image placeholder repeated as often as the image has tokens."""
    return text.expand(token_ids, images)


def reference_logits(folder: Path, model: Any, token_ids: np.ndarray, images: Sequence[EncodedImage]) -> torch.Tensor:
    """float32 [T, V] by transformers alone: its own image processor, positions, mask and vision tower; no token mask."""
    inputs: dict[str, Any] = {"input_ids": torch.from_numpy(token_ids.astype(np.int64))[None]}
    if images:
        pixels = processor(folder).image_processor([image.to_pil() for image in images], return_tensors="pt")
        inputs |= {"pixel_values": pixels["pixel_values"], "image_grid_thw": pixels["image_grid_thw"]}
    is_image = inputs["input_ids"] == model.config.image_token_id
    return model(**inputs, mm_token_type_ids=is_image.int(), use_cache=False).logits[0].float()


def reference_logprobs(
    folder: Path, model: Any, token_ids: np.ndarray, images: Sequence[EncodedImage], temperature: float = 1.0
) -> torch.Tensor:
    """float32 [T - 1]: the log-probability of every token but the first, suppressed tokens left out."""
    text = text_side(folder)
    logits = reference_logits(folder, model, token_ids, images)[:-1]
    logits[:, torch.from_numpy(text.codec.suppressed_token_ids(text.vocab_size))] = float("-inf")
    targets = torch.from_numpy(token_ids[1:].astype(np.int64))
    return torch.log_softmax(logits / temperature, dim=-1).gather(1, targets[:, None])[:, 0]


class Sample(NamedTuple):
    """A trajectory with the advantages float32 [T] of its sampled tokens and the weight of each token's loss."""

    trajectory: Trajectory
    advantage: np.ndarray
    weight: float


def builder_of(text: TextSide, max_tokens: int = 4096, **more: Any) -> BatchBuilder:
    """Packs micro-batches for the model of `text`."""
    return BatchBuilder(text, max_tokens, **more)


def gap(folder: Path, model: Any, request: GenerationRequest, answer: Completion) -> float:
    """The largest difference between an answer's log-probabilities and those of plain transformers with some weights."""
    largest = 0.0
    for sample in answer.samples:
        ids = np.concatenate([answer.prompt_ids, sample.token_ids])
        with torch.no_grad():
            wanted = reference_logprobs(folder, model, ids, request.images, request.sampling.temperature or 1.0)
        largest = max(largest, float(np.abs(wanted.numpy()[len(answer.prompt_ids) - 1 :] - sample.logprobs).max()))
    return largest


def train_sample(trajectory: Trajectory, advantage: float, weight: float) -> Sample:
    """One trajectory whose sampled tokens all have the same advantage."""
    return Sample(trajectory, np.full(trajectory.num_sampled, advantage, dtype=np.float32), weight)


def batch_of(*steps: Sequence[Sequence[Sample]]) -> UpdateBatch:
    """One learner's update of these steps, each a list of groups."""
    samples = [sample for step in steps for group in step for sample in group]
    return UpdateBatch(
        [
            Minibatch(
                [[sample.trajectory for sample in group] for group in step],
                {sample.trajectory.trajectory_id: sample.weight for group in step for sample in group},
            )
            for step in steps
        ],
        [bool(step) for step in steps],
        {sample.trajectory.trajectory_id: sample.advantage for sample in samples},
        {},
        [1.0] * len(steps),
    )


def first_gradient(policy: PolicyModel, run: PolicyConfig, group: TrajectoryGroup, estimate: Estimate) -> torch.Tensor:
    """Of the first step on a group, as a learner computes it."""
    (batch,) = update_batches(divide([group], run, np.random.default_rng(0), estimate), estimate)
    updater = PolicyUpdater(policy, run)
    policy.model.zero_grad(set_to_none=True)
    (packed,) = updater.pack(batch)
    for micro in packed:
        updater.loss(micro, UpdateStats()).backward()
    return gradient_vector(policy.parameters)


def gradient_vector(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """All gradients as one vector; zero where a parameter has none."""
    return torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).reshape(-1) for p in parameters])


class Plan(NamedTuple):
    """An update without scores: what each learner is sent, and the mean advantage of each trajectory, by group."""

    batches: list[UpdateBatch]
    advantages: list[np.ndarray]

    @property
    def active(self) -> list[bool]:
        return self.batches[0].active


def planned_by(settings: AlgorithmSection, num_learners: int = 1, max_new_tokens: int = 1) -> PolicyConfig:
    """What plans of updates read of a run; sections that contradict it are no matter."""
    rollout = RolloutSection.model_construct(max_new_tokens=max_new_tokens)
    learner = LearnerSection.model_construct(num_learners=num_learners)
    return PolicyConfig.model_construct(algorithm=settings, learner=learner, rollout=rollout)


def plan_update(
    groups: Sequence[TrajectoryGroup],
    settings: AlgorithmSection,
    rng: np.random.Generator,
    *,
    num_learners: int = 1,
    max_new_tokens: int = 1,
) -> Plan:
    """The update of groups whose advantages need nothing from the learners, as GRPO makes it."""
    run = planned_by(settings, num_learners, max_new_tokens)
    estimate = estimate_advantages(make_experience(groups, run, rng), settings)
    shares = divide(groups, run, rng, estimate)
    means = {name: tokens.mean() if len(tokens) else 0.0 for name, tokens in estimate.advantages.items()}
    advantages = [np.array([means[one.trajectory_id] for one in group.trajectories]) for group in groups]
    return Plan(update_batches(shares, estimate), advantages)


def outside_adapter(model_folder: Path, seed: int) -> PeftModel:
    """A trainer's step: its adapter is another one."""
    model = plain_model(model_folder)
    torch.manual_seed(seed)
    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]))
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return peft
