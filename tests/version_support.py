"""What tests of samples from several policy versions share: engines whose adapter changes meanwhile, and what each token should be worth."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from core_support import adapted_policy, plain_model, processor, reference_logprobs, text_side
from peft import PeftModel
from policy_loop import MAX_CONTEXT, ThreeTurns
from transformers import DynamicCache

from rl_vlm.chat import mrope_positions
from rl_vlm.config import RolloutSection
from rl_vlm.engines.base import Engine
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.rollout.env_pool import EnvPool
from rl_vlm.rollout.episodes import run_group
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import Completion, EncodedImage, GenerationRequest, Trajectory, TrajectoryGroup

PIECE, TURN = 4, 10
# Turns of up to ten tokens; in pieces of four with `partial_tokens`.
ROLLOUT = RolloutSection(
    max_turns=3, max_new_tokens_per_turn=TURN, max_new_tokens=3 * TURN, require_end_of_turn=False,
    max_policy_lag=1, partial_tokens=PIECE,
)  # fmt: skip
TASK = RolloutTask("g", 3, "train", seed=1, sampling_seed=5, size=3, temperature=0.8, min_version=1)


def random_payload(folder: Path, version: int, scale: float = 0.2) -> AdapterPayload:
    """An adapter that is far from that of every other version."""
    return adapted_policy(folder, seed=version, scale=scale).payload(version)


def model_of(folder: Path, payload: AdapterPayload, place: Path) -> Any:
    """The version as plain transformers and peft load it; its adapter is written into the folder `place`."""
    payload.write(place / str(payload.version))
    return PeftModel.from_pretrained(plain_model(folder), place / str(payload.version)).eval()


class NewWeightsMeanwhile:
    """A client of an engine in this process, which gets another adapter before every third request."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.folder, self.engine = folder, engine
        self.requests: list[GenerationRequest] = []
        self.version = 0
        self.loading = asyncio.Lock()

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        if len(self.requests) % 3 == 1:
            async with self.loading:
                self.version += 1
                await self.engine.load_adapter(random_payload(self.folder, self.version))
        answer = (await self.engine.generate([request]))[0]
        return dataclasses.replace(answer, replica_id="here")

    async def group(self, rollout: RolloutSection) -> TrajectoryGroup:
        pool = EnvPool(ThreeTurns, timeout_s=30.0, inline=True)
        try:
            return await run_group(TASK, pool, self, text_side(self.folder), rollout, MAX_CONTEXT)
        finally:
            pool.close()
            await self.engine.close()


def check_named_versions(group: TrajectoryGroup, folder: Path, place: Path) -> float:
    """Every token is as likely as under the version that it names, and not as under another; returns the largest difference."""
    versions = sorted({int(v) for one in group.trajectories for v in one.versions if v >= 0})
    assert len(versions) >= 5
    under = {
        version: logprobs_under(folder, random_payload(folder, version), group.trajectories, place)
        for version in versions
    }
    worst = others = 0.0
    for k, one in enumerate(group.trajectories):
        for position in np.flatnonzero(one.loss_mask):
            version = int(one.versions[position])
            worst = max(worst, abs(under[version][k][position - 1] - one.logprobs[position]))
            wrong = under[versions[(versions.index(version) + 1) % len(versions)]][k][position - 1]
            others = max(others, abs(wrong - one.logprobs[position]))
    assert worst < 1e-4, worst
    assert others > 0.5  # another version gives other likelihoods
    return worst


def logprobs_under(
    folder: Path, payload: AdapterPayload, trajectories: Sequence[Trajectory], place: Path
) -> list[np.ndarray]:
    """Per trajectory, float32 [T - 1]: log-probabilities of all tokens but the first under one version."""
    model = model_of(folder, payload, place)
    with torch.no_grad():
        return [
            reference_logprobs(folder, model, one.token_ids, one.images, TASK.temperature).numpy()
            for one in trajectories
        ]


