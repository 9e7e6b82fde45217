"""`rollout`, `evaluation` and `sight`: how episodes are sampled and measured."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from rl_vlm.config.section import Count, Natural, NonNegative, OnlyWith, Positive, Section
from rl_vlm.types import Grammar, InFlightUpdates


def _grammar(form: Mapping[str, Any]) -> Grammar:
    """The grammar of a `rollout.format`."""
    match [*form.items()]:
        case [("json", dict() as schema)]:
            return Grammar("json_schema", json.dumps(schema))
        case [("regex" | "grammar" as kind, str() as text)] if text:
            return Grammar(kind, text)
        case [("choice", [*texts])] if texts and all(isinstance(text, str) and text for text in texts):
            return Grammar("grammar", f"start: {' | '.join(map(json.dumps, texts))}")
    raise ValueError(
        "rollout.format takes one of json (a schema), regex (a text), choice (a list of texts, numbers in quotes) and "
        "grammar (a text in Lark or GBNF), such as {regex: '[0-9]+'}"
    )


class HistorySection(Section):
    """What a turn shows of its episode. Older parts go in blocks, so that most prompts are the last one and more."""

    place: ClassVar[str] = "rollout.history."
    conditional: ClassVar[tuple[OnlyWith, ...]] = (OnlyWith(("omitted",), "images"),)

    images: Count | None = None  # The newest pictures; null: all.
    turns: Count | None = None  # The first observation, and the newest ones after it; null: all.
    keep: Count | None = None  # How many stay when one too many would be shown. Default: half as many as are allowed.
    omitted: str = "(an earlier picture)"  # Stands in the place of a picture that is left out.

    @model_validator(mode="before")
    @classmethod
    def _all(cls, value: Any) -> Any:
        return {} if value == "all" else value

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        limits = [limit for limit in (self.images, self.turns) if limit is not None]
        if self.keep is not None and not limits:
            yield "rollout.history.keep has no effect without rollout.history.images or turns: remove it, or set one"
        elif self.keep is not None and self.keep > min(limits):
            yield f"rollout.history.keep ({self.keep}) must be at most the images and turns that are shown"

    @property
    def is_all(self) -> bool:
        return self.images is None and self.turns is None

    def kept(self, limit: int) -> int:
        """How many of something stay when `limit` is passed."""
        return self.keep or max(limit // 2, 1)


class RolloutSection(Section):
    """How the policy is sampled: from its whole distribution, since the learner cannot reproduce a truncated one."""

    place: ClassVar[str] = "rollout."
    conditional: ClassVar[tuple[OnlyWith, ...]] = (
        OnlyWith(("groups_per_runner", "late_groups", "partial_tokens", "in_flight_updates"), "max_policy_lag"),
    )

    num_env_runners: Count = 2  # Ray actors that step environments.
    cpus_per_env_runner: NonNegative = 0.25  # CPUs that Ray reserves for an env runner.
    prompts_per_iteration: Count = 16  # Groups that an iteration samples.
    group_size: Count = 8  # Episodes per group, which start from the same item.
    temperature: Positive = 1.0  # Of sampling in training.
    max_turns: Count = 8  # Turns after which an episode is truncated, whatever the environment says.
    max_new_tokens_per_turn: Count = 64  # A longer turn is cut off.
    max_new_tokens: Count = 3072  # Sampled tokens of a whole trajectory.
    # What each sampled turn is by construction: {json: SCHEMA}, {regex: TEXT}, {choice: [TEXT, ...]} or
    # {grammar: TEXT in Lark or GBNF}; null: any text.
    format: dict[str, Any] | None = None
    history: HistorySection = HistorySection()  # all, or what follows.
    require_end_of_turn: bool = True  # A turn without its end-of-turn token ends the episode without a reward.
    # 0: sample, then learn. 1 or more: both at the same time, from groups that are at most so many versions old.
    max_policy_lag: Natural = 0
    # With a lag, a slow group that would become too old; dropping is faster and loses more of the long episodes.
    late_groups: Literal["wait", "drop"] = "wait"
    # With a lag, groups that a runner samples at once. Default: its share of prompts_per_iteration × max_policy_lag.
    groups_per_runner: Count | None = None
    # With a lag, a turn is sampled in pieces of so many tokens, each with the newest weights; a group is as old as the
    # newest piece.
    partial_tokens: Count | None = None
    # With a lag, running samples take each new version between two tokens. keep: with their keys and values, of older
    # versions; recompute: these are computed anew, so each token's log-probability is exactly its version's.
    in_flight_updates: InFlightUpdates | None = None
    # Open the next round's episodes and encode their images while the learner works (max_policy_lag 0).
    open_ahead: bool = True
    group_retries: Natural = 2  # How often a failed group is tried again with fresh environments.
    max_consecutive_failures: Count = 32  # Lost groups in a row after which the run stops.
    timeout_s: Positive = 900.0  # Deadline of one round of sampling.

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        _ = self.grammar  # raises

    @property
    def grammar(self) -> Grammar | None:
        """What `format` says."""
        return None if self.format is None else _grammar(self.format)

    @property
    def crosses_versions(self) -> bool:
        """Whether a turn that has begun goes on with newer weights."""
        return self.partial_tokens is not None or self.in_flight_updates is not None

    def with_turns_of(self, tokens: int) -> RolloutSection:
        """With up to `tokens` sampled per turn; a smaller budget of the trajectory grows to that of all turns."""
        budget = self.max_new_tokens if tokens <= self.max_new_tokens else tokens * self.max_turns
        return self.model_copy(update={"max_new_tokens_per_turn": tokens, "max_new_tokens": budget})

    @property
    def groups_at_once(self) -> int:
        """Groups that an env runner samples at once."""
        if self.groups_per_runner is not None:
            return self.groups_per_runner
        return math.ceil(self.prompts_per_iteration * max(self.max_policy_lag, 1) / self.num_env_runners)


class EvaluationDeadline(Section):
    timeout_s: Positive = 1800.0  # Deadline of one evaluation.


class EvaluationSection(EvaluationDeadline):
    """Held-out evaluation, greedy; with `samples` above 1 also pass@k at the rollout temperature."""

    every: Natural = 50  # Iterations between evaluations; 0: only before and after.
    num_items: Count = 512  # Items that an evaluation asks.
    samples: Count = 1  # Answers per item.
    # ema: evaluate the average of the weights (learner.ema_decay); needs max_policy_lag 0.
    weights: Literal["policy", "ema"] = "policy"
    split: Literal["train", "test"] = "test"  # Where the items come from.
    # Name -> environment arguments to change; with env.mixture a name -> environment -> arguments.
    variants: dict[str, dict[str, Any]] = Field({"default": {}}, min_length=1)
    category: str = "category"  # Key of the environment's info by which `rl-vlm eval` makes a table of its own.
    # Items that `rl-vlm eval` asks at once, and, with env.isolation process, an evaluation in training plays at once.
    at_once: Count = 64


class SightSection(Section):
    """Checks that engine and learner see the same images, and measures how much answers depend on them."""

    # What a fault found before training, or while it goes on, does; off: nothing of this section is measured.
    gate: Literal["error", "warn", "off"] = "error"
    items: int = Field(8, ge=2)  # Held-out items that the gate asks about, each with several images.
    every: Natural = 10  # Iterations between the metrics sight/kl_blank and sight/gap; 0: none.
    samples: Count = 4  # Trajectories that these metrics are computed from.
    blank_items: Natural = 32  # Held-out items that evaluations repeat with blank and with swapped images.
