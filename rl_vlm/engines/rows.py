"""The state of the running samples: arrays with one entry per row, in the order of the key-value cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rl_vlm.engines.choices import ChoiceNode
from rl_vlm.engines.streams import TokenStream
from rl_vlm.models.backbone import ImageFeatures
from rl_vlm.types import GenerationRequest, Sample, StopReason, TopLogprobs

_VECTORS = ("length", "position", "produced", "limit", "seeds", "temperature", "top_p", "top_k", "min_p")


@dataclass(slots=True, eq=False)
class PreparedRequest:
    """A request in the decoder: its expanded prompt, and the samples that are finished."""

    request: GenerationRequest
    prompt_ids: np.ndarray
    positions: np.ndarray  # int64 [3, P]
    submitted: float
    choices: ChoiceNode | None = None
    version: int = 0  # of the weights that it begins with
    features: list[ImageFeatures] = field(default_factory=list)
    started: float = 0.0
    samples: dict[int, Sample] = field(default_factory=dict)
    cancelled: bool = False
    stream: TokenStream | None = None

    @property
    def plain(self) -> bool:
        """Whether a step has nothing to do for its rows beyond the next token: no rule that depends on earlier tokens, and no stream."""
        sampling = self.request.sampling
        looks_back = (
            sampling.stop or sampling.choices or sampling.min_tokens or sampling.ignore_eos or sampling.penalises
        )
        return not (looks_back or sampling.top_logprobs or self.stream)


@dataclass(slots=True, eq=False)
class RowState:
    """The part of a row that is not in arrays: its request and sample number, its place in the choice trie, its top log-probabilities,
    and (tokens before, version) of each change of the weights under it."""

    prepared: PreparedRequest
    number: int
    node: ChoiceNode | None
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    changes: list[tuple[int, int]] = field(default_factory=list)

    def pieces(self, produced: int) -> tuple[tuple[int, int], ...]:
        """(tokens, version) of each version that sampled some of the `produced` tokens; empty if it was one all the time."""
        if not self.changes:
            return ()
        ends = [before for before, _ in self.changes] + [produced]
        starts = [(0, self.prepared.version), *self.changes]
        return tuple((end - start, version) for (start, version), end in zip(starts, ends, strict=True))


class RowTable:
    """The rows. All arrays have one entry per row."""

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
            RowState(item, number, item.choices)
            for item, n in zip(prepared, copies, strict=True)
            for number in range(n)
        ]
        new = {
            "length": [len(item.prompt_ids) for item in prepared],
            "position": [int(item.positions.max()) + 1 for item in prepared],
            "produced": [0] * len(prepared),
            "limit": [params.max_new_tokens for params in sampling],
            "temperature": [params.temperature for params in sampling],
            "top_p": [params.top_p for params in sampling],
            "top_k": [params.top_k for params in sampling],
            "min_p": [params.min_p for params in sampling],
        }
        for name, values in new.items():
            have = getattr(self, name)
            setattr(self, name, np.concatenate([have, np.repeat(np.array(values, dtype=have.dtype), copies)]))
        self.seeds = np.concatenate([self.seeds, *seeds])
        width = max(int(self.limit.max()), self.tokens.shape[1])
        self.tokens, self.logprobs = (self._grown(have, width) for have in (self.tokens, self.logprobs))

    def _grown(self, have: np.ndarray, width: int) -> np.ndarray:
        grown = np.zeros((len(self), width), dtype=have.dtype)
        grown[: have.shape[0], : have.shape[1]] = have
        return grown

    def sample(self, row: int, reason: StopReason) -> Sample:
        """What a row has sampled."""
        produced, state = int(self.produced[row]), self.states[row]
        tokens, logprobs = self.tokens[row, :produced].copy(), self.logprobs[row, :produced].copy()
        return Sample(tokens, logprobs, reason, tuple(state.top_logprobs), state.pieces(produced))

    def cached(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids int32 [L] and positions int64 [3, L] of what a row's keys and values are of: all but the token sampled last."""
        prepared, said = self.states[row].prepared, self.tokens[row, : self.produced[row] - 1]
        first = int(prepared.positions.max()) + 1
        later = np.broadcast_to(np.arange(first, first + len(said)), (3, len(said)))
        return np.concatenate([prepared.prompt_ids, said]), np.concatenate([prepared.positions, later], axis=1)

    def remove(self, rows: set[int]) -> np.ndarray:
        """Drop these rows; returns int64 [rows left]: the former row of each remaining one.

        The last remaining rows take the places of removed ones, so that few rows are copied.
        """
        total = len(self)
        left = total - len(rows)
        keep = np.arange(left)
        keep[sorted(row for row in rows if row < left)] = [row for row in range(left, total) if row not in rows]
        self.states = [self.states[row] for row in keep]
        for name in (*_VECTORS, "tokens", "logprobs"):
            setattr(self, name, getattr(self, name)[keep])
        return keep
