"""The page docs/http_api.md: routes, fields, limits and status codes, read from the code that serves them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

from pydantic import BaseModel

from rl_vlm.config import HTTPSection
from rl_vlm.config.reference import Key, key_table, reference, table
from rl_vlm.http.adapters import LoadRequest, UnloadRequest
from rl_vlm.http.app import ModelApp
from rl_vlm.http.gate import STATUSES
from rl_vlm.http.responses import ResponsesRequest
from rl_vlm.http.schema import (
    IGNORED,
    USUAL,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    SampledRequest,
    TokenizeRequest,
)
from rl_vlm.models.loading import load_text_side, resolve_model

_BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/generate": GenerateRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/load_lora_adapter": LoadRequest,
    "/v1/unload_lora_adapter": UnloadRequest,
}


# Types of our own as a reader knows them.
_TYPES = {
    "BadTexts": "list of str", "Biases": "object of numbers", "Choice": "str or object",
    "Messages": "list of messages", "Pattern": "str",
    "Prompts": "list of these", "ResponseFormat": "object", "Schema": "JSON schema", "StopTexts": "str or list of str",
    "StreamOptions": "object", "StructuredOutputs": "object", "TemplateOptions": "object", "Texts": "list of str",
    "TokenId": "int", "TokenIds": "list of int", "Tool": "object",
}  # fmt: skip
_OWN = re.compile(rf"\b({'|'.join(_TYPES)})\b")


def _routes() -> Iterator[tuple[str, ...]]:
    limits = HTTPSection(adapter_root="/")  # with the routes that load adapters
    app = ModelApp(None, load_text_side(resolve_model("tiny")), limits, max_context=512)  # type: ignore[arg-type]
    for route in app.gate.routes:
        handler = getattr(route.endpoint, "func", route.endpoint)
        method = "POST" if "POST" in (route.methods or ()) else "GET"
        body = f"`{_BODIES[route.path].__name__}`" if method == "POST" else ""
        yield f"`{method} {route.path}`", body, " ".join((handler.__doc__ or "").split())


def _fields(keys: Iterable[Key]) -> list[str]:
    def shown(kind: str) -> str:
        kind = _OWN.sub(lambda found: _TYPES[found[0]], kind.replace(", < 2147483648", ""))
        return re.sub(r"list\[(.*?)\]", r"list of \1", kind)

    return key_table("field", (key._replace(type=shown(key.type)) for key in keys))


def page() -> str:
    lines = ["# HTTP API reference", "", "<!-- Written by `rl-vlm config --markdown --page http_api`. -->", ""]
    lines += [
        "Every route, field, limit and status of `rl-vlm serve`. [The HTTP API](serving_api.md) explains them, and "
        "[serving](serving.md) shows how to start a server."
    ]
    lines += ["", "## Routes", "", *table(("route", "body", "answer"), _routes())]
    lines += ["", "## Fields of all requests for samples", ""]
    lines += ["`ChatRequest`, `CompletionRequest` and `ResponsesRequest` have these fields.", ""]
    shared = list(reference(SampledRequest))
    lines += _fields(key for key in shared if key.meaning)  # the others are not for clients
    for body in _BODIES.values():
        lines += ["", f"## `{body.__name__}`", "", " ".join((body.__doc__ or "").split())]
        if own := [key for key in reference(body) if key not in shared and body is not ResponsesRequest]:
            lines += ["", *_fields(own)]
    lines += ["", "## Fields that change nothing", "", f"{', '.join(f'`{name}`' for name in sorted(IGNORED))}."]
    lines += ["", "## Fields that are not supported", ""]
    lines += ["Where a request has no such field, it may be sent with the one value that changes nothing.", ""]
    lines += table(("field", "value"), ((f"`{name}`", f"`{json.dumps(USUAL[name])}`") for name in sorted(USUAL)))
    lines += ["", "## Limits", "", *_fields(reference(HTTPSection, "http."))]
    lines += ["", "## Status codes", "", *table(("status", "when, and what to do"), sorted(STATUSES.items()))]
    return "\n".join(lines)
