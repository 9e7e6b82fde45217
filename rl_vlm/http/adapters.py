"""vLLM's requests to load and unload adapters while the server runs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from rl_vlm.config.section import Name
from rl_vlm.http.gate import BODY, RequestError
from rl_vlm.http.schema import parse_body


class UnloadRequest(BaseModel):
    """vLLM's: the adapter to forget."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: Name  # What clients call the adapter.
    lora_int_id: int | None = None  # Means nothing, as in vLLM.


class LoadRequest(UnloadRequest):
    """vLLM's: an adapter in a folder of the server's machine."""

    lora_path: str = Field(min_length=1, max_length=4096)  # A peft folder below http.adapter_root.
    load_inplace: bool = False  # A name that is loaded already gets a new version either way.
    is_3d_lora_weight: Literal[False] = False  # Weights of experts are not taken in this form.


def adapter_routes(backend: Any) -> list[Route]:
    """The two routes, in front of a `ServeBackend`."""

    async def change(request: Request) -> Response:
        """Load or unload an adapter; only with `http.adapter_root`."""
        loads = request.url.path.startswith("/v1/load")
        body = parse_body(request.scope.pop(BODY), LoadRequest if loads else UnloadRequest)
        if not loads and body.lora_name not in await backend.models():
            raise RequestError(404, f"The lora adapter {body.lora_name!r} cannot be found.", param="lora_name")
        await backend.change(body.lora_name, body.lora_path if isinstance(body, LoadRequest) else None)
        done = "added" if loads else "removed"
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' {done} successfully.")

    return [Route(f"/v1/{what}_lora_adapter", change, methods=["POST"]) for what in ("load", "unload")]
