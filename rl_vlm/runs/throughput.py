"""The throughput of `rl-vlm eval`: tokens per second of the served model, and of plain transformers beside it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_vlm.config import PolicyConfig
from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.evaluation.heldout import item_prompts
from rl_vlm.models.loading import load_text_side, resolve_model
from rl_vlm.types import GenerationRequest, Message, SamplingParams

BATCHES = (1, 8)
_WARM_UPS = 2


async def measure_throughput(
    config: PolicyConfig, run_id: str, adapter: Path | None, runs: int, compare_hf: bool
) -> dict[str, Any]:
    """Ask prompts of the evaluation greedily, for exactly `rollout.max_new_tokens_per_turn` tokens, at batch 1 and 8.

    All go to one replica, which must have loaded the adapter as version 1. No prompt is asked twice while the split has
    others, so that no image is in a cache. Times are from messages to tokens. Runs of both sides alternate, and which
    is first changes from run to run.
    """
    new_tokens = config.rollout.max_new_tokens_per_turn
    served = _ServedModel(config, run_id, 1 if adapter is not None else BASE_MODEL)
    prompts = item_prompts(config)
    plain = None
    if compare_hf:
        from rl_vlm.evaluation.plain_generate import PlainGenerate  # imports torch

        plain = PlainGenerate(config, adapter)
    # Of each batch size a value per run: tokens per second of ours and theirs, times of streams, and for each item
    # whether both chose the same tokens.
    throughput: dict[int, dict[str, list[float]]] = {batch: defaultdict(list) for batch in BATCHES}
    for number in range(-_WARM_UPS, runs):
        for batch in BATCHES:
            asked, streamed = (list(itertools.islice(prompts, batch)) for _ in range(2))
            kept = throughput[batch] if number >= 0 else defaultdict(list)
            theirs = plain.timed(asked) if plain and number % 2 else None
            seconds, tokens = await served.answer(asked)
            kept["ours"].append(batch * new_tokens / seconds)
            if plain:
                theirs = theirs or plain.timed(asked)
                kept["theirs"].append(batch * new_tokens / theirs[0])
                kept["equal"] += [ours == other for ours, other in zip(tokens, theirs[1], strict=True)]
            first, steady = await served.stream(streamed)
            kept["first_s"].append(first)
            kept["steady"].append(steady)
    batches = {str(batch): _summary(kept) for batch, kept in throughput.items()}
    return {"runs": runs, "new_tokens": new_tokens, "batches": batches}


def _summary(kept: dict[str, list[float]]) -> dict[str, float]:
    """Mean and standard deviation over runs. `ratio`, the median of ours over theirs, is formed per run: both sides
    follow each other, so what else the machine does falls out."""
    result = {"first_token_s": float(np.mean(kept["first_s"])), "steady_tokens_per_s": float(np.mean(kept["steady"]))}
    for prefix, values in (("", kept["ours"]), ("hf_", kept["theirs"])):
        if values:
            result[f"{prefix}tokens_per_s_mean"] = float(np.mean(values))
            result[f"{prefix}tokens_per_s_std"] = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    if kept["theirs"]:
        result["ratio"] = float(np.median(np.array(kept["ours"]) / np.array(kept["theirs"])))
        result["same_answers"] = float(np.mean(kept["equal"]))
    return result


class _ServedModel:
    """One replica of the served model, asked through Ray Serve as a rollout worker asks it."""

    def __init__(self, config: PolicyConfig, run_id: str, min_version: int) -> None:
        from ray import serve

        from rl_vlm.serving.client import PolicyClient
        from rl_vlm.serving.registry import app_name
        from rl_vlm.serving.router import home_session

        self._handle = serve.get_deployment_handle("policy", app_name(run_id))
        self._client = PolicyClient(
            run_id, deadline_s=config.serving.request_timeout_s, homes=(), coalesce=False, handle=self._handle
        )
        self._session = home_session(0)
        self._codec = load_text_side(resolve_model(config.model.path), config.model.pixels).codec
        self._min_version = min_version
        self._sampling = SamplingParams(config.rollout.max_new_tokens_per_turn, temperature=0.0, ignore_eos=True)
        self._names = itertools.count()

    def _request(self, messages: Sequence[Message]) -> GenerationRequest:
        span, name = self._codec.encode_prompt(messages), f"throughput-{next(self._names)}"
        return GenerationRequest(name, span.token_ids, self._sampling, span.images, self._min_version)

    async def answer(self, conversations: Sequence[tuple[Message, ...]]) -> tuple[float, list[list[int]]]:
        """Seconds of one call with all conversations, and the new tokens of each."""
        started = time.perf_counter()
        completions = await self._client.call([self._request(one) for one in conversations], self._session)
        seconds = time.perf_counter() - started
        return seconds, [completion.samples[0].token_ids.tolist() for completion in completions]

    async def stream(self, conversations: Sequence[tuple[Message, ...]]) -> tuple[float, float]:
        """Mean seconds to the first token, and tokens per second after it, of streams at the same time."""
        started = time.perf_counter()
        requests = [self._request(one) for one in conversations]
        streams = await asyncio.gather(*(self._pieces(request) for request in requests))
        first = float(np.mean([pieces[0][0] - started for pieces in streams]))
        begin, end = min(pieces[0][0] for pieces in streams), max(pieces[-1][0] for pieces in streams)
        later = sum(count for pieces in streams for _, count in pieces[1:])
        return first, later / max(end - begin, 1e-9)

    async def _pieces(self, request: GenerationRequest) -> list[tuple[float, int]]:
        """When each piece came, and of how many tokens it was."""
        stream = self._handle.options(stream=True, session_id=self._session).stream.remote(request)
        return [(time.perf_counter(), len(chunk.token_ids)) async for chunk in stream if len(chunk.token_ids)]
