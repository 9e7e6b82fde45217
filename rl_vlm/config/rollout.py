"""`rollout`: how the policy is sampled."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from rl_vlm.config.section import Section
from rl_vlm.types import InFlightUpdates


class RolloutSection(Section):
    """How the policy is sampled: from its whole distribution, since the learner cannot reproduce a truncated one."""

    num_env_runners: int = Field(2, ge=1)
    cpus_per_env_runner: float = Field(0.25, ge=0)
    prompts_per_iteration: int = Field(16, ge=1)
    group_size: int = Field(8, ge=1)
    temperature: float = Field(1.0, gt=0)
    max_turns: int = Field(
        8, ge=1, description="Turns after which an episode is truncated, whatever the environment says."
    )
    max_new_tokens_per_turn: int = Field(64, ge=1)
    max_new_tokens: int = Field(3072, ge=1, description="Sampled tokens of a whole trajectory.")
    require_end_of_turn: bool = Field(
        True, description="A turn without its end-of-turn token ends the episode without a reward."
    )
    max_policy_lag: int = Field(
        0,
        ge=0,
        description="0: sample, then learn. 1 or more: both at the same time, and a group is used when it is complete; none is "
        "learned from that is more versions old than this.",
    )
    late_groups: Literal["wait", "drop"] = Field(
        "wait",
        description="With a lag, where a slow group would become too old: the learner waits for it, or it is dropped. Dropping "
        "is faster and loses long episodes more often than short ones.",
    )
    groups_per_runner: int | None = Field(
        None,
        ge=1,
        description="With a lag, groups that an env runner samples at once. Default: prompts_per_iteration × max_policy_lag over "
        "all runners.",
    )
    partial_tokens: int | None = Field(
        None,
        ge=1,
        description="With a lag, partial rollouts: a turn is sampled in pieces of this many tokens, and each goes on with the newest "
        "weights. The age of a group is then that of its newest token.",
    )
    in_flight_updates: InFlightUpdates | None = Field(
        None,
        description="With a lag, samples that are running take each new version between two tokens. keep: with the keys and values "
        "that they have, of older versions; recompute: these are computed anew, so each token's log-probability is exactly "
        "its version's. The age of a group is then that of its newest token.",
    )
    open_ahead: bool = Field(
        True,
        description="Open the next round's episodes and encode their images while the learner works (max_policy_lag 0).",
    )
    group_retries: int = Field(2, ge=0, description="How often a failed group is tried again with fresh environments.")
    max_consecutive_failures: int = Field(32, ge=1, description="Lost groups in a row after which the run stops.")
    timeout_s: float = Field(900.0, gt=0, description="Deadline of one round of sampling.")

    @property
    def crosses_versions(self) -> bool:
        """Whether a turn that has begun goes on with newer weights."""
        return self.partial_tokens is not None or self.in_flight_updates is not None

    def with_turns_of(self, tokens: int) -> RolloutSection:
        """With up to so many sampled tokens per turn. A trajectory's budget that is smaller grows to that of all its turns."""
        budget = self.max_new_tokens if tokens <= self.max_new_tokens else tokens * self.max_turns
        return self.model_copy(update={"max_new_tokens_per_turn": tokens, "max_new_tokens": budget})

    @property
    def groups_at_once(self) -> int:
        """Groups that an env runner samples at once: its share of a round, or with a lag `groups_per_runner`."""
        if self.groups_per_runner is not None:
            return self.groups_per_runner
        return math.ceil(self.prompts_per_iteration * max(self.max_policy_lag, 1) / self.num_env_runners)
