"""The policy as an OpenAI server for agents on this machine: each episode has a token, and its calls are recorded."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from rl_vlm.config import HTTPSection
from rl_vlm.envs.errors import EnvError
from rl_vlm.envs.foreign.agent import MODEL
from rl_vlm.http.app import ModelApp
from rl_vlm.http.backend import ServedModel
from rl_vlm.http.gate import RequestError, error_body
from rl_vlm.http.server import HTTPServer, bind
from rl_vlm.models.images import TextSide
from rl_vlm.types import POLICY, Completion, EncodedImage, GenerationRequest, SampleChunk

_START_S, _STOP_S = 30.0, 5.0


class RecordedEpisode(Protocol):
    """What answers the calls of one episode, on the event loop `loop`."""

    loop: asyncio.AbstractEventLoop

    async def complete(self, request: GenerationRequest) -> Completion: ...


_EPISODE: ContextVar[RecordedEpisode] = ContextVar("episode")


class AgentEndpoint:
    """Listens on a free port of loopback, in a thread of its own, until `close`. Raises EnvError if it cannot."""

    def __init__(self, text: TextSide, limits: HTTPSection, max_context: int) -> None:
        limits = limits.model_copy(update={"host": "127.0.0.1", "adapter_root": None})
        self._episodes: dict[str, RecordedEpisode] = {}
        self.seen: dict[int, EncodedImage] = {}  # by item, for those who swap pictures
        self._gate = ModelApp(_Recorded(), text, limits, max_context=max_context, strict_tools=False).gate  # type: ignore[arg-type]
        sock, listens = bind("127.0.0.1", 0), threading.Event()
        self.base_url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
        self._server = HTTPServer(self, sock, limits, listens.set)
        self._thread = threading.Thread(target=self._server.run, args=([sock],), name="agents", daemon=True)
        self._thread.start()
        if not listens.wait(_START_S):
            self.close()
            raise EnvError(
                f"The server that agents ask did not start within {_START_S:g} s: give the env runner more CPU "
                "(rollout.cpus_per_env_runner), or take fewer of them."
            )

    @contextmanager
    def opened(self, episode: RecordedEpisode) -> Iterator[str]:
        """The token that opens the episode inside the block."""
        token = f"episode-{secrets.token_urlsafe(24)}"
        self._episodes[token] = episode
        try:
            yield token
        finally:
            del self._episodes[token]

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(_STOP_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        episode = self._episodes.get(Headers(scope=scope).get("authorization", "").removeprefix("Bearer "))
        if episode is None:
            error = RequestError(401, "This token opens no episode: use task.api_key, while the agent runs.")
            await JSONResponse(error_body(error), 401)(scope, receive, send)
            return
        _EPISODE.set(episode)
        await self._gate(scope, receive, send)


class _Recorded:
    """The backend of the application: whoever calls is answered by the episode of his token."""

    async def models(self) -> dict[str, ServedModel]:
        return {MODEL: ServedModel(POLICY, 0)}

    async def call(self, requests: list[GenerationRequest]) -> list[Completion]:
        return [await self._complete(request) for request in requests]

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[SampleChunk, None]:
        """Each sample in one piece, since a call is recorded when it is complete."""
        completion = await self._complete(request)
        for number, sample in enumerate(completion.samples):
            ids, logprobs, version = sample.token_ids, sample.logprobs, completion.policy_version
            yield SampleChunk(number, ids, logprobs, version, sample.stop_reason, sample.top_logprobs)

    async def _complete(self, request: GenerationRequest) -> Completion:
        episode = _EPISODE.get()
        work = asyncio.run_coroutine_threadsafe(episode.complete(request), episode.loop)
        return await asyncio.wrap_future(work)

    async def health(self) -> None:
        pass

    async def metrics(self) -> str:
        return ""
