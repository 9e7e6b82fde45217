"""The throughput block of `rl-vlm eval`: tokens per second of the served model, and of plain transformers on the same prompts."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rl_vlm.config import PolicyConfig
from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.evaluation.prompts import ItemPrompts
from rl_vlm.models.loading import TextSide, load_text_side, resolve_model
from rl_vlm.types import GenerationRequest, Message, RLVLMError, SamplingParams

BATCHES = (1, 8)
_WARM_UPS = 2


class PlainGenerateError(RLVLMError):
    """The process with plain transformers ended or did not answer."""


@dataclass(slots=True)
class _Figures:
    """Of one batch size: a value per run. `first_s` and `steady` are of streams."""

    ours: list[float] = field(default_factory=list)  # tokens per second
    theirs: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    steady: list[float] = field(default_factory=list)
    equal: list[bool] = field(default_factory=list)  # per item: whether both chose the same tokens

    def summary(self) -> dict[str, float]:
        """Mean and standard deviation over runs; `ratio` is ours over theirs, the median over runs.

        Both sides of a run follow each other, so what else the machine does falls out of their ratio more than of ratios of means.
        """
        result = {
            "tokens_per_s_mean": float(np.mean(self.ours)),
            "tokens_per_s_std": float(np.std(self.ours, ddof=1)) if len(self.ours) > 1 else 0.0,
            "first_token_s": float(np.mean(self.first_s)),
            "steady_tokens_per_s": float(np.mean(self.steady)),
        }
        if self.theirs:
            result |= {
                "hf_tokens_per_s_mean": float(np.mean(self.theirs)),
                "hf_tokens_per_s_std": float(np.std(self.theirs, ddof=1)) if len(self.theirs) > 1 else 0.0,
                "ratio": float(np.median(np.array(self.ours) / np.array(self.theirs))),
                "same_answers": float(np.mean(self.equal)),
            }
        return result


async def measure_throughput(
    config: PolicyConfig, run_id: str, adapter: Path | None, *, runs: int, compare_hf: bool
) -> dict[str, Any]:
    """Ask prompts of the evaluation greedily, with exactly `rollout.max_new_tokens_per_turn` new tokens, at batch 1 and 8.

    All go to one replica, which must have loaded the adapter as version 1. No prompt is asked twice while the split has others, so that no image is
    in a cache. Times are from messages to tokens. Runs of both sides alternate, and which is first changes from run to run.
    """
    new_tokens = config.rollout.max_new_tokens_per_turn
    served = _ServedModel(config, run_id, 1 if adapter is not None else BASE_MODEL, new_tokens)
    prompts, numbers = ItemPrompts(config), itertools.count()
    figures = {batch: _Figures() for batch in BATCHES}
    async with _plain(config, adapter, new_tokens, compare_hf) as plain:
        for number in range(-_WARM_UPS, runs):
            for batch in BATCHES:
                items = [next(numbers) for _ in range(batch)]
                streamed = prompts.take([next(numbers) for _ in range(batch)])
                kept = figures[batch] if number >= 0 else _Figures()
                theirs = await plain.answer(items) if plain and number % 2 else None
                seconds, tokens = await served.answer(prompts.take(items))
                if plain and theirs is None:
                    theirs = await plain.answer(items)
                kept.ours.append(batch * new_tokens / seconds)
                if theirs is not None:
                    kept.theirs.append(batch * new_tokens / theirs[0])
                    kept.equal += [ours == other for ours, other in zip(tokens, theirs[1], strict=True)]
                first, steady = await served.stream(streamed)
                kept.first_s.append(first)
                kept.steady.append(steady)
    prompts.close()
    return {
        "runs": runs,
        "new_tokens": new_tokens,
        "batches": {str(batch): kept.summary() for batch, kept in figures.items()},
    }


class _ServedModel:
    """One replica of the served model, asked through Ray Serve as a rollout worker asks it."""

    def __init__(self, config: PolicyConfig, run_id: str, min_version: int, new_tokens: int) -> None:
        from ray import serve

        from rl_vlm.serving.client import PolicyClient
        from rl_vlm.serving.registry import app_name
        from rl_vlm.serving.router import home_session

        self._handle = serve.get_deployment_handle("policy", app_name(run_id))
        self._client = PolicyClient(
            run_id, deadline_s=config.serving.request_timeout_s, homes=(), coalesce=False, handle=self._handle
        )
        self._session = home_session(0)
        self._text: TextSide = load_text_side(resolve_model(config.model.path), config.model.pixels)
        self._min_version = min_version
        self._sampling = SamplingParams(new_tokens, temperature=0.0, ignore_eos=True)
        self._names = itertools.count()

    def _requests(self, conversations: Sequence[tuple[Message, ...]]) -> list[GenerationRequest]:
        spans = [self._text.codec.encode_prompt(messages) for messages in conversations]
        return [
            GenerationRequest(
                f"throughput-{next(self._names)}", span.token_ids, self._sampling, span.images, self._min_version
            )
            for span in spans
        ]

    async def answer(self, conversations: Sequence[tuple[Message, ...]]) -> tuple[float, list[list[int]]]:
        """Seconds of one call with all conversations, and the new tokens of each."""
        started = time.perf_counter()
        completions = await self._client.call(self._requests(conversations), self._session)
        seconds = time.perf_counter() - started
        return seconds, [[int(token) for token in found.samples[0].token_ids] for found in completions]

    async def stream(self, conversations: Sequence[tuple[Message, ...]]) -> tuple[float, float]:
        """Mean seconds to the first token, and tokens per second after it, of streams at the same time."""
        started = time.perf_counter()
        requests = self._requests(conversations)
        found = await asyncio.gather(*(self._one_stream(request) for request in requests))
        first = float(np.mean([times[0][0] - started for times in found]))
        begin, end = min(times[0][0] for times in found), max(times[-1][0] for times in found)
        later = sum(count for times in found for _, count in times[1:])
        return first, later / max(end - begin, 1e-9)

    async def _one_stream(self, request: GenerationRequest) -> list[tuple[float, int]]:
        """When each piece came, and of how many tokens it was."""
        stream = self._handle.options(stream=True, session_id=self._session).stream.remote(request)
        return [(time.perf_counter(), len(chunk.token_ids)) async for chunk in stream if len(chunk.token_ids)]


class _PlainProcess:
    """The process of plain_generate.py."""

    def __init__(self, process: asyncio.subprocess.Process, errors: Path, deadline_s: float) -> None:
        self._process, self._errors, self._deadline_s = process, errors, deadline_s

    async def send(self, line: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")
        await self._process.stdin.drain()

    async def receive(self) -> Any:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(self._deadline_s):
                line = await self._process.stdout.readline()
        except TimeoutError as error:
            raise PlainGenerateError(f"Plain transformers gave no answer in {self._deadline_s:g} s.") from error
        if not line:
            last = self._errors.read_text(errors="replace").strip().splitlines()[-1:] or ["no message"]
            raise PlainGenerateError(f"Plain transformers ended: {last[0]}")
        return json.loads(line)

    async def answer(self, items: Sequence[int]) -> tuple[float, list[list[int]]]:
        """Seconds for these items as one batch, and the new tokens of each."""
        await self.send(list(items))
        answer = await self.receive()
        return answer["seconds"], answer["tokens"]


@asynccontextmanager
async def _plain(
    config: PolicyConfig, adapter: Path | None, new_tokens: int, wanted: bool
) -> AsyncIterator[_PlainProcess | None]:
    if not wanted:
        yield None
        return
    command = [sys.executable, "-m", "rl_vlm.evaluation.plain_generate"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(config.serving.num_threads), "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.NamedTemporaryFile(prefix="rl-vlm-plain-", suffix=".log") as errors:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=environment,
            limit=2**24,
        )
        plain = _PlainProcess(process, Path(errors.name), config.serving.startup_timeout_s)
        try:
            settings = {"adapter": str(adapter) if adapter is not None else None, "new_tokens": new_tokens}
            await plain.send({"config": config.model_dump(mode="json"), **settings})
            await plain.receive()
            yield plain
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
