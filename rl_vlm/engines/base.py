"""The interface of an engine: samples from one model, with adapters that can be replaced."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rl_vlm.chat import expand_image_tokens
from rl_vlm.models.payload import WeightPayload
from rl_vlm.types import Completion, EncodedImage, GenerationRequest, RLVLMError, SampleChunk, UserInputError

BASE_MODEL = -1  # `min_version` of a request for the model without an adapter


class EngineError(RLVLMError):
    """The engine could not answer a request."""


class RequestTooLargeError(EngineError):
    """No replica has memory for this request, now or later: the caller must ask for less."""


def check_version(request: GenerationRequest, version: int) -> None:
    """Raise EngineError where `version`, which would answer, is older than the request allows."""
    if request.min_version > version:
        raise EngineError(
            f"Request {request.request_id}: policy {request.policy} has no version {request.min_version} here, the newest is "
            f"{version}."
        )


def expand_prompt(
    request: GenerationRequest, count_tokens: Callable[[int, int], int], image_token_id: int, max_context: int
) -> np.ndarray:
    """The request's prompt int32 [P] with as many placeholders per image as `count_tokens` says of its width and height.

    Raises EngineError where it does not fit its images or, with all new tokens, the context.
    """
    name, new_tokens = request.request_id, request.sampling.max_new_tokens
    try:
        counts = [count_tokens(image.width, image.height) for image in request.images]
        ids = expand_image_tokens(request.prompt_ids, image_token_id, counts, name)
    except UserInputError as error:
        raise EngineError(f"Request {name}: {error}") from error
    if len(ids) + new_tokens > max_context:
        raise EngineError(
            f"Request {name}: {len(ids)} prompt tokens and {new_tokens} new ones exceed the context of {max_context}: raise "
            "serving.max_context or send less."
        )
    return ids


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine is doing, and what it has done since it started."""

    requests: int = 0  # received, whether answered or not
    running: int = 0  # samples that are being generated
    waiting: int = 0  # samples that have not begun
    prompt_tokens: int = 0  # image placeholders included; once per request, whatever its number of samples
    generated_tokens: int = 0  # of samples that are still running, too
    progress: int = 0  # grows with every forward pass, and within those that may take long: busy is not hung
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
        """The newest adapter version that is loaded, of any policy; 0 is the model as it came."""
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
        """A hint that later requests will contain these images. Returns at once; an engine may encode them or do nothing."""
        ...

    async def load_adapter(self, payload: WeightPayload) -> None:
        """Make a version of its policy available. Samples that are running finish with the version that they started with or, in an engine with
        in-flight updates, go on with this one."""
        ...

    async def drop_policy(self, policy: str) -> None:
        """Forget a policy that nobody will ask for again, and free its memory once its running samples are finished."""
        ...

    async def sleep(self) -> None:
        """Finish what is running and give back the memory that sampling alone needs, until `wake`; requests that come wait. A second
        call does nothing. Raises EngineError."""
        ...

    async def wake(self) -> None:
        """Take that memory again and go on. Does nothing to an engine that is awake. Raises EngineError."""
        ...

    def stats(self) -> EngineStats:
        """Counts for metrics; cheap, and callable from any thread."""
        ...

    async def close(self) -> None:
        """Stop all work and free the model."""
        ...
