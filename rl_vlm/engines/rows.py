"""The running samples of the transformers engine: their state, one entry per row, their keys and values, and how a
token is chosen for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_vlm.engines.base import BASE_MODEL, TokenStream
from rl_vlm.models.families.generic import ImageFeatures
from rl_vlm.models.kernels import last_token_attention
from rl_vlm.types import Completion, GenerationRequest, Sample, SamplingParams, StopReason, TopLogprobs

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Penalties on tokens that occurred before: changes of single rows of logits, before temperature.


def penalise(
    logits: Tensor, row: int, sampling: SamplingParams, prompt_ids: np.ndarray, sampled: Sequence[int] | np.ndarray
) -> None:
    """Change one row of logits [R, V] in place, in vLLM's order.

    Repetition (CTRL, arXiv 1909.05858) divides positive logits of tokens in the prompt or the sample and multiplies
    negative ones. Of those of the sample `frequency * count + presence` is subtracted (OpenAI).
    """
    ids, counts = np.unique(np.asarray(sampled, dtype=np.int64), return_counts=True)
    if sampling.repetition_penalty != 1:
        seen = torch.from_numpy(np.union1d(np.asarray(prompt_ids, dtype=np.int64), ids)).to(logits.device)
        values = logits[row, seen]
        penalty = sampling.repetition_penalty
        logits[row, seen] = torch.where(values > 0, values / penalty, values * penalty)
    if len(ids) and (sampling.frequency_penalty or sampling.presence_penalty):
        minus = sampling.frequency_penalty * counts + sampling.presence_penalty
        logits[row, torch.from_numpy(ids).to(logits.device)] -= torch.from_numpy(minus).to(logits)


# Choosing tokens from logits: greedy, temperature, top-k, top-p, by inverse transform sampling.


class Chosen(NamedTuple):
    """One token per row [R], its log-probability float32 [R], and the log-distribution [R, V] that it is from."""

    tokens: Tensor
    logprobs: Tensor
    distribution: Tensor


def choose_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor | None,
    top_k: Tensor | None,
    uniform: Tensor,
    min_p: Tensor | None = None,
) -> Chosen:
    """Choose one token per row.

    logits float32 [R, V] with forbidden tokens at -inf; temperature float32 [R], 0 = greedy; top_p float32 [R], top_k
    int64 [R] (0 = off), min_p float32 [R] (0 = off), None when no row uses them; uniform float64 [R] in [0, 1). A
    greedy token's log-probability is that at temperature 1.
    """
    greedy = temperature == 0
    scaled = logits / torch.where(greedy, torch.ones_like(temperature), temperature)[:, None]
    if min_p is not None:
        # Before top-p, as vLLM does: tokens that min-p removes do not count towards its mass.
        floor = scaled.amax(dim=-1, keepdim=True) + min_p.log()[:, None]
        scaled = scaled.masked_fill((scaled < floor) & ~greedy[:, None], float("-inf"))
    if top_k is not None or top_p is not None:
        scaled = _restrict(scaled, top_p, top_k, greedy)
    logprobs = torch.log_softmax(scaled, dim=-1)
    num_greedy = int(greedy.sum())
    tokens = scaled.argmax(dim=-1) if num_greedy else _drawn(logprobs, uniform)  # greedy rows need no running sums
    if 0 < num_greedy < len(greedy):
        tokens = torch.where(greedy, tokens, _drawn(logprobs, uniform))
    return Chosen(tokens, logprobs.gather(1, tokens[:, None])[:, 0], logprobs)


def _drawn(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Token ids int64 [R] at which the running sum of the probabilities [R, V] passes uniform [R]."""
    cumulative = torch.softmax(logprobs, -1).cumsum(-1, dtype=torch.float64)  # keeps small tails; exp is slow at -inf
    total = cumulative[:, -1:].contiguous()
    drawn = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)[:, 0]
    # Rounding can put u·total on the total itself: stay on the last token that has any probability.
    last = torch.searchsorted(cumulative, total)[:, 0]
    return torch.minimum(drawn, last)


def most_likely(distribution: Tensor, counts: list[int]) -> list[tuple[tuple[int, float], ...]]:
    """Per row of a log-distribution [R, V] the `counts[r]` most likely tokens: (id, log-probability), best first."""
    values, ids = distribution.topk(min(max(counts), distribution.shape[1]), dim=-1)
    rows = zip(ids.tolist(), values.tolist(), counts, strict=True)
    return [
        tuple((token, value) for token, value in zip(tokens[:count], scores[:count], strict=True) if value > -torch.inf)
        for tokens, scores, count in rows
    ]


def _restrict(scaled: Tensor, top_p: Tensor | None, top_k: Tensor | None, greedy: Tensor) -> Tensor:
    """Set what top-k and then top-p (nucleus, arXiv 1904.09751) leave out to -inf."""
    ordered, order = scaled.sort(dim=-1, descending=True)
    drop = torch.zeros_like(scaled, dtype=torch.bool)
    if top_k is not None:
        rank = torch.arange(scaled.shape[1], device=scaled.device)[None, :]
        drop |= (top_k[:, None] > 0) & (rank >= top_k[:, None])
    if top_p is not None:
        kept = torch.softmax(ordered.masked_fill(drop, float("-inf")), dim=-1)
        # Keep tokens until the mass before them reaches p: the first token always stays. A row without top-p loses
        # nothing: rounding can bring its running sum to 1 before the last tokens.
        drop |= (top_p[:, None] < 1) & ((kept.cumsum(dim=-1) - kept) >= top_p[:, None])
    drop[:, 0] = False
    drop &= ~greedy[:, None]
    return scaled.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), float("-inf"))


# Keys and values of the running rows: lengths are whole blocks, with memory for at most so many rows for each in use.

