"""Errors of requests, and the two JSON shapes in which they are sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from rl_vlm.types import RLVLMError

# HTTP status -> OpenAI's error type.
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_RETRY_AFTER_S = 1  # clients add their own jitter and backoff


class RequestError(RLVLMError):
    """A request that cannot be answered; `status` is HTTP's, `code` and `param` are OpenAI's."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def headers(self) -> dict[str, str]:
        """Retry-After for a server that is busy, WWW-Authenticate for a missing token."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": str(_RETRY_AFTER_S)} if self.status in (429, 503) else {}


def error_body(error: RequestError) -> dict[str, Any]:
    """OpenAI's shape."""
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def error_response(path: str, error: RequestError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """OpenAI's shape under `/v1`, `{"detail"}` elsewhere."""
    content = error_body(error) if path.startswith("/v1") else {"detail": str(error)}
    return JSONResponse(content, error.status, {**error.headers, **(headers or {})})
