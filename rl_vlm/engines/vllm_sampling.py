"""Conversion of sampling parameters to vLLM's, and of vLLM's outputs to ours."""

from __future__ import annotations

from typing import Any, NamedTuple

from rl_vlm.engines.choices import TokenSequence
from rl_vlm.types import SamplingParams, TopLogprobs

_SEED_MASK = 2**63 - 1


class Piece(NamedTuple):
    """Tokens of one sample with their log-probabilities and, where asked for, the most likely tokens of each place."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]


def vllm_params(
    sampling: SamplingParams, number: int, end_of_turn_id: int, choices: tuple[TokenSequence, ...], pieces: bool
) -> Any:
    """vLLM's SamplingParams for sample `number` of a request; `pieces`: outputs come token by token, not whole."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    return VLLMSamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=None if sampling.seeds is None else sampling.seeds[number] & _SEED_MASK,
        max_tokens=sampling.max_new_tokens,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        stop_token_ids=[] if sampling.ignore_eos else [end_of_turn_id],
        min_p=sampling.min_p,
        min_tokens=sampling.min_tokens,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        ignore_eos=True,  # the end of a turn is the chat template's, not the generation config's
        logprobs=sampling.top_logprobs,  # beside the sampled token's own
        flat_logprobs=True,
        structured_outputs=StructuredOutputsParams(grammar=choice_grammar(choices)) if choices else None,
        output_kind=RequestOutputKind.DELTA if pieces else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def choice_grammar(choices: tuple[TokenSequence, ...]) -> str:
    """An xgrammar grammar of token sequences.

    vLLM's own `choice` takes texts, and would let a text be written in other tokens than the tokenizer's.
    """
    return "root ::= " + " | ".join(" ".join(f"Token({token})" for token in tokens) for tokens in choices)


def read_piece(output: Any, top: int) -> Piece:
    """The tokens of a vLLM CompletionOutput; `top`: how many alternatives were asked for."""
    flat = output.logprobs
    starts = flat.start_indices
    if not top:
        return Piece(list(output.token_ids), [flat.logprobs[start] for start in starts], [])
    alternatives = [
        # The sampled token comes first, then the most likely ones.
        tuple(
            (token, value)
            for token, value in zip(flat.token_ids[start + 1 : end], flat.logprobs[start + 1 : end], strict=True)
            if value > -float("inf")
        )
        for start, end in zip(starts, flat.end_indices, strict=True)
    ]
    return Piece(
        list(output.token_ids), [flat.logprobs[start] for start in starts], [found[:top] for found in alternatives]
    )


def read_versions(output: Any) -> tuple[tuple[int, int], ...]:
    """(tokens, policy version) in order, of a finished CompletionOutput of a vLLM whose weight versions are policy versions."""
    return tuple((span.end - span.start, int(span.version)) for span in output.weight_versions)
