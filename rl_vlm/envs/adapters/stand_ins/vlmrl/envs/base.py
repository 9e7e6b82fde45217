"""The base classes of vlm-gym's environments, by their interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BaseState:
    """What an environment remembers between its steps."""

    def render(self) -> str:
        """A text that describes the state."""
        raise NotImplementedError  # abstract: each environment has its own state


class BaseEnv:
    """`reset(idx) -> (state, observation)`; `step(state, action_tokens) -> (state, out_tokens, reward, done, info)`."""

    tokens_per_action: int = 32
    force_answer_at: int = -1
    num_tasks: int = -1  # no end

    def reset(self, idx: int) -> tuple[BaseState, Any]:
        """Open a task."""
        raise NotImplementedError  # abstract: the environment's own

    def step(
        self, state: BaseState, action_tokens: Sequence[int]
    ) -> tuple[BaseState, Sequence[int], float, bool, dict[str, Any]]:
        """Answer the policy's tokens."""
        raise NotImplementedError  # abstract: the environment's own

    @staticmethod
    def clean_action(action_tokens: Sequence[int], end_token: int) -> list[int]:
        """The tokens up to and with the first `end_token`."""
        tokens = list(action_tokens)
        return tokens[: tokens.index(end_token) + 1] if end_token in tokens else tokens
