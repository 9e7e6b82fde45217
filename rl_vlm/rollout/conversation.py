"""Conversation: the rules of an episode, whoever answers: budgets, unfinished turns, and what ends it."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl_vlm.config import RolloutSection
from rl_vlm.envs.base import Info, StepResult, VisionEnv
from rl_vlm.types import Message, Observation, TrajectoryStatus


@dataclass(slots=True)
class Conversation:
    """One episode while it is played. `num_sampled` counts tokens."""

    env: VisionEnv
    messages: list[Message]
    info: Info
    num_turns: int = field(default=0, kw_only=True)
    num_sampled: int = field(default=0, kw_only=True)
    status: TrajectoryStatus = field(default=TrajectoryStatus.COMPLETED, kw_only=True)

    def next_budget(self, rollout: RolloutSection, room: int | None = None) -> int:
        """The tokens that the next turn may have, with `room` left in the context. 0 ends the episode, which is truncated."""
        left = min(rollout.max_new_tokens_per_turn, rollout.max_new_tokens - self.num_sampled)
        budget = max(left if room is None else min(left, room), 0)
        if budget == 0 or self.num_turns >= rollout.max_turns:
            self.status = TrajectoryStatus.TRUNCATED
            return 0
        return budget

    def add_turn(self, rollout: RolloutSection, tokens: int, cut_off: bool) -> bool:
        """Count a turn; whether it goes to the environment. A turn that is not finished holds no answer to reward."""
        self.num_turns += 1
        self.num_sampled += tokens
        if cut_off and rollout.require_end_of_turn:
            self.status = TrajectoryStatus.TRUNCATED
            return False
        return True

    def receive(self, result: StepResult) -> Observation | None:
        """Take in what the environment replied; None where that ended the episode."""
        observation, _, terminated, truncated, info = result
        self.info.update(info)
        if truncated and not terminated:
            self.status = TrajectoryStatus.TRUNCATED
        return None if terminated or truncated else observation
