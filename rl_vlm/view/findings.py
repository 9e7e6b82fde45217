"""What looks wrong in a run, in sentences: each a check of a few numbers, with the view that shows the evidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from rl_vlm.runs.hints import blind

_GAINED = 0.1  # of a reward or an accuracy: a smaller change says nothing
_ROWS = 10  # of metrics, before which an environment may not yet have rewarded an answer
_STUCK = 5  # iterations in a row
_MISMATCH = 1e-2  # nats per token, and so many times what it was
_GROWN = 10.0
_LEAST_PAIRS, _BIASED = 20, 0.2
_LOST = 0.1


class Finding(NamedTuple):
    """A sentence, and the view of the page that shows why."""

    text: str
    view: str


def findings(
    progress: pd.DataFrame,
    evaluations: pd.DataFrame,
    gaps: Mapping[str, float],
    pairs: Sequence[Any],
) -> list[Finding]:
    """Of metrics by iteration, evaluations, the newest session's pairs, and `gaps`: by how many nats per token each
    replica and the learner differ in the newest dump."""
    return [
        *_gamed(evaluations),
        *_never_right(progress),
        *_lost(progress, evaluations),
        *_other_weights(gaps),
        *(Finding(text, "sight") for row in evaluations.tail(1).to_dict("records") if (text := blind(row))),
        *_stuck(progress),
        *_mismatch(progress),
        *_position(pairs),
    ]


def _gamed(evaluations: pd.DataFrame) -> Iterator[Finding]:
    accuracy, reward = (
        next((evaluations[key] for key in evaluations if key.startswith(f"{name}/")), None)
        for name in ("accuracy", "reward")
    )
    if accuracy is None or reward is None or len(accuracy) < 2:
        return
    first, last = (float(accuracy.iloc[place]) for place in (0, -1))
    reward_before, reward_after = (float(reward.iloc[place]) for place in (0, -1))
    if reward_after - reward_before > _GAINED and first - last > _GAINED:
        yield Finding(
            f"The held-out reward rose from {reward_before:.2g} to {reward_after:.2g} while the accuracy fell "
            f"from {first:.0%} to {last:.0%}: the reward may be gamed. Read answers that earn much.", "episodes",
        )  # fmt: skip


def _never_right(progress: pd.DataFrame) -> Iterator[Finding]:
    known = {key.removeprefix("accuracy/"): progress[key].dropna() for key in progress if key.startswith("accuracy/")}
    if len(progress) < _ROWS or not any((values > 0).any() for values in known.values()):
        return
    for name, values in known.items():
        if len(values) >= _ROWS and not (values > 0).any():
            yield Finding(
                f"{name}: no answer was right in {len(values)} iterations. Either the task is too hard at first, or "
                "its reward is wrong. Read its answers.", "episodes",
            )  # fmt: skip


def _other_weights(gaps: Mapping[str, float]) -> Iterator[Finding]:
    least = min(gaps.values(), default=0.0)
    for replica, gap in gaps.items():
        if gap > max(_MISMATCH, _GROWN * least):
            yield Finding(
                f"Replica {replica} seems to serve other weights than the learner has: its answers are {gap:.2g} nats "
                f"per token away from them, those of another replica {least:.2g}. Colour its episodes by the gap.",
                "episodes",
            )


def _lost(progress: pd.DataFrame, evaluations: pd.DataFrame) -> Iterator[Finding]:
    ever, kept = (progress.get(name, pd.Series(dtype=float)) for name in ("dropped/group_lost", "rollout/groups"))
    lost, rest = ever.fillna(0).diff().tail(_STUCK).clip(lower=0).sum(), kept.tail(_STUCK).sum()
    if lost > _LOST * (lost + rest):
        yield Finding(f"{lost / (lost + rest):.0%} of the groups of the last {_STUCK} iterations were lost.", "system")
    for row in evaluations.tail(1).to_dict("records"):
        missing, asked = row.get("lost", 0), sum(row[key] for key in row if key.startswith("items/"))
        if missing > _LOST * asked:
            yield Finding(f"{missing:.0f} answers of the last evaluation were lost, and count as wrong.", "system")


def _stuck(progress: pd.DataFrame) -> Iterator[Finding]:
    idle = progress.get("reward/zero_advantage_groups", pd.Series(dtype=float)).dropna()
    if len(idle) >= _STUCK and (idle.tail(_STUCK) >= 1).all():
        yield Finding(
            f"In the last {_STUCK} iterations all answers of each group earned the same, so nothing was learned.",
            "groups",
        )


def _mismatch(progress: pd.DataFrame) -> Iterator[Finding]:
    kl = progress.get("mismatch/kl", pd.Series(dtype=float)).dropna()
    if len(kl) < 2 * _STUCK:
        return
    first, last = float(kl.head(_STUCK).mean()), float(kl.tail(_STUCK).mean())
    if last > max(_MISMATCH, _GROWN * first):
        yield Finding(
            f"Engine and learner disagree more and more: mismatch/kl is {last:.2g}, and was {first:.2g}.", "curves"
        )


def _position(pairs: Sequence[Any]) -> Iterator[Finding]:
    """Answers are in terms of the pair as it is, so the same position named in both orders gives two different ones."""
    both = [pair["answers"] for pair in pairs if len(pair["answers"]) == 2]
    same = sum({*answers} == {0, 1} for answers in both)
    if len(both) >= _LEAST_PAIRS and same > _BIASED * len(both):
        yield Finding(
            f"In {same / len(both):.0%} of the newest pairs the labeller named the same position in both orders: its "
            "answers follow the order, not the pictures.", "preferences",
        )  # fmt: skip
