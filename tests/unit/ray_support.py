"""Ray's calls of actors, played without Ray: a reference holds its result, an exception, or nothing for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ray.exceptions import ActorUnavailableError

DEAD = ActorUnavailableError("The actor is restarting.", None)
HANGS = ValueError("no result ever comes")


class Reference:
    """Compared by identity, as Ray's are by id."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _get(ref: Reference, **_: Any) -> Any:
    if isinstance(ref.value, Exception):
        raise ref.value
    return ref.value


def _wait(refs: list[Reference], **_: Any) -> tuple[list[Reference], list[Reference]]:
    return [ref for ref in refs if ref.value is not HANGS], [ref for ref in refs if ref.value is HANGS]


def _kill(actor: Any, no_restart: bool) -> None:
    assert not no_restart
    actor.kill()


RAY = SimpleNamespace(get=_get, wait=_wait, put=lambda value: value, ObjectRef=Reference, kill=_kill)
