"""`rollout`: how the policy is sampled."""

from __future__ import annotations

from pydantic import Field

from rl_vlm.config.section import Section


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
    max_policy_lag: int = Field(0, ge=0, description="0: sample, then learn. 1 or more: both at the same time.")
    open_ahead: bool = Field(
        True,
        description="Open the next round's episodes and encode their images while the learner works (max_policy_lag 0).",
    )
    group_retries: int = Field(2, ge=0, description="How often a failed group is tried again with fresh environments.")
    max_consecutive_failures: int = Field(32, ge=1, description="Lost groups in a row after which the run stops.")
    timeout_s: float = Field(900.0, gt=0, description="Deadline of one round of sampling.")
