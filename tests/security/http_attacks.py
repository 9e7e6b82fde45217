"""What a hostile client does to the HTTP server: each attack goes on until it is told to stop. Raw sockets, no HTTP client."""

from __future__ import annotations

import base64
import io
import json
import selectors
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Event

from PIL import Image

Address = tuple[str, int]
CHAT = "/v1/chat/completions"
_PIECE = 1 << 18


def head(path: str, length: int | None, token: str | None = None, method: str = "POST", **more: str) -> bytes:
    """The headers of a request with a JSON body of that length."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"Content-Length: {length}"] if length is not None else []
    lines += [f"Authorization: Bearer {token}"] if token else []
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in more.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def chat_body(**fields: object) -> bytes:
    """A text-only chat with more fields, or others."""
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def unknown_keys(count: int) -> bytes:
    """A chat with that many keys that nobody knows."""
    return chat_body()[:-1] + b"," + b",".join(b'"%d":1' % k for k in range(count)) + b"}"


def webp_body(images: int, side: int) -> bytes:
    """A chat that shows that many images of side² pixels, a few kB each."""
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((side, side)).convert("RGB").save(buffer, "WEBP", quality=10, method=0)
    uri = "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
    part = {"type": "image_url", "image_url": {"url": uri}}
    return chat_body(messages=[{"role": "user", "content": [part] * images}], max_tokens=4)


class Connections:
    """Connections that are fed without ever waiting for one of them, and opened again when the server closes them."""

    def __init__(self, address: Address, count: int, data: bytes, last: bytes = b"") -> None:
        """`data` is sent once on each; `last` again and again, a byte at a time."""
        self._address, self._data, self._last = address, data, last
        self._selector = selectors.DefaultSelector()
        for _ in range(count):
            self._open()

    def _open(self) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(self._address)
        self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, [0])

    def feed(self, seconds: float) -> int:
        """Send what the sockets take; returns how many the server has closed."""
        closed = 0
        for key, events in self._selector.select(seconds):
            sock, sent = key.fileobj, key.data
            assert isinstance(sock, socket.socket)
            try:
                if events & selectors.EVENT_READ and not sock.recv(_PIECE):
                    raise ConnectionResetError
                if events & selectors.EVENT_WRITE and sent[0] < len(self._data):
                    sent[0] += sock.send(memoryview(self._data)[sent[0] : sent[0] + _PIECE])
                elif events & selectors.EVENT_WRITE:
                    self._selector.modify(sock, selectors.EVENT_READ, sent)
            except OSError:
                self._selector.unregister(sock)
                sock.close()
                closed += 1
        return closed

    def drip(self) -> None:
        """One more byte on each."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket) and key.data[0] >= len(self._data):
                try:
                    key.fileobj.send(self._last[:1])
                except OSError:
                    pass  # closed by the server: `feed` will find it

    def refill(self, count: int) -> None:
        """Open as many as were closed."""
        for _ in range(count):
            self._open()

    def close(self) -> None:
        """Close all."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()


def hold(address: Address, stop: Event, count: int, data: bytes, last: bytes = b"") -> None:
    """Keep `count` such connections open."""
    connections = Connections(address, count, data, last)
    while not stop.is_set():
        closed = connections.feed(0.2)
        if last:
            connections.drip()
        connections.refill(closed)
        if closed:
            stop.wait(0.1)
    connections.close()


def repeat(address: Address, stop: Event, request: bytes, at_once: int = 1) -> None:
    """Send whole requests, `at_once` at a time, and read the answers."""
    while not stop.is_set():
        socks: list[socket.socket] = []
        try:
            for _ in range(at_once):
                sock = socket.create_connection(address, timeout=60)
                socks.append(sock)
                sock.sendall(request)
            for sock in socks:
                sock.settimeout(0.5)
                while not stop.is_set():
                    try:
                        if not sock.recv(_PIECE):
                            break
                    except TimeoutError:
                        continue
        except OSError:
            stop.wait(0.1)
        finally:
            for sock in socks:
                sock.close()


@dataclass(frozen=True)
class Attack:
    """`run(address, token, stop)`; `seconds` of it are enough to show what it does."""

    name: str
    run: Callable[[Address, str, Event], None]
    seconds: float = 12.0


def _posted(body: Callable[[], bytes], at_once: int = 1) -> Callable[[Address, str, Event], None]:
    def run(address: Address, token: str, stop: Event) -> None:
        data = body()
        repeat(address, stop, head(CHAT, len(data), token, Connection="close") + data, at_once)

    return run


def _held(count: int, data: Callable[[str], bytes], last: bytes = b"") -> Callable[[Address, str, Event], None]:
    return lambda address, token, stop: hold(address, stop, count, data(token), last)


def attacks() -> Iterator[Attack]:
    """All of them."""
    size = 31 << 20
    yield Attack("no token: 256 posts to /health, a byte each", _held(256, lambda _: head("/health", 10) + b"{"))
    yield Attack(
        "no token: 40 posts to /health of 31 MiB", _held(40, lambda _: head("/health", size) + b" " * (size - 1))
    )
    yield Attack("no token: 256 posts to /generate, a byte each", _held(256, lambda _: head("/generate", 10) + b"{"))
    yield Attack("no token: 1,100 silent connections", _held(1100, lambda _: b""), 20)
    yield Attack("no token: 1,100 dripping headers", _held(1100, lambda _: b"GET /health HTTP/1.1\r\nX: ", b"x"), 20)
    yield Attack(
        "no token: 500 GET /health again and again",
        _held(500, lambda _: head("/health", None, None, "GET", Connection="close")),
    )
    yield Attack("deep nesting", _posted(lambda: b'{"model":' + b"[" * (8 << 20)))
    yield Attack("30 MB of escapes", _posted(lambda: chat_body(user="\n" * (15 << 20))))
    yield Attack(
        "40 bodies of 31 MiB with the token",
        lambda address, token, stop: hold(
            address, stop, 40, head(CHAT, size, token) + b'{"model":"' + b" " * (size - 12)
        ),
    )
    yield Attack(
        "n x tokens x top_logprobs",
        _posted(lambda: chat_body(n=64, max_tokens=2000, logprobs=True, top_logprobs=20, ignore_eos=True)),
        25,
    )
    yield Attack(
        "n x tokens x top_logprobs, as many as are allowed",
        _posted(lambda: chat_body(n=64, max_tokens=74, logprobs=True, top_logprobs=20, ignore_eos=True), 2),
        60,
    )
    yield Attack("16 WebP of 4096²", _posted(lambda: webp_body(16, 4096)), 20)
    yield Attack("8 at once: 16 WebP of 2880²", _posted(lambda: webp_body(16, 2880), 8), 20)
