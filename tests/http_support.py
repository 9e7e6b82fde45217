"""A real HTTP server around a real engine, without Ray: what the tests of the HTTP side talk to."""

from __future__ import annotations

import asyncio
import base64
import io
import struct
import threading
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

from core_support import text_side
from PIL import Image

from rl_vlm.config import HTTPSection
from rl_vlm.engines.base import BASE_MODEL, Engine
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.http.app import ModelApp
from rl_vlm.http.backend import ServedModel
from rl_vlm.http.server import HTTPServer, bind
from rl_vlm.types import POLICY, Completion, GenerationRequest, SampleChunk

CONTEXT = 1024
PATIENCE_S = 120.0  # for what comes at once on a quiet machine; the tests also run at a low priority on a busy one


class EngineBackend:
    """Serves an engine of this process under two names: its model as it came, and its newest adapter."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.running = 0  # calls that have not ended

    async def models(self) -> dict[str, ServedModel]:
        newest = ServedModel(POLICY, self.engine.version, "tiny")
        exact = {f"policy-v{newest.version}": newest._replace(exact=True)}
        policy = {"policy": newest} | exact if newest.version else {}
        return policy | {"tiny": ServedModel(POLICY, BASE_MODEL)}

    async def call(self, requests: list[GenerationRequest]) -> list[Completion]:
        self.running += 1
        try:
            return await self.engine.generate(requests)
        finally:
            self.running -= 1

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[SampleChunk, None]:
        self.running += 1
        try:
            async with aclosing(self.engine.stream(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield chunk
        finally:
            self.running -= 1

    async def health(self) -> None:
        pass

    async def metrics(self) -> str:
        return "engine_lines 1\n"


class Server:
    """A server in a thread."""

    def __init__(self, backend: Any, folder: Path, token: str | None = None, **limits: Any) -> None:
        self.limits, self.text, self.backend = HTTPSection(**limits), text_side(folder), backend
        self.gate = ModelApp(backend, self.text, self.limits, max_context=CONTEXT, token=token).gate
        sock = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self._listens = threading.Event()
        self.server = HTTPServer(self.gate, sock, self.limits, self._listens.set)
        self._thread = threading.Thread(target=self.server.run, args=([sock],), daemon=True)

    def start(self) -> Server:
        self._thread.start()
        assert self._listens.wait(10)
        return self

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


@contextmanager
def serving(backend: Any, folder: Path, **limits: Any) -> Iterator[Server]:
    server = Server(backend, folder, **limits).start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def tiny_engine(folder: Path) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(folder, max_context=CONTEXT)
    try:
        yield engine
    finally:
        asyncio.run(engine.close())


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def data_uri(image: Image.Image | bytes, kind: str = "png", mime: str | None = None, **options: Any) -> str:
    """An image, or bytes, as a data URI."""
    if isinstance(image, Image.Image):
        buffer = io.BytesIO()
        image.save(buffer, format=kind, **options)
        image = buffer.getvalue()
    return f"data:{mime or f'image/{kind}'};base64,{base64.b64encode(image).decode()}"


def png_header(width: int, height: int, depth: int = 8) -> bytes:
    """A PNG file of that size whose pixels are missing."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    pixels = b"IDAT" + zlib.compress(b"\0")
    chunks = [
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in (body, pixels)
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
