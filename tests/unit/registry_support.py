"""What the tests of registries and followers share."""

from __future__ import annotations

from typing import Any


class Direct:
    """An actor handle's way of calling (`handle.method.remote(...)`), without an actor."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        class Method:
            remote = staticmethod(getattr(self._target, name))

        return Method
