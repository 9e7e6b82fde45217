"""One contender of `serving.py`: each line holds a number of requests that are answered at once."""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image
from turns import serve

from rl_vlm.config import PolicyConfig, load_config
from rl_vlm.models.images import TextSide
from rl_vlm.models.loading import load_model, load_text_side, quiet_libraries
from rl_vlm.models.reference import ModelReference
from rl_vlm.types import EncodedImage, GenerationRequest, Message, SampleChunk, SamplingParams

NEW_TOKENS, PROMPT_TOKENS, SIDE = 64, 116, 224


class Contender(Protocol):
    """Whatever answers requests."""

    async def answer(self, requests: Sequence[GenerationRequest]) -> int:
        """Answer all at once; returns how many tokens were generated."""
        ...

    async def first_token(self, request: GenerationRequest) -> float | None:
        """Seconds to the first token of a request; None where answers come whole."""
        ...


class Prompts:
    """Requests of 116 tokens with a picture that nobody has seen before."""

    def __init__(self, text: TextSide) -> None:
        self._text = text
        self._rng = np.random.default_rng(0)
        self._count = 0
        self.words = "What is in the picture?"
        while len(self._request().prompt_ids) - 1 + text.images.count_tokens(SIDE, SIDE) < PROMPT_TOKENS:
            self.words += " a"

    def _request(self) -> GenerationRequest:
        pixels = self._rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        image = EncodedImage.from_pil(Image.fromarray(pixels))
        span = self._text.codec.encode_prompt([Message.of("user", image, self.words)])
        self._count += 1
        sampling = SamplingParams(NEW_TOKENS, temperature=0.0)
        return GenerationRequest(f"r{self._count}", span.token_ids, sampling, span.images)

    def take(self, count: int) -> list[GenerationRequest]:
        """Fresh requests."""
        return [self._request() for _ in range(count)]


class Generate:
    """`transformers.generate`, all requests in one batch or one after the other; images go through the processor."""

    def __init__(self, folder: Path, text: TextSide, run: PolicyConfig, batched: bool) -> None:
        import torch
        from transformers import AutoProcessor

        self._torch, self._text, self._batched = torch, text, batched
        self._device = "cuda" if run.serving.gpus_per_replica else "cpu"
        self._model = load_model(folder, run.model.dtype, self._device)
        self._processor = AutoProcessor.from_pretrained(folder).image_processor
        self._suppressed = text.codec.suppressed_token_ids(text.vocab_size).tolist()

    async def answer(self, requests: Sequence[GenerationRequest]) -> int:
        batches = [list(requests)] if self._batched else [[request] for request in requests]
        return sum(self._generate(batch) for batch in batches)

    def _generate(self, requests: list[GenerationRequest]) -> int:
        torch, codec = self._torch, self._text.codec
        rows = [self._text.expand(request.prompt_ids, request.images) for request in requests]
        ids = torch.from_numpy(np.stack(rows).astype(np.int64)).to(self._device)
        images = [image.to_pil() for request in requests for image in request.images]
        pixels = self._processor(images=images, return_tensors="pt").to(self._device)
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == codec.image_token_id).int(),
                pixel_values=pixels["pixel_values"].to(self._model.dtype), image_grid_thw=pixels["image_grid_thw"],
                do_sample=False, max_new_tokens=NEW_TOKENS, suppress_tokens=self._suppressed,
                eos_token_id=codec.end_of_turn_id, pad_token_id=codec.pad_token_id,
            )  # fmt: skip
        return int(out[:, ids.shape[1] :].numel())

    async def first_token(self, request: GenerationRequest) -> float | None:
        return None


class RawEngine:
    """An engine in this process, without Ray."""

    def __init__(self, folder: Path, run: PolicyConfig) -> None:
        from rl_vlm.serving.replica import build_engine

        self._engine = build_engine(folder, run)

    async def answer(self, requests: Sequence[GenerationRequest]) -> int:
        answers = await asyncio.gather(*(self._engine.generate([request]) for request in requests))
        return sum(len(sample.token_ids) for (answer,) in answers for sample in answer.samples)

    async def first_token(self, request: GenerationRequest) -> float | None:
        return await time_to_first(self._engine.stream(request))


class Handle:
    """One Serve replica through the client that env runners use."""

    def __init__(self, run_id: str) -> None:
        from ray import serve

        from rl_vlm.serving.client import PolicyClient
        from rl_vlm.serving.registry import app_name

        self._client = PolicyClient(run_id, deadline_s=300, homes=[0], coalesce=False)
        self._handle = serve.get_deployment_handle("policy", app_name(run_id))

    async def answer(self, requests: Sequence[GenerationRequest]) -> int:
        answers = await asyncio.gather(*(self._client.generate(request) for request in requests))
        return sum(len(sample.token_ids) for answer in answers for sample in answer.samples)

    async def first_token(self, request: GenerationRequest) -> float | None:
        return await time_to_first(self._handle.options(stream=True).stream.remote(request))


