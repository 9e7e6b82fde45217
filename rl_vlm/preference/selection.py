"""Selects the pairs to label: the six rules of B-Pref, for states and for pictures.

Rules other than uniform draw more candidates than they keep. Uncertain pairs are those on which the members of the
reward ensemble disagree, or whose preference has a high entropy; k-center keeps pairs that are far from each other and
from what was labelled before (Sener and Savarese 2018, arXiv 1708.00489, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

from rl_vlm.config.labels import Rule
from rl_vlm.labelling.types import InputKind, Segment, SegmentPair
from rl_vlm.preference.reward_model import RewardEnsemble

_THUMBNAIL = 16  # pixels: the size at which pictures are compared
_NONE = np.empty((0, 0), np.float32)  # features of no pair


def num_candidates(rule: Rule, count: int, large_batch: int) -> int:
    """How many pairs a rule chooses `count` from."""
    return count if rule == "uniform" else count * large_batch


def select_pairs(
    rule: Rule, candidates: Sequence[SegmentPair], count: int, model: RewardEnsemble, known: np.ndarray = _NONE
) -> list[SegmentPair]:
    """`count` of the candidates, or all if there are fewer; `known` are the `pair_features` of those that were labelled
    before.

    Candidates are random pairs, so the first `count` are a uniform choice.
    """
    count = min(count, len(candidates))
    if rule == "uniform":
        return list(candidates[:count])
    places = np.arange(len(candidates))
    if rule in _UNCERTAINTY:
        uncertainty = _UNCERTAINTY[rule](model.preferences(candidates))
        keep = count if rule in ("disagreement", "entropy") else max(len(candidates) // 2, count)
        places = np.argsort(-uncertainty, kind="stable")[:keep]
    if rule.startswith("kcenter"):
        features = pair_features([candidates[int(place)] for place in places], model.input_kind)
        places = places[k_center(features, known, count)]
    return [candidates[int(place)] for place in places]


def disagreement(preferences: np.ndarray) -> np.ndarray:
    """[N]: the standard deviation over the members of [E, N] probabilities."""
    return np.asarray(preferences.std(0))


def entropy(preferences: np.ndarray) -> np.ndarray:
    """[N]: the mean over the members of the entropy (nats) of each preference, from [E, N] probabilities."""
    p = np.clip(preferences.astype(np.float64), 1e-12, 1 - 1e-12)
    return np.asarray(-(p * np.log(p) + (1 - p) * np.log(1 - p)).mean(0))


_UNCERTAINTY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "disagreement": disagreement,
    "entropy": entropy,
    "kcenter_disagreement": disagreement,
    "kcenter_entropy": entropy,
}


def k_center(points: np.ndarray, known: np.ndarray, count: int) -> np.ndarray:
    """Places of `count` of the points [N, D], chosen one by one: each is the farthest from all that are known or
    chosen.

    Without known points [0, D], the first one is the farthest from the mean.
    """
    nearest = (
        _squared_distances(points, known).min(1)
        if len(known)
        else _squared_distances(points, points.mean(0)[None])[:, 0]
    )
    chosen = np.empty(count, dtype=np.int64)
    for number in range(count):
        place = int(nearest.argmax())
        chosen[number] = place
        distance = _squared_distances(points, points[place : place + 1])[:, 0]
        nearest = distance if number == 0 and not len(known) else np.minimum(nearest, distance)
        nearest[chosen[: number + 1]] = -1.0  # never twice, even among equal points
    return chosen


def _squared_distances(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """[N, M] Euclidean distances, squared, in float64."""
    a, b = points.astype(np.float64), others.astype(np.float64)
    return np.maximum((a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T, 0.0)


def pair_features(pairs: Sequence[SegmentPair], kind: InputKind) -> np.ndarray:
    """float32 [N, D]: observations of both segments, or thumbnails of their pictures, one after the other."""
    if not pairs:
        return _NONE
    return np.stack(
        [np.concatenate([_segment_features(part, kind) for part in (pair.first, pair.second)]) for pair in pairs]
    )


def _segment_features(segment: Segment, kind: InputKind) -> np.ndarray:
    if kind == "image" and segment.frames is not None:
        small = [
            np.asarray(Image.fromarray(frame).resize((_THUMBNAIL, _THUMBNAIL), Image.Resampling.BOX))
            for frame in segment.frames
        ]
        return np.stack(small).astype(np.float32).ravel() / 255
    return segment.observations.astype(np.float32).ravel()
