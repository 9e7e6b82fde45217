"""Greedy answers of a model that is being trained, with the engine's own decoder and without a server."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl_vlm.engines.base import EngineError
from rl_vlm.engines.decoder import Decoder
from rl_vlm.engines.rows import PreparedRequest
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.models.qwen_vl import Backbone
from rl_vlm.supervised.conversations import Prompt
from rl_vlm.types import GenerationRequest, SamplingParams

_ROWS = 64  # at a time


class AnswerWriter:
    """Answers prompts with the policy's present weights.

    Args:
        policy: the model.
        max_context: tokens of a prompt and its answer; longer prompts get no answer.
        max_new_tokens: of an answer.
    """

    def __init__(self, policy: PolicyModel, max_context: int, max_new_tokens: int) -> None:
        codec = policy.text.codec
        # With the token mask of an engine, which never samples special tokens.
        suppressed = codec.suppressed_token_ids(policy.text.vocab_size)
        head = policy.backbone.head_dtype
        backbone = Backbone(policy.model, policy.text.images, suppressed, cache_bytes=0, head_dtype=head)
        self._decoder = Decoder(backbone, codec, max_context=max_context)
        self._codec = codec
        self._sampling = SamplingParams(max_new_tokens, temperature=0.0)

    @torch.inference_mode()
    def answers(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """The greedy answer to each prompt; None where the prompt is too long."""
        found: dict[str, str] = {}
        for start in range(0, len(prompts), _ROWS):
            requests = [
                GenerationRequest(str(start + k), prompt.token_ids, self._sampling, prompt.images)
                for k, prompt in enumerate(prompts[start : start + _ROWS])
            ]
            prepared = self._decoder.prepare(requests)
            jobs = [job for job in prepared if not isinstance(job, EngineError)]
            finished: list[PreparedRequest] = self._decoder.admit(jobs) if jobs else []
            while self._decoder.num_rows:
                finished += self._decoder.step()
            for job in finished:
                found[job.request.request_id] = self._codec.decode(job.samples[0].token_ids)
        return [found.get(str(number)) for number in range(len(prompts))]