@contextlib.asynccontextmanager
async def new_adapters(engine: Engine, payloads: Sequence[AdapterPayload], every: int) -> AsyncIterator[None]:
    """Inside, the engine gets one adapter after another, each when it has sampled `every` further tokens."""

    async def load() -> None:
        for payload in payloads:
            wanted = engine.stats().generated_tokens + every
            while engine.stats().generated_tokens < wanted:
                await asyncio.sleep(0.001)
            await engine.load_adapter(payload)

    loading = asyncio.create_task(load())
    try:
        yield
    finally:
        loading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loading


@dataclasses.dataclass
class Distance:
    """How far log-probabilities are from what is expected of them, over all tokens."""

    largest: float
    mean: float

    @classmethod
    def of(cls, differences: Sequence[np.ndarray]) -> Distance:
        every = np.abs(np.concatenate(differences))
        return cls(float(every.max()), float(every.mean()))

    def __str__(self) -> str:
        return f"at most {self.largest:.1e}, {self.mean:.1e} on average"


def distances(
    folder: Path, models: dict[int, Any], requests: Sequence[GenerationRequest], answers: Sequence[Completion]
) -> tuple[Distance, Distance]:
    """Of the reported log-probabilities: from a recomputation of everything before each token with the version that the
    token names, and from transformers' when each version computes keys and values of its own tokens only and keeps the others.
    """
    recomputed, kept = [], []
    for request, answer in zip(requests, answers, strict=True):
        for sample in answer.samples:
            ids = np.concatenate([answer.prompt_ids, sample.token_ids])
            pieces = sample.pieces or ((len(sample.token_ids), answer.policy_version),)
            assert sum(count for count, _ in pieces) == len(sample.token_ids)
            names = np.repeat([version for _, version in pieces], [count for count, _ in pieces])
            temperature, prompt = request.sampling.temperature, len(answer.prompt_ids)
            with torch.no_grad():
                under = {
                    version: reference_logprobs(folder, models[version], ids, request.images, temperature).numpy()
                    for version in set(names.tolist())
                }
                mixed = _with_kept_cache(folder, models, ids, request.images, temperature, prompt, pieces)
            exact = np.array([under[version][prompt - 1 + place] for place, version in enumerate(names.tolist())])
            recomputed.append(sample.logprobs - exact)
            kept.append(sample.logprobs - mixed[prompt - 1 :])
    return Distance.of(recomputed), Distance.of(kept)


def _with_kept_cache(
    folder: Path,
    models: dict[int, Any],
    ids: np.ndarray,
    images: Sequence[EncodedImage],
    temperature: float,
    prompt: int,
    pieces: tuple[tuple[int, int], ...],
) -> np.ndarray:
    """float32 [T - 1]: log-probabilities of all tokens but the first, the cache passed on from version to version."""
    text = text_side(folder)
    grids = [text.images.grid_thw(image.width, image.height) for image in images]
    image_token = text.codec.image_token_id
    positions = torch.from_numpy(mrope_positions(ids[:prompt], image_token, grids, text.images.merge_size))
    later = int(positions.max()) + 1 + torch.arange(len(ids) - prompt)
    positions = torch.cat([positions, later.expand(3, -1)], dim=1)[:, None]  # [3, 1, T]
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    extra: dict[str, Any] = {}
    if images:
        pixels = processor(folder).image_processor([image.to_pil() for image in images], return_tensors="pt")
        extra = {"pixel_values": pixels["pixel_values"], "image_grid_thw": pixels["image_grid_thw"]}
    cache, logits, start, end = DynamicCache(), [], 0, prompt - 1
    for count, version in pieces:
        end += count  # the last token that a version samples gets its keys and values from the next one
        part = slice(start, end)
        output = models[version](
            input_ids=tokens[:, part], position_ids=positions[:, :, part], past_key_values=cache, use_cache=True,
            mm_token_type_ids=(tokens[:, part] == image_token).int(), **(extra if start == 0 else {}),
        )  # fmt: skip
        logits.append(output.logits[0].float())
        start = end
    every = torch.cat(logits)
    every[:, torch.from_numpy(text.codec.suppressed_token_ids(text.vocab_size))] = float("-inf")
    return torch.log_softmax(every / temperature, -1).gather(1, tokens[0, 1:, None])[:, 0].numpy()
