"""Prompts and sampling parameters as vLLM takes them, and its outputs as ours."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from rl_vlm.chat import ChatCodec
from rl_vlm.engines.base import NewTokens, TokenSequence
from rl_vlm.types import GenerationRequest, SamplingParams

_SEED_MASK = 2**63 - 1


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
    """An xgrammar grammar of token sequences. (vLLM's own `choice` lets a text be written in any tokens.)"""
    return "root ::= " + " | ".join(" ".join(f"Token({token})" for token in tokens) for tokens in choices)


def read_tokens(output: Any, top: int) -> NewTokens:
    """The tokens of a vLLM CompletionOutput; `top`: how many alternatives were asked for."""
    flat = output.logprobs
    alternatives = [
        # The sampled token comes first, then the most likely ones.
        tuple(
            (token, value)
            for token, value in zip(flat.token_ids[start + 1 : end], flat.logprobs[start + 1 : end], strict=True)
            if value > -float("inf")
        )[:top]
        for start, end in zip(flat.start_indices, flat.end_indices, strict=True)
    ]
    logprobs = [flat.logprobs[start] for start in flat.start_indices]
    return NewTokens(list(output.token_ids), logprobs, alternatives if top else [])


async def vllm_prompt(request: GenerationRequest, codec: ChatCodec) -> Mapping[str, Any]:
    """vLLM's prompt: token ids with one placeholder per image, and the images with their hashes as cache keys."""
    prompt: dict[str, Any] = {"prompt_token_ids": codec.bare(request.prompt_ids).tolist()}
    if request.images:
        pictures = await asyncio.to_thread(lambda: [image.to_pil() for image in request.images])
        prompt["multi_modal_data"] = {"image": pictures}
        prompt["multi_modal_uuids"] = {"image": [image.sha256 for image in request.images]}
    return prompt
