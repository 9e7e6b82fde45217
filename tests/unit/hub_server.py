"""A stand-in for the Hugging Face hub: the parts of its API that its client uses for public data sets and single files."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40


class Hub:
    """`files`: repo -> path -> bytes. `breaks`: paths whose next download breaks off halfway."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.breaks: set[str] = set()
        self.sent: Counter[str] = Counter()  # path -> bytes
        self.url = ""

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serve on a free port of this machine; gives the address for HF_ENDPOINT."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join(5)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/[^/]+(?:/(.*))?", path):
            return self._json(self._entries(found[1], (found[2] or "").rstrip("/")))
        if found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/revision/[^/]+)?", path):
            if found[1] not in self.hub.files:
                return self._missing("RepoNotFound")
            siblings = [{"rfilename": name} for name in self.hub.files[found[1]]]
            return self._json({"id": found[1], "sha": COMMIT, "private": False, "siblings": siblings})
        self._file(path)

    def do_HEAD(self) -> None:
        self._file(unquote(urlsplit(self.path).path), body=False)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        found = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/paths-info/[^/]+", urlsplit(self.path).path)
        if not found or found[1] not in self.hub.files:
            return self._missing("RepoNotFound")
        try:
            paths = json.loads(body)["paths"]
        except ValueError:
            paths = [unquote(part.partition("=")[2]) for part in body.split("&") if part.startswith("paths=")]
        self._json([self._entry(found[1], path) for path in paths if path in self.hub.files[found[1]]])

    def _entries(self, repo: str, folder: str) -> list[dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = {}
        prefix = f"{folder}/" if folder else ""
        for path in self.hub.files.get(repo, {}):
            if path.startswith(prefix):
                name, deeper, _ = path[len(prefix) :].partition("/")
                inside = {"type": "directory", "oid": COMMIT, "size": 0, "path": prefix + name}
                entries[name] = inside if deeper else self._entry(repo, path)
        return list(entries.values())

    def _entry(self, repo: str, path: str) -> dict[str, Any]:
        content = self.hub.files[repo][path]
        return {"type": "file", "oid": hashlib.sha1(content).hexdigest(), "size": len(content), "path": path}

    def _file(self, path: str, body: bool = True) -> None:
        found = re.fullmatch(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/[^/]+/(.*)", path)
        content = self.hub.files.get(found[1], {}).get(found[2]) if found else None
        if found is None or content is None:
            return self._missing("EntryNotFound")
        first, last = 0, len(content) - 1
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted:
            first, last = int(wanted[1]), min(int(wanted[2] or last), last)
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if not body:
            return
        part = content[first : last + 1]
        if found[2] in self.hub.breaks:
            self.hub.breaks.discard(found[2])
            part = part[: len(part) // 2]
            self.close_connection = True
        self.hub.sent[found[2]] += len(part)
        self.wfile.write(part)

    def _missing(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
