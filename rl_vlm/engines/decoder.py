"""Batched decoding with transformers: prefill once per prompt, then one step at a time for all running samples.

No threads and no asyncio: `transformers_engine.py` drives it. New prompts may join between any two steps.
"""

from __future__ import annotations

import copy
import functools
import pkgutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from rl_vlm.batches import in_batches
from rl_vlm.engines.base import EngineError, expand_prompt, naming
from rl_vlm.engines.cache import RowCache
from rl_vlm.engines.grammars import Grammars, forbidden_tokens
from rl_vlm.engines.model_text import ModelText
from rl_vlm.engines.rows import PreparedRequest, RowTable
from rl_vlm.engines.sampling import Chosen, choose_tokens, most_likely, penalise
from rl_vlm.engines.sizes import PREFILL_TOKENS
from rl_vlm.engines.streams import NewTokens
from rl_vlm.models.families import family_of
from rl_vlm.models.families.generic import Backbone, ImageFeatures, KeysValues
from rl_vlm.models.images import TextSide
from rl_vlm.seeding import uniforms
from rl_vlm.types import Completion, GenerationRequest, StopReason, TopLogprobs, UserInputError

_AHEAD, _WIDE = ThreadPoolExecutor(1, "grammars"), 2**14  # grammars beside the model; not worth it for fewer tokens
_SCORED = 512  # prompt tokens whose logits are in memory at a time


T = TypeVar("T")