KV_BLOCK, KV_ROWS_PER_USED = 64, 2
_ALIGN = 8  # the attended window is a multiple of this, as CUDA's attention kernels require


def reserved_tokens(rows: int, length: int) -> int:
    """The most tokens that a cache has memory for while `rows` samples of up to `length` tokens run in it."""
    return KV_ROWS_PER_USED * rows * whole_blocks(length)


def whole_blocks(length: int) -> int:
    """`length` rounded up to whole blocks, so that the tensors are rarely reallocated."""
    return -(-length // KV_BLOCK) * KV_BLOCK


class RowCache:
    """One row of keys and values per running sample, each with its own length.

    Tensors are [rows, heads, capacity, head_dim]; rows [0, num_rows) are in use. There is memory for at most
    KV_ROWS_PER_USED rows for each of these, of the longest length since the cache was empty.
    """

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.num_rows = 0
        self._lengths = torch.empty(0, dtype=torch.long)
        self._write_at: dict[tuple[int, int], Tensor] = {}  # by heads and capacity of a layer's tensors
        self._bias: Tensor | None = None
        self._window = 0

    @property
    def length(self) -> int:
        """Tokens that each row has memory for."""
        return self._keys[0].shape[2] if self._keys else 0

    def admit(self, layers: list[tuple[Tensor, Tensor]], source: Tensor, max_length: int) -> None:
        """Copy prefilled keys and values, per layer [P, heads, L, head_dim], into new rows, which can become
        `max_length` long; source int64 [R] is the prefilled row of each."""
        new, length = slice(self.num_rows, self.num_rows + len(source)), layers[0][0].shape[2]
        self._reserve(layers, new.stop, max(max_length, length))
        for k, (keys, values) in enumerate(layers):
            self._keys[k][new, :, :length] = keys[source]
            self._values[k][new, :, :length] = values[source]
        self.num_rows = new.stop

    def replace(self, layers: list[tuple[Tensor, Tensor]], rows: Tensor) -> None:
        """Overwrite rows int64 [B] with per layer [B, heads, L, head_dim], padded where a row holds fewer."""
        length = layers[0][0].shape[2]
        for k, (keys, values) in enumerate(layers):
            self._keys[k][rows, :, :length] = keys
            self._values[k][rows, :, :length] = values

    def begin_step(self, lengths: Tensor, shortest: int, longest: int) -> None:
        """Prepare a decode step, in which row r writes its new key and value at position lengths[r]; int64 [rows]."""
        capacity = self._keys[0].shape[2]
        self._lengths, self._write_at = lengths, {}
        if shortest == longest:
            self._window, self._bias = longest + 1, None  # every row sees the whole window
            return
        self._window = min(-(-(longest + 1) // _ALIGN) * _ALIGN, capacity)
        seen = torch.arange(self._window, device=lengths.device)[None, :] <= lengths[:, None]
        bias = torch.zeros(seen.shape, dtype=self._keys[0].dtype, device=lengths.device)
        self._bias = bias.masked_fill_(~seen, float("-inf"))[:, None, None]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Store a key and value per row [rows, heads, head_dim] and attend with queries [rows, query heads, head_dim];
        returns [rows, query heads * head_dim]."""
        keys, values = self.store(layer, keys, values)
        return last_token_attention(queries, keys, values, self._bias, scale)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store a key and value per row [rows, heads, head_dim]; returns all seen [rows, heads, window, head_dim]."""
        mine, theirs = self._keys[layer], self._values[layer]
        heads, capacity = mine.shape[1:3]
        if (places := self._write_at.get((heads, capacity))) is None:  # in the tensor as [rows * heads * capacity]
            rows = torch.arange(len(keys) * heads, device=keys.device)
            places = self._write_at[heads, capacity] = rows * capacity + self._lengths.repeat_interleave(heads)
        for tensor, new in ((mine, keys), (theirs, values)):
            size = new.shape[-1]
            tensor.view(-1, size).index_copy_(0, places, new.reshape(-1, size))
        count, seen = len(keys), slice(self._window)
        return mine[:count, :, seen], theirs[:count, :, seen]

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, in this order; int64 [K]. Only rows that change place are copied."""
        index = torch.arange(len(rows), device=rows.device)
        moved = rows != index
        if bool(moved.any()):
            source, target = rows[moved], index[moved]
            for tensors in (self._keys, self._values):
                for tensor in tensors:
                    tensor[target] = tensor[source]
        self.num_rows = len(rows)
        if not len(rows):
            self._keys, self._values = [], []

    def _reserve(self, layers: list[tuple[Tensor, Tensor]], rows: int, length: int) -> None:
        length = whole_blocks(length)
        if not self._keys:
            for keys, values in layers:
                self._keys.append(keys.new_zeros(rows, keys.shape[1], length, keys.shape[3]))
                self._values.append(values.new_zeros(rows, values.shape[1], length, values.shape[3]))
            return
        have_rows, have_length = self._keys[0].shape[0], self._keys[0].shape[2]
        if rows <= have_rows and length <= have_length:
            return
        if rows > have_rows:  # doubled, so that the copying is linear in the number of admissions
            new_rows = max(rows, KV_ROWS_PER_USED * have_rows)
        else:  # spare rows of a larger batch would become longer, too: they are given up
            new_rows = min(have_rows, KV_ROWS_PER_USED * rows)
        new_length = max(length, have_length)
        for tensors in (self._keys, self._values):
            for k, tensor in enumerate(tensors):
                grown = tensor.new_zeros(new_rows, tensor.shape[1], new_length, tensor.shape[3])
                grown[: self.num_rows, :, :have_length] = tensor[: self.num_rows]
                tensors[k] = grown


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
