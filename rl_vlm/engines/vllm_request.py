"""One request in vLLM: checks it, expands its prompt, runs one vLLM request per sample, and reads the outputs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_vlm.config.serving import VLLM_TEMPERATURES
from rl_vlm.engines.base import (
    BASE_MODEL,
    EngineError,
    NewTokens,
    TokenSequence,
    TokenStream,
    choice_tokens,
    expand_prompt,
    naming,
    notify,
)
from rl_vlm.engines.vllm_setup import DEAD, Counts
from rl_vlm.engines.vllm_weights import Adapter
from rl_vlm.models.loading import TextSide
from rl_vlm.types import GenerationRequest, Sample, SamplingParams, StopReason

# Conversion of sampling parameters to vLLM's, and of vLLM's outputs to ours.

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
    """An xgrammar grammar of token sequences.

    vLLM's own `choice` takes texts, and would let a text be written in other tokens than the tokenizer's.
    """
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


_MIN_TEMPERATURE, _MAX_TEMPERATURE = VLLM_TEMPERATURES


@dataclass(frozen=True, slots=True)
class Plan:
    """What all samples of a request have in common; `expanded` is int32 [P], `prompt` what vLLM is given."""

    request: GenerationRequest
    expanded: np.ndarray
    choices: tuple[TokenSequence, ...]
    prompt: Mapping[str, Any]


class VLLMSampler:
    """Sends requests to an AsyncLLM. Use it on the event loop that the AsyncLLM was made on.

    Args:
        llm: the AsyncLLM.
        text: codec and image geometry of the model.
        max_context: prompt plus new tokens of a sample.
        counts: requests and tokens are added here.
        names_versions: "all": vLLM names the version of every token; "adapters": of tokens that an adapter sampled;
            "": of none.
    """

    def __init__(self, llm: Any, text: TextSide, max_context: int, counts: Counts, names_versions: str) -> None:
        self._llm, self._text, self._max_context = llm, text, max_context
        self.counts, self._names_versions = counts, names_versions

    async def plan(self, request: GenerationRequest) -> Plan:
        """Check and expand a request; raises EngineError for what cannot be sampled."""
        name, sampling, codec = request.request_id, request.sampling, self._text.codec
        ids = expand_prompt(request, self._text.images.count_tokens, codec.image_token_id, self._max_context)
        if sampling.temperature and not _MIN_TEMPERATURE <= sampling.temperature <= _MAX_TEMPERATURE:
            raise EngineError(
                f"Request {name}: vLLM samples at temperature 0 or from {_MIN_TEMPERATURE} to {_MAX_TEMPERATURE}, "
                f"not at {sampling.temperature}."
            )
        with naming(request):  # text that cannot be written, or a damaged image
            choices = choice_tokens(sampling, codec.encode_text, codec.decode)
            prompt = await _prompt(request)
        self.counts.requests += 1
        self.counts.prompt_tokens += len(ids)
        return Plan(request, ids, choices, prompt)

    async def sample(
        self, plan: Plan, number: int, adapter: Adapter | None, stream: TokenStream | None = None
    ) -> Sample:
        """One sample, whole; or its last tokens, where a stream is given that gets all of them as they come. Raises
        EngineError."""
        from vllm.exceptions import VLLMError

        end, in_pieces = self._text.codec.end_of_turn_id, stream is not None
        params = vllm_params(plan.request.sampling, number, end, plan.choices, in_pieces)
        try:
            output = await self._run(plan, number, params, adapter, stream)
            if output.finish_reason == "error":
                # The engine core had evicted an image that this process took for cached: the second attempt sends it
                # again.
                output = await self._run(plan, number, params, adapter, stream)
        except (VLLMError, ValueError) as error:
            reason = DEAD if self._llm.errored else f"vLLM could not answer ({error.__cause__ or error})."
            raise EngineError(f"Request {plan.request.request_id}: {reason}") from error
        spans = output.weight_versions if self._is_named(plan, adapter) else ()
        new = read_tokens(output, plan.request.sampling.top_logprobs)
        return Sample(
            np.array(new.token_ids, dtype=np.int32),
            np.array(new.logprobs, dtype=np.float32),
            self._stop_reason(plan, output, new),
            tuple(new.top_logprobs),
            tuple((span.end - span.start, int(span.version)) for span in spans),
        )

    def _is_named(self, plan: Plan, adapter: Adapter | None) -> bool:
        if self._names_versions == "all":
            return plan.request.min_version != BASE_MODEL
        return self._names_versions == "adapters" and adapter is not None

    async def _run(
        self, plan: Plan, number: int, params: Any, adapter: Adapter | None, stream: TokenStream | None
    ) -> Any:
        """One pass through vLLM; returns its last CompletionOutput."""
        (engine_input,) = await self._llm.renderer.render_cmpl_async([dict(plan.prompt)])
        name, last = f"{plan.request.request_id}/{number}", None
        lora = adapter.request if adapter is not None else None
        async with contextlib.aclosing(self._llm.generate(engine_input, params, name, lora_request=lora)) as results:
            async for result in results:
                if last is None:
                    self._check_prompt(plan, result)
                last = result.outputs[0]
                if stream is not None and last.finish_reason != "error":
                    new = read_tokens(last, plan.request.sampling.top_logprobs)
                    new.stop_reason = self._stop_reason(plan, last, new) if last.finish_reason else None
                    if self._is_named(plan, adapter):
                        # Versions change while vLLM is paused, long after the last token of the older one was read
                        # here.
                        stream.policy_version = self.counts.policy_version
                    stream.put(number, new)
                    notify([stream])
        assert last is not None
        return last

    def _check_prompt(self, plan: Plan, result: Any) -> None:
        if not np.array_equal(np.asarray(result.prompt_token_ids), plan.expanded):
            raise EngineError(
                f"Request {plan.request.request_id}: vLLM expanded the prompt to {len(result.prompt_token_ids)} "
                f"tokens, the image processor's grids to {len(plan.expanded)}: is the model folder's processor config "
                "its own?"
            )
        self.counts.prefix_queries += len(plan.expanded)
        self.counts.prefix_hits += result.num_cached_tokens or 0

    def _stop_reason(self, plan: Plan, output: Any, new: NewTokens) -> StopReason:
        tokens = new.token_ids
        if output.finish_reason not in ("stop", "length") or not tokens or len(tokens) != len(new.logprobs):
            raise EngineError(
                f"Request {plan.request.request_id}: vLLM ended a sample with {output.finish_reason!r}, {len(tokens)} "
                f"tokens and {len(new.logprobs)} log-probabilities."
            )
        if tokens[-1] == self._text.codec.end_of_turn_id and not plan.request.sampling.ignore_eos:
            return StopReason.END_OF_TURN
        return StopReason.STOP if output.finish_reason == "stop" else StopReason.LENGTH


async def _prompt(request: GenerationRequest) -> Mapping[str, Any]:
    """vLLM's prompt: token ids with one placeholder per image, and the images with their hashes as cache keys."""
    prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_ids.tolist()}
    if request.images:
        pictures = await asyncio.to_thread(lambda: [image.to_pil() for image in request.images])
        prompt["multi_modal_data"] = {"image": pictures}
        prompt["multi_modal_uuids"] = {"image": [image.sha256 for image in request.images]}
    return prompt