class Decoder:
    """Runs requests on one backbone; `max_context` is of prompt and new tokens of a sample."""

    def __init__(self, backbone: Backbone, text: TextSide, *, max_context: int) -> None:
        self._backbone = backbone
        self._side, self._codec = text, text.codec
        self._max_context = max_context
        self._device = backbone.device
        name = family_of(backbone.model.config.model_type).text_model
        self._text: Any = pkgutil.resolve_name(name)(backbone, max_context) if name else ModelText(backbone)
        self._random = np.random.default_rng()
        self.grammars = Grammars(text)
        self.counts = Counter[str]()  # prompt_tokens, generated_tokens, decode steps, and step_rows, summed over steps
        self.clear()

    def clear(self) -> None:
        """Drop all rows, including rows that a failed step left incomplete."""
        self._cache = self._text.new_cache() if isinstance(self._text, ModelText) else RowCache()
        self._rows = RowTable()

    def sibling(self) -> Decoder:
        """A decoder of the same model with rows of its own and the same counts."""
        other = copy.copy(self)
        other.clear()
        return other

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def row_length(self) -> int:
        """Tokens that each running sample has memory for; 0 while none runs."""
        return self._cache.length

    def longest(self, request: GenerationRequest) -> int:
        """Tokens that a sample of the request may have at its end, with prompt and images."""
        count = self._backbone.images.count_tokens
        try:
            images = sum(count(image.width, image.height) - 1 for image in request.images)
        except UserInputError:
            return self._max_context  # `prepare` rejects it
        return min(len(request.prompt_ids) + images + request.sampling.max_new_tokens, self._max_context)

    @property
    def progress(self) -> int:
        """Grows while a forward pass of the language model is under way, too."""
        return self._text.parts_done

    def prepare(self, requests: Sequence[GenerationRequest]) -> list[PreparedRequest | EngineError]:
        """Expand prompts and encode all images together. An error stands for a request that cannot be answered."""
        prepared: list[PreparedRequest | EngineError] = []
        for request in requests:
            try:
                prepared.append(self._expanded(request))
            except EngineError as error:
                prepared.append(error)
        try:
            self._encode_images([item for item in prepared if isinstance(item, PreparedRequest)])
        except UserInputError as error:
            if len(requests) == 1:
                return [EngineError(f"Request {requests[0].request_id}: {error}")]
            # One of the images is damaged: find the request that holds it.
            return [one for request in requests for one in self.prepare([request])]
        return prepared

    def _expanded(self, request: GenerationRequest) -> PreparedRequest:
        name = request.request_id
        ids = expand_prompt(request, self._side, self._max_context)
        if not len(ids) or ids.min() < 0 or ids.max() >= len(self._backbone.token_bias):
            raise EngineError(f"Request {name}: the prompt is empty or holds ids that the model does not know.")
        with naming(request):
            matcher = self.grammars.matcher(request.sampling)
            bad = [tokens for word in request.sampling.bad_words for tokens in self._codec.forms_of_word(word)]
        positions = self._side.images.positions(ids, request.images)
        return PreparedRequest(request, ids, positions, time.monotonic(), matcher, bad)

    def _encode_images(self, prepared: Sequence[PreparedRequest]) -> None:
        images = [image for item in prepared for image in item.request.images]
        features = iter(self._backbone.image_features(images) if images else [])
        for item in prepared:
            item.features = [next(features) for _ in item.request.images]

    @torch.inference_mode()
    def admit(self, prepared: Sequence[PreparedRequest]) -> list[PreparedRequest]:
        """Prefill requests, sorted by length, and sample their first tokens; returns the finished ones."""
        batches = self._batches(prepared, lambda item: len(item.prompt_ids))
        return [item for batch in batches for item in self._prefill(batch)]

    def _prefill(self, prepared: list[PreparedRequest]) -> list[PreparedRequest]:
        hidden, layers = self._forward([(item.prompt_ids, item.positions, item.features) for item in prepared])
        logits = self._backbone.logits(hidden)

        source = np.repeat(np.arange(len(prepared)), [item.request.sampling.n for item in prepared])
        source_t = torch.from_numpy(source).to(self._device)
        self._cache.admit(
            layers, source_t, max(len(item.prompt_ids) + item.request.sampling.max_new_tokens for item in prepared)
        )
        first = self.num_rows
        now = time.monotonic()
        for item in prepared:
            item.started = now
            if item.request.sampling.prompt_logprobs is not None:
                item.scores = self._scores(item, item.request.sampling.prompt_logprobs)
            item.features = []  # the backbone's own cache may still hold them
        self._rows.append(prepared, [self._seeds_of(item.request) for item in prepared])
        self.counts["prompt_tokens"] += sum(len(item.prompt_ids) for item in prepared)
        return self._choose(logits[source_t], first, self._forbidden(first))

    def _forward(
        self, sequences: Sequence[tuple[np.ndarray, np.ndarray, list[ImageFeatures]]]
    ) -> tuple[Tensor, KeysValues]:
        """`TextModel.prefill` of sequences: ids [L], positions int64 [axes, L], features of the images."""
        lengths = np.array([len(own) for own, _, _ in sequences])
        longest = int(lengths.max())
        ids = np.full((len(sequences), longest), self._codec.pad_token_id, dtype=np.int64)
        positions = np.zeros((len(sequences[0][1]), len(sequences), longest), dtype=np.int64)
        for row, (own, row_positions, _) in enumerate(sequences):
            ids[row, : lengths[row]] = own
            positions[:, row, : lengths[row]] = row_positions
        return self._text.prefill(
            torch.from_numpy(ids).to(self._device),
            torch.from_numpy(positions).to(self._device),
            torch.from_numpy(lengths).to(self._device),
            [feature for _, _, features in sequences for feature in features],
        )

    def _scores(self, item: PreparedRequest, top: int) -> tuple[TopLogprobs, ...]:
        """What the model's own distribution says of each prompt token, as `Completion.prompt_logprobs`."""
        backbone, ids = self._backbone, torch.from_numpy(item.prompt_ids.astype(np.int64)).to(self._device)
        positions = torch.from_numpy(item.positions).to(self._device)[:, None]
        attention = backbone.attention(np.zeros((1, len(ids)), dtype=np.int64))
        hidden = backbone.hidden_states(ids[None], positions, attention, item.features)[0]
        scores: list[TopLogprobs] = []
        for some, own in zip(hidden[:-1].split(_SCORED), ids[1:].split(_SCORED), strict=True):
            logprobs = torch.log_softmax(backbone.logits(some, suppress=False), -1)
            values = logprobs.gather(1, own[:, None])[:, 0].tolist()
            likeliest = most_likely(logprobs, [top] * len(own))
            scores += [((t, v), *more) for t, v, more in zip(own.tolist(), values, likeliest, strict=True)]
        return tuple(scores)

    def change_version(self, version: int, *, recompute: bool) -> None:
        """Go on with the weights of `version`, which are in place, and with `recompute` with their keys and values."""
        for state, produced in zip(self._rows.states, self._rows.produced.tolist(), strict=True):
            state.changes.append((produced, version))
            if (stream := state.prepared.stream) is not None:
                stream.policy_version = version
        if not recompute:
            return
        rows = self._rows
        prepared = list({id(state.prepared): state.prepared for state in rows.states}.values())
        self._encode_images(prepared)
        with torch.inference_mode():
            for batch in self._batches(range(len(rows)), lambda row: int(rows.length[row])):
                _, layers = self._forward([(*rows.cached(row), rows.states[row].prepared.features) for row in batch])
                self._cache.replace(layers, torch.tensor(batch, device=self._device))
        for item in prepared:
            item.features = []

    @torch.inference_mode()
    def drop_cancelled(self) -> list[PreparedRequest]:
        """Retire the rows of cancelled requests without a step; returns the requests that this finishes."""
        gone = [row for row, state in enumerate(self._rows.states) if state.prepared.cancelled]
        return self._retire(dict.fromkeys(gone, StopReason.LENGTH)) if gone else []

    def _seeds_of(self, request: GenerationRequest) -> np.ndarray:
        sampling = request.sampling
        if sampling.seeds is not None:
            return np.array(sampling.seeds, dtype=np.uint64)
        return self._random.integers(0, 2**63, size=sampling.n, dtype=np.uint64)

    @torch.inference_mode()
    def step(self) -> list[PreparedRequest]:
        """Decode one token for every running sample; returns the requests that this finishes."""
        rows, forbidden = self._rows, self._forbidden(0)
        last_tokens = rows.tokens[np.arange(len(rows)), rows.produced - 1].astype(np.int64)
        # The token sampled last has no key and value yet: this step writes them at `length`.
        lengths = torch.from_numpy(rows.length).to(self._device)
        self._cache.begin_step(lengths, int(rows.length.min()), int(rows.length.max()))
        hidden = self._text.step(
            torch.from_numpy(last_tokens).to(self._device),
            torch.from_numpy(rows.position).to(self._device),
            self._cache,
        )
        rows.length += 1
        rows.position += 1
        self.counts["steps"] += 1
        self.counts["step_rows"] += len(rows)
        return self._choose(self._backbone.logits(hidden), 0, forbidden)

    def _forbidden(self, first: int) -> Callable[[], np.ndarray] | None:
        """What the grammars of the rows from `first` on forbid; None where none has one."""
        matchers, size = [state.matcher for state in self._rows.states[first:]], len(self._backbone.token_bias)
        work = functools.partial(forbidden_tokens, matchers, size)
        return (_AHEAD.submit(work).result if size >= _WIDE else work) if any(matchers) else None

    def _choose(self, logits: Tensor, first: int, forbidden: Callable[[], np.ndarray] | None) -> list[PreparedRequest]:
        """Sample one token for the rows from `first` on (logits [R, V]) and retire what is finished."""
        rows = self._rows
        new = slice(first, len(rows))
        special = [row for row in range(first, len(rows)) if not rows.states[row].plain]
        if forbidden is not None:
            logits.masked_fill_(torch.from_numpy(forbidden()).to(self._device), float("-inf"))
        self._restrict_by_past(logits, special, first)

        def moved(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(self._device)

        top_p, top_k, min_p = rows.top_p[new], rows.top_k[new], rows.min_p[new]
        chosen = choose_tokens(
            logits,
            moved(rows.temperature[new]),
            moved(top_p) if (top_p < 1).any() else None,
            moved(top_k) if (top_k > 0).any() else None,
            moved(uniforms(rows.seeds[new], rows.produced[new].astype(np.uint64))),
            moved(min_p) if (min_p > 0).any() else None,
        )
        tokens = chosen.tokens.cpu().numpy()
        index = np.arange(first, len(rows))
        rows.tokens[index, rows.produced[new]] = tokens
        rows.logprobs[index, rows.produced[new]] = chosen.logprobs.cpu().numpy()
        rows.produced[new] += 1
        self.counts["generated_tokens"] += len(tokens)
        ended = tokens == self._codec.end_of_turn_id
        ended[[row - first for row in special if rows.states[row].prepared.request.sampling.ignore_eos]] = False
        stops: dict[int, StopReason] = {}
        for row in np.flatnonzero(ended | (rows.produced[new] >= rows.limit[new])).tolist():
            stops[first + row] = StopReason.END_OF_TURN if ended[row] else StopReason.LENGTH
        if special:
            self._record_top_logprobs(special, chosen, first)
            self._advance(special, stops)
        return self._retire(stops) if stops else []

    def _restrict_by_past(self, logits: Tensor, special: list[int], first: int) -> None:
        """Forbid bad words and an early end of turn, add biases and apply penalties, in the rows of logits [R, V] that
        ask, in vLLM's order."""
        rows = self._rows
        for row in special:
            item, produced = rows.states[row].prepared, int(rows.produced[row])
            sampling = item.request.sampling
            for *before, banned in item.bad_words:
                if rows.tokens[row, max(produced - len(before), 0) : produced].tolist() == before:
                    logits[row - first, banned] = float("-inf")
            if produced < sampling.min_tokens:
                logits[row - first, self._codec.end_of_turn_id] = float("-inf")
            for token, bias in sampling.logit_bias:
                logits[row - first, token] += bias
            if sampling.penalises:
                penalise(logits, row - first, sampling, item.prompt_ids, rows.tokens[row, :produced])

    def _record_top_logprobs(self, special: list[int], chosen: Chosen, first: int) -> None:
        states = self._rows.states
        asked = [row for row in special if states[row].prepared.request.sampling.top_logprobs]
        if asked:
            counts = [states[row].prepared.request.sampling.top_logprobs for row in asked]
            likeliest = most_likely(chosen.distribution[[row - first for row in asked]], counts)
            for row, alternatives in zip(asked, likeliest, strict=True):
                states[row].top_logprobs.append(alternatives)

    def _advance(self, special: list[int], stops: dict[int, StopReason]) -> None:
        """Search for stop strings (added to `stops`), follow grammars, and feed the streams."""
        rows = self._rows
        for row in special:
            state, last = rows.states[row], rows.produced[row] - 1
            sampling = state.prepared.request.sampling
            stop = sampling.stop
            if stop and last >= sampling.min_tokens and stops.get(row) is not StopReason.END_OF_TURN:
                # A token has at least one byte, so a stop string that ends here lies within this window. Three more
                # tokens keep a character whole whose bytes are separate tokens.
                window = max(len(string.encode()) for string in stop) + 3
                ids = rows.tokens[row, max(last + 1 - window, 0) : last + 1]
                text = self._codec.decode(ids)
                # It must end within the last token: one that was complete before `min_tokens` does not count.
                before = self._codec.decode(ids[:-1]).rstrip("\ufffd") if sampling.min_tokens else ""
                if any(text.find(string, max(len(before) - len(string) + 1, 0)) >= 0 for string in stop):
                    stops[row] = StopReason.STOP
            token = int(rows.tokens[row, last])
            if state.matcher is not None and not state.matcher.consume_token(token):
                stops[row] = StopReason.LENGTH  # llguidance gave up beyond one of its limits, and lets nothing through
            if (stream := state.prepared.stream) is not None:
                new = NewTokens([token], [float(rows.logprobs[row, last])], state.top_logprobs[-1:], stops.get(row))
                stream.put(state.number, new)

    def _retire(self, stops: dict[int, StopReason]) -> list[PreparedRequest]:
        finished: list[PreparedRequest] = []
        for row, reason in stops.items():
            state = self._rows.states[row]
            state.prepared.samples[state.number] = self._rows.sample(row, reason)
            if len(state.prepared.samples) == state.prepared.request.sampling.n:
                finished.append(state.prepared)
        keep = self._rows.remove(set(stops))
        self._cache.keep(torch.from_numpy(keep).to(self._device))
        return finished

    def _batches(self, items: Iterable[T], length: Callable[[T], int]) -> Iterator[list[T]]:
        """The items, sorted by length, in batches of at most `PREFILL_TOKENS` padded tokens; a longer item comes alone.
        Of one length each where the model cannot pad."""

        def fits(batch: list[T], item: T) -> bool:
            alike = self._text.pads or length(batch[0]) == length(item)
            return alike and (len(batch) + 1) * length(item) <= PREFILL_TOKENS

        return in_batches(sorted(items, key=length), fits)

    def completion(self, item: PreparedRequest) -> Completion:
        """The answer of a finished request."""
        now = time.monotonic()
        return Completion(
            request_id=item.request.request_id,
            prompt_ids=item.prompt_ids,
            samples=tuple(item.samples[k] for k in range(item.request.sampling.n)),
            policy_version=item.version,
            queue_s=item.started - item.submitted,
            generate_s=now - item.started,
            policy=item.request.policy,
            prompt_logprobs=item.scores,
        )
