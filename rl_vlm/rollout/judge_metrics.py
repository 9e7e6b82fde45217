"""What a judge said and cost: metrics from the notes that the reward part `judge` leaves in each episode's info."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rl_vlm.rollout.env_metrics import HasInfo


def judge_metrics(episodes: Iterable[HasInfo]) -> dict[str, float]:
    """Empty without a judge. `judge/win_rate`: the mean of 1, 0.5 and 0 for answers that won, contradicted the judge's orders or lost.

    `judge/order_bias`: share of the answers asked about whose orders contradict each other; `judge/first_rate`: share of replies for
    the text that was shown first, 0.5 without a bias; `judge/unclear`: share of replies that chose neither; `judge/refused`: share of
    answers that lost without a question; `judge/requests` and `judge/tokens` in all; `judge/seconds`: how long a group waited, the mean.
    """
    judged = [one.info for one in episodes if "judge_win" in one.info]
    if not judged:
        return {}
    notes = {key: np.array([float(info[key]) for info in judged]) for key in judged[0] if key.startswith("judge_")}
    asked = notes["judge_first"] >= 0
    return {
        "judge/win_rate": float(notes["judge_win"].mean()),
        "judge/order_bias": _mean(notes["judge_contradicts"][asked]),
        "judge/first_rate": _mean(notes["judge_first"][asked]),
        "judge/unclear": _mean(notes["judge_unclear"][asked]) / 2,
        "judge/refused": float(notes["judge_refused"].mean()),
        "judge/requests": float(notes["judge_requests"].sum()),
        "judge/tokens": float(notes["judge_tokens"].sum()),
        "judge/seconds": float(notes["judge_seconds"].mean()),
    }


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0
