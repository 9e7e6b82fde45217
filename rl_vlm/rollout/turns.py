"""One sampled turn, in one request or, for partial rollouts, in pieces that may come from several versions of the policy.

With in-flight updates one request's answer may consist of several versions, too (`Sample.pieces`).

A piece that ends because of its length goes on from what was sampled so far: the next request's prompt is the prompt and these tokens,
whose keys and values are computed anew under the weights that the replica has by then. So each token's log-probability is that of the
version which sampled it, given everything before it (partial rollouts: Kimi k1.5, arXiv 2501.12599, section 2.6.2).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from rl_vlm.seeding import derive_seed
from rl_vlm.types import Completion, GenerationRequest, RLVLMError, Sample, StopReason


class CompletionClient(Protocol):
    """Answers generation requests: the Serve client, or an engine in the same process."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Answer one request."""
        ...


class ImageAccountingError(RLVLMError):
    """Engine and client count the tokens of a prompt's images differently."""


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """What the policy said: token ids int32 [T], log-probabilities float32 [T], and (tokens, version) of each piece in order."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    stop_reason: StopReason
    pieces: tuple[tuple[int, int], ...]
    replica_id: str


async def sample_turns(
    policy: CompletionClient, request: GenerationRequest, expected: np.ndarray, name: str, piece: int | None
) -> list[SampledTurn]:
    """The `sampling.n` answers to a request; `piece`: at most this many tokens of a turn in one request, None for all.

    `expected` is the prompt with images expanded. Raises ImageAccountingError where the engine's differs.
    """
    first = request if piece is None else _shortened(request, min(piece, request.sampling.max_new_tokens))
    completion = await policy.generate(first)
    _check_prompt(completion, expected, name)
    turns = [_turn([sample], [completion]) for sample in completion.samples]
    if piece is None:
        return turns
    outcomes = await asyncio.gather(
        *(
            _go_on(policy, request, expected, name, piece, number, sample, completion)
            for number, sample in enumerate(completion.samples)
        ),
        return_exceptions=True,
    )
    whole = []
    for outcome in outcomes:  # all have ended before an error is raised
        if isinstance(outcome, BaseException):
            raise outcome
        whole.append(outcome)
    return whole


async def _go_on(
    policy: CompletionClient,
    request: GenerationRequest,
    expected: np.ndarray,
    name: str,
    piece: int,
    number: int,
    sample: Sample,
    completion: Completion,
) -> SampledTurn:
    """The rest of answer `number`, of which `sample` is the first piece."""
    budget, seeds = request.sampling.max_new_tokens, request.sampling.seeds
    samples, completions, asked = [sample], [completion], min(piece, budget)
    # A sample that is shorter than it might be was ended by the engine.
    while samples[-1].stop_reason is StopReason.LENGTH and len(samples[-1].token_ids) == asked:
        said = np.concatenate([part.token_ids for part in samples])
        asked = min(piece, budget - len(said))
        if not asked:
            break
        further = replace(
            _shortened(request, asked),
            request_id=f"{request.request_id}+{number}.{len(samples)}",
            prompt_ids=np.concatenate([request.prompt_ids, said]),
            preferred_replica=completions[-1].replica_id,
        )
        own_seed = None if seeds is None else (derive_seed(seeds[number], len(samples)),)
        further = replace(further, sampling=replace(further.sampling, n=1, seeds=own_seed))
        completions.append(await policy.generate(further))
        _check_prompt(completions[-1], np.concatenate([expected, said]), name)
        samples.append(completions[-1].samples[0])
    return _turn(samples, completions)


def _shortened(request: GenerationRequest, max_new_tokens: int) -> GenerationRequest:
    return replace(request, sampling=replace(request.sampling, max_new_tokens=max_new_tokens))


def _turn(samples: list[Sample], completions: list[Completion]) -> SampledTurn:
    pieces: list[tuple[int, int]] = []
    for sample, completion in zip(samples, completions, strict=True):
        for count, version in sample.pieces or ((len(sample.token_ids), completion.policy_version),):
            if pieces and pieces[-1][1] == version:
                count += pieces.pop()[0]
            pieces.append((count, version))
    return SampledTurn(
        samples[0].token_ids if len(samples) == 1 else np.concatenate([sample.token_ids for sample in samples]),
        samples[0].logprobs if len(samples) == 1 else np.concatenate([sample.logprobs for sample in samples]),
        samples[-1].stop_reason,
        tuple(pieces),
        completions[-1].replica_id,
    )


def _check_prompt(completion: Completion, expected: np.ndarray, name: str) -> None:
    if not np.array_equal(completion.prompt_ids, expected):
        raise ImageAccountingError(
            f"Group {name}: the engine's prompt has {len(completion.prompt_ids)} tokens where grid / merge² gives "
            f"{len(expected)}; engine and client disagree about the images."
        )
