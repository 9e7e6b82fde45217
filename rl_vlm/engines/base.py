"""The interface of an engine: samples from one model, with adapters that can be replaced."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rl_vlm.models.images import TextSide
from rl_vlm.models.weights import WeightPayload
from rl_vlm.types import (
    Completion,
    EncodedImage,
    GenerationRequest,
    RLVLMError,
    SampleChunk,
    SamplingParams,
    UserInputError,
)

BASE_MODEL = -1  # `min_version` of a request for the model without an adapter


class EngineError(RLVLMError):
    """The engine could not answer a request.

    Do: read the replica's log; the request is tried again elsewhere.
    """


class RequestTooLargeError(EngineError):
    """No replica has memory for this request, now or later: the caller must ask for less.

    Do: ask for fewer samples or tokens, or raise `serving.max_kv_gib`.
    """


class VersionGoneError(EngineError):
    """The one version that may answer has been replaced.

    Do: ask for a version of `GET /v1/models`.
    """


def check_version(request: GenerationRequest, version: int) -> None:
    """Raise EngineError where the request does not allow that `version` answers."""
    if request.exact and version > request.min_version:
        raise VersionGoneError(f"Version {request.min_version} of {request.policy} is gone: ask for version {version}.")
    if request.min_version > version:
        raise EngineError(
            f"Request {request.request_id}: policy {request.policy} has no version {request.min_version} here, the "
            f"newest is {version}."
        )


@contextlib.contextmanager
def naming(request: GenerationRequest) -> Iterator[None]:
    """A UserInputError inside becomes an EngineError about the request."""
    try:
        yield
    except UserInputError as error:
        raise EngineError(f"Request {request.request_id}: {error}") from error


def expand_prompt(request: GenerationRequest, text: TextSide, max_context: int) -> np.ndarray:
    """The request's prompt int32 [P] with the tokens of each image. Raises EngineError where it does not fit its images
    or, with all new tokens, the context."""
    name, new_tokens = request.request_id, request.sampling.max_new_tokens
    with naming(request):
        ids = text.expand(request.prompt_ids, request.images, name)
    if len(ids) + new_tokens > max_context:
        raise EngineError(
            f"Request {name}: {len(ids)} prompt tokens and {new_tokens} new ones exceed the context of {max_context}: "
            "raise serving.max_context or send less."
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
    progress: int = 0  # grows with every forward pass, and within long ones: busy is not hung
    image_cache_hits: int = 0
    image_cache_misses: int = 0
    prefix_cache_queries: int = 0  # prompt tokens that were looked up in a prefix cache, and found there
    prefix_cache_hits: int = 0
    mean_batch: float = 0.0  # samples per decode step
    adapter_swaps: int = 0
    last_swap_s: float = 0.0  # from the call of `load_adapter` to its end, waiting included


class Engine(Protocol):
    """Samples from one model and swaps its adapter without a restart."""

    @property
    def version(self) -> int:
        """The newest version that is loaded, of any policy; 0 is the model as it came."""

    @property
    def dead(self) -> bool:
        """Whether the engine can never answer again and must be replaced."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Answer all requests, in order. Cancelling the call stops work on them. Raises EngineError."""

    def stream(self, request: GenerationRequest) -> AsyncIterator[SampleChunk]:
        """Answer one request piece by piece: chunks of all its samples, in the order in which they grow, longer ones
        for a slow reader. Closing the iterator stops work on it. Raises EngineError."""

    def encode_images(self, images: Sequence[EncodedImage]) -> None:
        """A hint that later requests will contain these images. Returns at once."""

    async def load_adapter(self, payload: WeightPayload) -> None:
        """Serve a version to every request of its policy that starts from now on. Running samples finish with the
        version that they started with or, with in-flight updates, go on with this one."""

    async def drop_policy(self, policy: str) -> None:
        """Forget a policy that no request will name again; its running samples finish."""

    async def sleep(self) -> None:
        """Finish what is running and give back the memory that sampling alone needs, until `wake`; new requests wait.
        A second call does nothing. Raises EngineError."""

    async def wake(self) -> None:
        """Take that memory again and go on; nothing where the engine is awake. Raises EngineError."""

    def stats(self) -> EngineStats:
        """Counts for metrics; cheap, and callable from any thread."""

    async def close(self) -> None:
        """Stop all work and free the model; calls that wait get an EngineError."""


# The texts of a guided choice as tokens. Without torch: HTTP asks before the engine does.

TokenSequence = tuple[int, ...]
Encode = Callable[[str], np.ndarray]
Decode = Callable[[np.ndarray], str]


def choice_tokens(sampling: SamplingParams, encode: Encode, decode: Decode) -> tuple[TokenSequence, ...]:
    """The choices as token ids, each in the tokenizer's own tokenisation: the only one that may be sampled, so that
    every text has one log-probability. Raises UserInputError for a choice that no sample could be."""
    sequences = []
    for choice in sampling.choices:
        ids = encode(choice)
        if decode(ids) != choice:
            raise UserInputError(
                f"The tokenizer cannot write the choice {choice!r} as it is: normalise the text (NFC)."
            )
        if len(ids) >= sampling.max_new_tokens:
            raise UserInputError(
                f"The choice {choice!r} takes {len(ids) + 1} tokens with its end, and max_new_tokens is "
                f"{sampling.max_new_tokens}: raise it (max_tokens of a chat)."
            )
        if stop := next((stop for stop in sampling.stop if stop in choice), None):
            raise UserInputError(f"The stop string {stop!r} would cut the choice {choice!r}: remove it.")
        sequences.append(tuple(ids.tolist()))
    return tuple(sequences)
