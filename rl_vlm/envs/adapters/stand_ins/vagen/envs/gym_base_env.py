"""The base class of VAGEN's environments, by its interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class GymBaseEnv(ABC):
    """Coroutines `system_prompt`, `reset`, `step` and `close`; made with one dict."""

    def __init__(self, env_config: dict[str, Any]) -> None:
        self.config = env_config

    @abstractmethod
    async def close(self) -> None:
        """Free what the environment holds."""

    @abstractmethod
    async def system_prompt(self) -> dict[str, Any]:
        """The observation that opens every conversation."""

    @abstractmethod
    async def reset(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """(obs, info) of a new episode."""

    @abstractmethod
    async def step(self, action_str: str) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        """(obs, reward, done, info) after one turn of the policy."""
