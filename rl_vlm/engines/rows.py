"""The running samples of the transformers engine: the calls that they answer, and their state, one entry per row."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.engines.streams import TokenStream
from rl_vlm.models.families.generic import ImageFeatures
from rl_vlm.types import Completion, GenerationRequest, Sample, StopReason, TopLogprobs

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Calls and requests, which pass from the callers' event loops to the engine's thread and back.


@dataclass(slots=True, eq=False)
class EngineCall:
    """One call of `generate`, with the future of its answers, or of `stream`."""

    requests: list[GenerationRequest]
    future: Future[list[Completion]] = field(default_factory=Future)
    stream: TokenStream | None = None
    admitted: int = 0  # requests that have begun
    prepared: list[PreparedRequest] = field(default_factory=list)  # these, in order
    unanswered: int = field(init=False)
    over: bool = False  # cancelled or rejected: none of its remaining requests is started

    def __post_init__(self) -> None:
        self.unanswered = len(self.requests)

    @property
    def policy(self) -> str:
        return self.requests[0].policy

    @property
    def base_model(self) -> bool:
        return self.requests[0].min_version == BASE_MODEL

    def fail(self, error: Exception) -> None:
        """Raise an error in the caller, unless the call has ended."""
        if self.stream is not None:
            self.stream.fail(error)
        elif not self.future.done():
            self.future.set_exception(error)


@dataclass(slots=True, eq=False)
class PreparedRequest:
    """A request in the decoder: its expanded prompt, the samples that are finished, and its answer."""

    request: GenerationRequest
    prompt_ids: np.ndarray
    positions: np.ndarray  # int64 [axes, P]
    submitted: float
    matcher: LLMatcher | None = None  # of its grammar, at the beginning
    bad_words: list[list[int]] = field(default_factory=list)  # as tokens
    scores: tuple[TopLogprobs, ...] = ()  # of the prompt, where they are asked for
    version: int = 0  # of the weights that it begins with
    features: list[ImageFeatures] = field(default_factory=list)
    started: float = 0.0
    samples: dict[int, Sample] = field(default_factory=dict)
    call: EngineCall | None = None
    answer: Completion | None = None

    @property
    def cancelled(self) -> bool:
        return self.call is not None and self.call.over

    @property
    def stream(self) -> TokenStream | None:
        return None if self.call is None else self.call.stream

    @property
    def plain(self) -> bool:
        """Whether a step only chooses the next token of its rows."""
        sampling = self.request.sampling
        looks_back = sampling.stop or self.matcher or sampling.min_tokens or sampling.ignore_eos or sampling.penalises
        return not (looks_back or sampling.logit_bias or self.bad_words or sampling.top_logprobs or self.stream)


@dataclass(slots=True, eq=False)
class RowState:
    """The part of a row that is not in arrays."""

    prepared: PreparedRequest
    number: int  # of the sample
    matcher: LLMatcher | None  # of its grammar, where the sample is
    plain: bool  # see PreparedRequest
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    changes: list[tuple[int, int]] = field(default_factory=list)  # of the weights: tokens before, and version


_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_ARRAYS = (*_SAMPLING, "length", "position", "produced", "limit", "seeds", "tokens", "logprobs")


class RowTable:
    """The state of the running samples: arrays with one entry per row, in the order of the cache."""

    def __init__(self) -> None:
        self.states: list[RowState] = []
        self.length = np.zeros(0, dtype=np.int64)  # tokens whose keys and values are cached
        self.position = np.zeros(0, dtype=np.int64)  # rotary position of the next token
        self.produced = np.zeros(0, dtype=np.int64)
        self.limit = np.zeros(0, dtype=np.int64)
        self.seeds = np.zeros(0, dtype=np.uint64)
        self.temperature = np.zeros(0, dtype=np.float32)
        self.top_p = np.zeros(0, dtype=np.float32)
        self.top_k = np.zeros(0, dtype=np.int64)
        self.min_p = np.zeros(0, dtype=np.float32)
        self.tokens = np.zeros((0, 0), dtype=np.int32)  # [rows, most new tokens]
        self.logprobs = np.zeros((0, 0), dtype=np.float32)

    def __len__(self) -> int:
        return len(self.states)

    def append(self, prepared: list[PreparedRequest], seeds: list[np.ndarray]) -> None:
        """One row per sample of each request; `seeds` holds uint64 [n] per request."""
        sampling = [item.request.sampling for item in prepared]
        copies = [params.n for params in sampling]
        self.states += [
            RowState(item, number, item.matcher and item.matcher.deep_copy(), item.plain)
            for item, n in zip(prepared, copies, strict=True)
            for number in range(n)
        ]
        new = {name: [getattr(params, name) for params in sampling] for name in _SAMPLING}
        new["length"] = [len(item.prompt_ids) for item in prepared]
        new["position"] = [int(item.positions.max()) + 1 for item in prepared]
        new["produced"] = [0] * len(prepared)
        new["limit"] = [params.max_new_tokens for params in sampling]
        for name, values in new.items():
            have = getattr(self, name)
            setattr(self, name, np.concatenate([have, np.repeat(np.array(values, dtype=have.dtype), copies)]))
        self.seeds = np.concatenate([self.seeds, *seeds])
        rows, width = self.tokens.shape
        more = (0, len(self) - rows), (0, max(int(self.limit.max()) - width, 0))
        self.tokens, self.logprobs = np.pad(self.tokens, more), np.pad(self.logprobs, more)

    def sample(self, row: int, reason: StopReason) -> Sample:
        """What a row has sampled, in pieces (tokens, version) where its weights have changed."""
        produced, state = int(self.produced[row]), self.states[row]
        tokens, logprobs = self.tokens[row, :produced].copy(), self.logprobs[row, :produced].copy()
        ends = [*(before for before, _ in state.changes), produced]
        starts = [(0, state.prepared.version), *state.changes]
        pieces = tuple((end - start, version) for (start, version), end in zip(starts, ends, strict=True))
        return Sample(tokens, logprobs, reason, tuple(state.top_logprobs), pieces if state.changes else ())

    def cached(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids int32 [L] and positions int64 [3, L] of the tokens whose keys and values a row has: all but the last."""
        prepared, said = self.states[row].prepared, self.tokens[row, : self.produced[row] - 1]
        first = int(prepared.positions.max()) + 1
        later = np.broadcast_to(np.arange(first, first + len(said)), (len(prepared.positions), len(said)))
        return np.concatenate([prepared.prompt_ids, said]), np.concatenate([prepared.positions, later], axis=1)

    def remove(self, rows: set[int]) -> np.ndarray:
        """Drop these rows, whose places the last ones take; returns int64 [rows left], the former row of each."""
        total = len(self)
        left = total - len(rows)
        keep = np.arange(left)
        keep[sorted(row for row in rows if row < left)] = [row for row in range(left, total) if row not in rows]
        self.states = [self.states[row] for row in keep]
        for name in _ARRAYS:
            setattr(self, name, getattr(self, name)[keep])
        return keep
