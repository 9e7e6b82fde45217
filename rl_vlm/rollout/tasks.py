"""What env runners are asked for, and what they answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rl_vlm.tracing import Span
from rl_vlm.types import Split, TrajectoryGroup

View = Literal["true", "blank", "swapped"]


@dataclass(frozen=True, slots=True)
class RolloutTask:
    """Sample one group: `size` episodes of task instance `index`.

    `seed` seeds the environments (the same for all copies); `sampling_seed` is hashed with sample and turn for the
    policy's randomness. `variant` names a set of environment arguments of the configuration, `env` one environment of a
    mixture, and `arguments` are what the curriculum changes at `stage`. `trace` is the span that asks for the group.
    `view` says what the policy sees: the true images, blank ones in every turn, or in the first turn those of item
    `other_index`.
    """

    group_id: str
    index: int
    split: Split
    seed: int
    sampling_seed: int
    size: int
    temperature: float
    min_version: int  # the oldest policy version that may answer
    variant: str = ""
    top_p: float = 1.0  # training samples from the whole distribution; `rl-vlm rollout` may restrict it
    top_k: int = 0  # 0: off
    record: bool = False  # keep the conversation as text
    view: View = "true"
    other_index: int = 0
    env: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    stage: int = 0
    trace: str = ""


@dataclass(slots=True)
class RolloutResult:
    """The groups of one `sample` call. `lost` maps the ids of groups without a result to the reason."""

    groups: list[TrajectoryGroup] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> failed attempts, retried ones included
    seconds: float = 0.0  # that the call took
    retries: int = 0  # of requests, by the client
    needs_restart: bool = False  # an environment hangs in a thread of this runner
    spans: list[Span] = field(default_factory=list)  # of tasks that are traced


def merged(results: Sequence[RolloutResult]) -> RolloutResult:
    """Several results as one, whatever the order in which they arrived."""
    whole, dropped = RolloutResult(), Counter[str]()
    for result in results:
        whole.groups += result.groups
        whole.lost |= result.lost
        whole.retries += result.retries
        whole.seconds += result.seconds
        whole.spans += result.spans
        dropped.update(result.dropped)
    whole.dropped = dict(dropped)
    whole.groups.sort(key=lambda group: group.group_id)  # the order in which the driver made them
    return whole
