"""Batched decoding with transformers: prefill once per prompt, then one step at a time for all running samples.

No threads and no asyncio here: `transformers_engine.py` drives it. New prompts may join between any two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from rl_vlm.chat import expand_image_tokens, mrope_positions
from rl_vlm.engines.base import EngineError, uniforms
from rl_vlm.engines.kv_cache import RowCache
from rl_vlm.engines.sampling import choose_tokens
from rl_vlm.models.backbone import Backbone, ImageFeatures
from rl_vlm.types import Completion, GenerationRequest, Sample, StopReason, UserInputError

# Padded prompt tokens per prefill forward pass.
_PREFILL_TOKENS = 16384


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way: its expanded prompt, and its samples as they finish."""

    request: GenerationRequest
    prompt_ids: np.ndarray
    positions: np.ndarray  # int64 [3, P]
    submitted: float
    features: list[ImageFeatures] = field(default_factory=list)
    started: float = 0.0
    samples: dict[int, Sample] = field(default_factory=dict)
    cancelled: bool = False


class Decoder:
    """Runs jobs on one backbone.

    Args:
        backbone: the model.
        image_token_id, end_of_turn_id, pad_token_id: token ids.
        max_context: prompt plus new tokens of a sample; a request that cannot fit is refused.
        decode: token ids to text, for stop strings.
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        image_token_id: int,
        end_of_turn_id: int,
        pad_token_id: int,
        max_context: int,
        decode: Callable[[np.ndarray], str],
    ) -> None:
        self._backbone = backbone
        self._image_token_id = image_token_id
        self._end_of_turn_id = end_of_turn_id
        self._pad_token_id = pad_token_id
        self._max_context = max_context
        self._decode = decode
        self._device = backbone.device
        self._random = np.random.default_rng()
        self.clear()

    def clear(self) -> None:
        """Forget all rows, and whatever a failed step may have left half done."""
        self._cache = RowCache()
        self._jobs: list[Job] = []  # per row
        self._sample_number: list[int] = []  # per row
        self._length = np.zeros(0, dtype=np.int64)  # per row: keys and values held
        self._position = np.zeros(0, dtype=np.int64)  # per row: rotary position of the next token
        self._produced = np.zeros(0, dtype=np.int64)
        self._limit = np.zeros(0, dtype=np.int64)
        self._seeds = np.zeros(0, dtype=np.uint64)
        self._temperature = np.zeros(0, dtype=np.float32)
        self._top_p = np.zeros(0, dtype=np.float32)
        self._top_k = np.zeros(0, dtype=np.int64)
        self._tokens = np.zeros((0, 0), dtype=np.int32)  # [rows, most new tokens]
        self._logprobs = np.zeros((0, 0), dtype=np.float32)

    @property
    def num_rows(self) -> int:
        """Samples that are running."""
        return len(self._jobs)

    def prepare(self, requests: Sequence[GenerationRequest]) -> list[Job | EngineError]:
        """Expand prompts and encode their images (all images of all requests in one vision batch).

        A request that cannot be answered becomes an error in its place.
        """
        jobs = [self._expanded(request) for request in requests]
        try:
            self._encode_images([job for job in jobs if isinstance(job, Job)])
        except UserInputError:
            # One of the images is damaged: encode them request by request to see whose it is.
            for place, job in enumerate(jobs):
                if isinstance(job, Job):
                    try:
                        self._encode_images([job])
                    except UserInputError as error:
                        jobs[place] = EngineError(f"Request {job.request.request_id}: {error}")
        return jobs

    def _expanded(self, request: GenerationRequest) -> Job | EngineError:
        spec, name = self._backbone.images, request.request_id
        try:
            grids = [spec.grid_thw(image.width, image.height) for image in request.images]
            counts = [spec.num_image_tokens(grid) for grid in grids]
            ids = expand_image_tokens(request.prompt_ids, self._image_token_id, counts, name)
        except UserInputError as error:
            return EngineError(f"Request {name}: {error}")
        if len(ids) + request.sampling.max_new_tokens > self._max_context:
            return EngineError(
                f"Request {name}: {len(ids)} prompt tokens and {request.sampling.max_new_tokens} "
                f"new ones exceed the context of {self._max_context}: raise serving.max_context or send less."
            )
        if not len(ids) or ids.min() < 0 or ids.max() >= len(self._backbone.token_bias):
            return EngineError(f"Request {name}: the prompt is empty or holds ids that the model does not know.")
        positions = mrope_positions(ids, self._image_token_id, grids, spec.merge_size)
        return Job(request, ids, positions, time.monotonic())

    def _encode_images(self, jobs: Sequence[Job]) -> None:
        images = [image for job in jobs for image in job.request.images]
        features = iter(self._backbone.image_features(images) if images else [])
        for job in jobs:
            job.features = [next(features) for _ in job.request.images]

    @torch.inference_mode()
    def admit(self, jobs: Sequence[Job]) -> list[Job]:
        """Prefill the jobs and sample their first tokens; returns the jobs that are finished already."""
        waiting = sorted(jobs, key=lambda job: len(job.prompt_ids))
        finished: list[Job] = []
        while waiting:
            longest = len(waiting[0].prompt_ids)
            size = 0
            while size < len(waiting) and (size + 1) * len(waiting[size].prompt_ids) <= max(_PREFILL_TOKENS, longest):
                size += 1
            batch, waiting = waiting[: max(size, 1)], waiting[max(size, 1) :]
            finished.extend(self._prefill(batch))
        return finished

    def _prefill(self, jobs: list[Job]) -> list[Job]:
        lengths = np.array([len(job.prompt_ids) for job in jobs])
        longest = int(lengths.max())
        ids = np.full((len(jobs), longest), self._pad_token_id, dtype=np.int64)
        positions = np.zeros((3, len(jobs), longest), dtype=np.int64)
        for row, job in enumerate(jobs):
            ids[row, : lengths[row]] = job.prompt_ids
            positions[:, row, : lengths[row]] = job.positions
        # Prompts are padded on the right: causal attention never sees the padding.
        mask = torch.ones(longest, longest, dtype=torch.bool, device=self._device).tril()[None, None]
        cache = DynamicCache()
        hidden = self._backbone.hidden_states(
            torch.from_numpy(ids).to(self._device),
            torch.from_numpy(positions).to(self._device),
            mask.expand(len(jobs), 1, longest, longest),
            [feature for job in jobs for feature in job.features],
            cache,
        )
        last = hidden[torch.arange(len(jobs), device=self._device), torch.from_numpy(lengths - 1).to(self._device)]
        logits = self._backbone.logits(last)

        copies = np.array([job.request.sampling.n for job in jobs])
        source = np.repeat(np.arange(len(jobs)), copies)
        source_t = torch.from_numpy(source).to(self._device)
        limits = np.array([job.request.sampling.max_new_tokens for job in jobs])
        self._cache.admit(
            [(layer.keys, layer.values) for layer in cache.layers],  # type: ignore[misc]
            source_t,
            int((lengths + limits).max()),
        )
        first = self.num_rows
        now = time.monotonic()
        for job in jobs:
            job.started = now
            self._jobs.extend([job] * job.request.sampling.n)
            self._sample_number.extend(range(job.request.sampling.n))
        sampling = [job.request.sampling for job in jobs]
        seeds = [
            np.array(s.seeds, dtype=np.uint64) if s.seeds is not None else self._fresh_seeds(s.n) for s in sampling
        ]
        self._seeds = np.concatenate([self._seeds, *seeds])
        self._length = np.concatenate([self._length, lengths[source]])
        self._position = np.concatenate([self._position, np.array([job.positions.max() + 1 for job in jobs])[source]])
        self._produced = np.concatenate([self._produced, np.zeros(len(source), dtype=np.int64)])
        self._limit = np.concatenate([self._limit, limits[source]])
        per_job = np.array([(s.temperature, s.top_p, s.top_k) for s in sampling])[source]
        self._temperature = np.concatenate([self._temperature, per_job[:, 0].astype(np.float32)])
        self._top_p = np.concatenate([self._top_p, per_job[:, 1].astype(np.float32)])
        self._top_k = np.concatenate([self._top_k, per_job[:, 2].astype(np.int64)])
        self._grow_output(len(source))
        return self._choose(logits[source_t], first)

    def _fresh_seeds(self, count: int) -> np.ndarray:
        return self._random.integers(0, 2**63, size=count, dtype=np.uint64)

    def _grow_output(self, new_rows: int) -> None:
        width = max(int(self._limit.max()), self._tokens.shape[1])
        tokens = np.zeros((len(self._tokens) + new_rows, width), dtype=np.int32)
        logprobs = np.zeros(tokens.shape, dtype=np.float32)
        tokens[: len(self._tokens), : self._tokens.shape[1]] = self._tokens
        logprobs[: len(self._tokens), : self._tokens.shape[1]] = self._logprobs
        self._tokens, self._logprobs = tokens, logprobs

    @torch.inference_mode()
    def step(self) -> list[Job]:
        """Decode one token for every running sample; returns the jobs that this finishes."""
        rows = self.num_rows
        last_tokens = self._tokens[np.arange(rows), self._produced - 1].astype(np.int64)
        # The token sampled last has no key and value yet: this step writes them at `length`.
        longest = int(self._length.max())
        lengths = torch.from_numpy(self._length).to(self._device)
        self._cache.begin_step(lengths, longest)
        mask = torch.arange(longest + 1, device=self._device)[None, :] <= lengths[:, None]
        positions = torch.from_numpy(self._position).to(self._device)[None, :, None].expand(3, rows, 1)
        hidden = self._backbone.hidden_states(
            torch.from_numpy(last_tokens)[:, None].to(self._device),
            positions,
            mask[:, None, None, :],
            cache=self._cache,
        )
        self._length += 1
        self._position += 1
        return self._choose(self._backbone.logits(hidden[:, 0]), 0)

    def _choose(self, logits: Tensor, first: int) -> list[Job]:
        """Sample one token for the rows from `first` on (logits [R, V]) and retire what is finished."""
        rows = slice(first, self.num_rows)
        temperature, top_p, top_k = self._temperature[rows], self._top_p[rows], self._top_k[rows]
        uniform = uniforms(self._seeds[rows], self._produced[rows].astype(np.uint64))
        tokens_t, logprobs_t = choose_tokens(
            logits,
            torch.from_numpy(temperature).to(self._device),
            torch.from_numpy(top_p).to(self._device) if (top_p < 1).any() else None,
            torch.from_numpy(top_k).to(self._device) if (top_k > 0).any() else None,
            torch.from_numpy(uniform).to(self._device),
        )
        tokens = tokens_t.cpu().numpy()
        index = np.arange(first, self.num_rows)
        self._tokens[index, self._produced[rows]] = tokens
        self._logprobs[index, self._produced[rows]] = logprobs_t.cpu().numpy()
        self._produced[rows] += 1
        ended = tokens == self._end_of_turn_id
        done = ended | (self._produced[rows] >= self._limit[rows])
        stops: dict[int, StopReason] = {}
        for row in np.flatnonzero(done):
            stops[first + int(row)] = StopReason.END_OF_TURN if ended[row] else StopReason.LENGTH
        for row in range(first, self.num_rows):
            job = self._jobs[row]
            if job.cancelled:
                stops[row] = StopReason.LENGTH
            elif job.request.sampling.stop and stops.get(row) is not StopReason.END_OF_TURN:
                text = self._decode(self._tokens[row, : self._produced[row]])
                if any(stop in text for stop in job.request.sampling.stop):
                    stops[row] = StopReason.STOP
        return self._retire(stops) if stops else []

    def _retire(self, stops: dict[int, StopReason]) -> list[Job]:
        finished: list[Job] = []
        for row, reason in stops.items():
            job, produced = self._jobs[row], self._produced[row]
            sample = Sample(self._tokens[row, :produced].copy(), self._logprobs[row, :produced].copy(), reason)
            job.samples[self._sample_number[row]] = sample
            if len(job.samples) == job.request.sampling.n:
                finished.append(job)
        rows = self.num_rows
        left = rows - len(stops)
        # The last surviving rows move into the holes, so that few rows are copied.
        holes = sorted(row for row in stops if row < left)
        movers = [row for row in range(left, rows) if row not in stops]
        keep = np.arange(left)
        keep[holes] = movers
        self._cache.keep(torch.from_numpy(keep).to(self._device))
        self._jobs = [self._jobs[row] for row in keep]
        self._sample_number = [self._sample_number[row] for row in keep]
        for name in ("_length", "_position", "_produced", "_limit", "_seeds", "_temperature", "_top_p", "_top_k"):
            setattr(self, name, getattr(self, name)[keep])
        self._tokens, self._logprobs = self._tokens[keep], self._logprobs[keep]
        return finished

    def completion(self, job: Job, version: int) -> Completion:
        """The answer of a finished job."""
        now = time.monotonic()
        return Completion(
            request_id=job.request.request_id,
            prompt_ids=job.prompt_ids,
            samples=tuple(job.samples[k] for k in range(job.request.sampling.n)),
            policy_version=version,
            queue_s=job.started - job.submitted,
            generate_s=now - job.started,
        )
