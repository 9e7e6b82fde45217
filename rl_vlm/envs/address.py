"""Environments that run elsewhere: their addresses, and the token that is sent there."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from rl_vlm.safe_text import keep_secret
from rl_vlm.types import UserInputError

TOKEN_VARIABLE = "RL_VLM_API_TOKEN"
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def base_url(address: str) -> str:
    """ "http://host:port[/path]" of an address with or without its scheme. Raises UserInputError."""
    url = urlsplit(address if "://" in address else f"http://{address}")
    try:
        port = url.port
    except ValueError:
        port = -1
    known = url.scheme in ("http", "https") and url.hostname and port != -1
    if not known or url.query or url.fragment or url.username:
        raise UserInputError(f"{address!r} is not the address of an environment: write http://host:port.")
    return url.geturl().rstrip("/")


def url_host(host: str) -> str:
    """A host as a URL has it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def is_loopback(url: str) -> bool:
    """Whether an address is this machine's own; it is then reached without a proxy."""
    try:
        return urlsplit(url).hostname in LOOPBACK
    except ValueError:  # no address: an error of the call that uses it
        return False


def token_header(variable: str) -> dict[str, str]:
    """The header with the token that an environment variable holds; empty if it is not set."""
    token = os.environ.get(variable, "").strip()
    if not token.isascii() or (token and not token.isprintable()):
        raise UserInputError(f"{variable} must be printable ASCII text.")
    keep_secret(token)
    return {"Authorization": f"Bearer {token}"} if token else {}


def wrong_token(url: str, why: str = "401") -> UserInputError:
    """The error to raise where a server requires another token."""
    return UserInputError(f"{url} rejects the token ({why}): set the variable that env.kwargs.token_variable names.")
