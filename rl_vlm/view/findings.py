"""What looks wrong in a run, in sentences: each a check of a few numbers, with the view that shows the evidence."""

from __future__ import annotations

from collections import Counter
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
    losses: Sequence[Mapping[str, Any]],
) -> list[Finding]:
    """Of metrics by iteration, evaluations, the newest session's pairs, `gaps`: by how many nats per token each replica
    and the learner differ in the newest dump, and `losses`: why groups were lost, by iteration."""
    return [
        *_gamed(evaluations),
        *_never_right(progress),
        *_lost(progress, evaluations, losses),
        *_other_weights(gaps),
        *(Finding(text, "sight") for row in evaluations.tail(1).to_dict("records") if (text := blind(row))),
        *_stuck(progress),
        *_mismatch(progress, gaps),
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


def _astray(gaps: Mapping[str, float]) -> list[str]:
    """The replicas that are much further away from the learner than the nearest one."""
    least = min(gaps.values(), default=0.0)
    return [replica for replica, gap in gaps.items() if gap > max(_MISMATCH, _GROWN * least)]


def _other_weights(gaps: Mapping[str, float]) -> Iterator[Finding]:
    for replica in _astray(gaps):
        nearest = min(gaps, key=gaps.__getitem__)
        yield Finding(
            f"Replica {replica} seems to serve other weights than the learner has: its answers are {gaps[replica]:.2g} "
            f"nats per token away from them, those of replica {nearest} {gaps[nearest]:.2g}. Colour its episodes by "
            "the gap.", "episodes",
        )  # fmt: skip


def _lost(progress: pd.DataFrame, evaluations: pd.DataFrame, losses: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    names = ("dropped/group_lost", "rollout/groups", "iteration")
    ever, kept, iterations = (progress.get(name, pd.Series(dtype=float)) for name in names)
    lost, rest = ever.fillna(0).diff().tail(_STUCK).clip(lower=0).sum(), kept.tail(_STUCK).sum()
    if lost > _LOST * (lost + rest):
        newest, reasons = {*iterations.tail(_STUCK)}, Counter[str]()
        for one in losses:
            reasons[one["reason"]] += one["count"] * (one["iteration"] in newest)
        share = f"{lost / (lost + rest):.0%} of the groups of the last {_STUCK} iterations were lost."
        yield Finding(share + _most_frequent(+reasons), "system")
    for row in evaluations.tail(1).to_dict("records"):
        missing, asked = row.get("lost", 0), sum(row[key] for key in row if key.startswith("items/"))
        if missing > _LOST * asked:
            share = f"{missing:.0f} answers of the last evaluation were lost, and count as wrong."
            yield Finding(share + _most_frequent(row.get("lost_because")), "system")


def _most_frequent(reasons: Any) -> str:
    """A sentence with the reason that counts most; reasons name the replica where one is to blame."""
    if not isinstance(reasons, Mapping) or not reasons:  # an evaluation without losses has none
        return ""
    return f" Most frequent reason: {' '.join(max(reasons, key=reasons.__getitem__).split())}"


def _stuck(progress: pd.DataFrame) -> Iterator[Finding]:
    idle = progress.get("reward/zero_advantage_groups", pd.Series(dtype=float)).dropna()
    if len(idle) >= _STUCK and (idle.tail(_STUCK) >= 1).all():
        yield Finding(
            f"In the last {_STUCK} iterations all answers of each group earned the same, so nothing was learned.",
            "groups",
        )


def _mismatch(progress: pd.DataFrame, gaps: Mapping[str, float]) -> Iterator[Finding]:
    kl = progress.get("mismatch/kl", pd.Series(dtype=float)).dropna()
    if len(kl) < 2 * _STUCK:
        return
    first, last = float(kl.head(_STUCK).mean()), float(kl.tail(_STUCK).mean())
    if last > max(_MISMATCH, _GROWN * first):
        text = f"Engine and learner disagree more and more: mismatch/kl is {last:.2g}, and was {first:.2g}."
        if astray := _astray(gaps):
            text += f" The cause is replica {' and '.join(astray)}, which seems to serve other weights."
        elif len(gaps) > 1:
            each = ", ".join(f"{replica} {gap:.2g}" for replica, gap in gaps.items())
            text += f" No replica alone is the cause: nats per token from the learner are {each}."
        yield Finding(text, "curves")


def _position(pairs: Sequence[Any]) -> Iterator[Finding]:
    """Answers are in terms of the pair as it is, so the same position named in both orders gives two different ones."""
    both = [pair["answers"] for pair in pairs if len(pair["answers"]) == 2]
    same = sum({*answers} == {0, 1} for answers in both)
    if len(both) >= _LEAST_PAIRS and same > _BIASED * len(both):
        yield Finding(
            f"In {same / len(both):.0%} of the newest pairs the labeller named the same position in both orders: its "
            "answers follow the order, not the pictures.", "preferences",
        )  # fmt: skip
