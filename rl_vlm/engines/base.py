"""What every engine offers, and the randomness that they share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rl_vlm.models.adapter import AdapterPayload
from rl_vlm.types import Completion, EncodedImage, GenerationRequest, RLVLMError, SampleChunk

BASE_MODEL = -1  # `min_version` of a request for the model without an adapter


class EngineError(RLVLMError):
    """The engine could not answer a request."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine is doing, and what it has done since it started."""

    requests: int = 0  # answered or not
    running: int = 0  # samples that are being generated
    waiting: int = 0  # samples that have not begun
    prompt_tokens: int = 0  # image placeholders included; once per request, whatever its number of samples
    generated_tokens: int = 0
    image_cache_hits: int = 0
    image_cache_misses: int = 0
    prefix_cache_queries: int = 0  # prompt tokens that were looked up in the prefix cache, and found there;
    prefix_cache_hits: int = 0  # both 0 in an engine without one
    mean_batch: float = 0.0  # samples per decode step
    adapter_swaps: int = 0
    last_swap_s: float = 0.0  # from the call of `load_adapter` to its end, waiting included


class Engine(Protocol):
    """Samples from one model and swaps its adapter without a restart."""

    @property
    def version(self) -> int:
        """The newest adapter version that is loaded; 0 is the model as it came."""
        ...

    @property
    def dead(self) -> bool:
        """Whether the engine can never answer again and must be replaced."""
        ...

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Answer all requests; each says which version it was sampled with. Raises EngineError."""
        ...

    def stream(self, request: GenerationRequest) -> AsyncIterator[SampleChunk]:
        """Answer one request piece by piece: chunks of all its samples, in the order in which they grow.

        Closing the iterator early frees the request's place in the engine. Raises EngineError.
        """
        ...

    def encode_images(self, images: Sequence[EncodedImage]) -> None:
        """A hint: coming requests will show these images. Returns at once; an engine may encode them, or do nothing."""
        ...

    async def load_adapter(self, payload: AdapterPayload) -> None:
        """Make a version available; requests that are running finish with the version that they started with."""
        ...

    def stats(self) -> EngineStats:
        """Counts for metrics; cheap, and callable from any thread."""
        ...

    async def sleep(self) -> None:
        """Give the device's memory back until `wake`. Raises EngineError where the engine cannot."""
        ...

    async def wake(self) -> None:
        """Take the memory again and go on. Raises EngineError where the engine cannot."""
        ...

    async def close(self) -> None:
        """Stop all work and free the model."""
        ...


_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(x: np.ndarray) -> np.ndarray:
    """The SplitMix64 finaliser, a bijective hash of uint64 (Steele, Lea and Flood, OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        x = x + _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))


def uniforms(seeds: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Uniform float64 in [0, 1) for each (seed, step), both uint64 [R].

    A sample's randomness depends on its own seed and position only, never on what else is in the batch.
    """
    with np.errstate(over="ignore"):
        mixed = splitmix64(splitmix64(seeds) ^ (steps * _GOLDEN))
    return np.asarray((mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from integers such as (run, iteration, group, sample, turn)."""
    # SplitMix64 again, on plain integers: for single numbers numpy's call overhead would dominate.
    state = 0
    for part in parts:
        state = ((state ^ (part & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1