class HTTP:
    """`rl-vlm serve` in a process of its own, asked by an HTTP client."""

    def __init__(self, port: int, words: str) -> None:
        import httpx

        limits = httpx.Limits(max_connections=128, max_keepalive_connections=128)
        self._client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300, limits=limits)
        self._words = words

    def _body(self, request: GenerationRequest, **more: Any) -> dict[str, Any]:
        uri = "data:image/png;base64," + base64.b64encode(request.images[0].png).decode()
        parts = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": self._words}]
        messages = [{"role": "user", "content": parts}]
        return {"model": "bench", "messages": messages, "max_tokens": NEW_TOKENS, "temperature": 0, **more}

    async def answer(self, requests: Sequence[GenerationRequest]) -> int:
        async def one(request: GenerationRequest) -> int:
            reply = await self._client.post("/v1/chat/completions", json=self._body(request))
            reply.raise_for_status()
            return int(reply.json()["usage"]["completion_tokens"])

        return sum(await asyncio.gather(*map(one, requests)))

    async def first_token(self, request: GenerationRequest) -> float | None:
        started = time.perf_counter()
        async with self._client.stream("POST", "/v1/chat/completions", json=self._body(request, stream=True)) as reply:
            async for line in reply.aiter_lines():
                if '"content":"' in line:
                    break
        return time.perf_counter() - started


async def time_to_first(chunks: AsyncIterator[SampleChunk]) -> float:
    """Seconds to the first token; the rest is read too."""
    started = time.perf_counter()
    first = 0.0
    async for _ in chunks:
        first = first or time.perf_counter() - started
    return first


def options_of(engine: str, changes: Sequence[str]) -> list[str]:
    """What the run and `rl-vlm serve` are configured with."""
    return [f"serving.engine={engine}", "serving.num_replicas=1", "serving.max_context=256", *changes]


def configuration(folder: Path, options: Sequence[str]) -> PolicyConfig:
    """One replica."""
    placed = ["serving.cpus_per_replica=1", "rollout.cpus_per_env_runner=0"]
    return load_config(None, [f"model.path={folder}", *placed, *options])


@contextlib.contextmanager
def served(folder: Path, run: PolicyConfig) -> Iterator[str]:
    """A Serve application; gives its run id."""
    from rl_vlm.runs.ray_session import ray_cluster
    from rl_vlm.serving.service import PolicyService

    with ray_cluster(run):
        service = PolicyService(run, "bench", ModelReference.of(str(folder)))
        try:
            service.wait_until_ready()
            yield "bench"
        finally:
            service.stop()


@contextlib.contextmanager
def http_server(folder: Path, options: Sequence[str]) -> Iterator[int]:
    """`rl-vlm serve`; gives its port."""
    import socket
    import subprocess

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "rl_vlm.cli", "serve", str(folder), *options, "http.model_name=bench"]
    command += ["--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("rl-vlm serve did not start")
            time.sleep(0.5)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("generate", "one", "raw", "handle", "http"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("options", nargs="*", help="section.key=value")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:

        def prepare() -> Callable[[str], dict[str, Any]]:
            quiet_libraries()
            import torch

            torch.set_num_threads(1)
            options = options_of(args.engine, args.options)
            run, text = configuration(args.folder, options), load_text_side(args.folder)
            prompts = Prompts(text)
            contender: Contender
            if args.kind in ("generate", "one"):
                contender = Generate(args.folder, text, run, args.kind == "generate")
            elif args.kind == "raw":
                contender = RawEngine(args.folder, run)
            elif args.kind == "handle":
                contender = Handle(stack.enter_context(served(args.folder, run)))
            else:
                contender = HTTP(stack.enter_context(http_server(args.folder, options)), prompts.words)
            events = stack.enter_context(asyncio.Runner())

            def answer(count: str) -> dict[str, Any]:
                requests = prompts.take(int(count))
                started = time.perf_counter()
                tokens = events.run(contender.answer(requests))
                seconds = time.perf_counter() - started
                first = events.run(contender.first_token(prompts.take(1)[0])) if len(requests) == 1 else None
                return {"tokens": tokens, "seconds": seconds, "first": first}

            return answer

        serve(prepare)


if __name__ == "__main__":
    main()
