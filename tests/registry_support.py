"""What the tests of registries and followers share; without Ray."""

from __future__ import annotations

import asyncio
from typing import Any

from rl_vlm.models.weights import AdapterPayload
from rl_vlm.serving.registry import Published, VersionRegistry
from rl_vlm.testing import LocalActor as Direct  # noqa: F401
from rl_vlm.types import POLICY


def arrived(payload: AdapterPayload) -> Any:
    """What awaits like an object reference."""
    future = asyncio.get_running_loop().create_future()
    future.set_result(payload)
    return future


async def own_registry() -> VersionRegistry:
    """The registry of a run's own service, which the run has joined."""
    registry = VersionRegistry()
    await registry.join(POLICY)
    return registry


async def publish(registry: VersionRegistry, version: int) -> None:
    """A version without weights."""
    payload = AdapterPayload(version, b"weights", "{}", f"hash {version}")
    assert await registry.publish(Published(version, payload.sha256, arrived(payload)))
