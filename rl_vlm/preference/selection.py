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
from rl_vlm.labelling.labels import InputKind, Segment, SegmentPair
from rl_vlm.preference.reward_model import RewardEnsemble

_THUMBNAIL = 16  # pixels: the size at which pictures are compared
NO_FEATURES = np.empty((0, 0), np.float32)  # of no pair


def select_pairs(
    rule: Rule, candidates: Sequence[SegmentPair], count: int, model: RewardEnsemble, known: np.ndarray = NO_FEATURES
) -> list[SegmentPair]:
    """`count` of the candidates, or all if there are fewer. They are random pairs, so the first `count` are a uniform
    choice. `known` are the `pair_features` of the pairs that were labelled before."""
    count, spreads, chosen = min(count, len(candidates)), rule.startswith("kcenter"), list(candidates)
    if measure := _UNCERTAINTY.get(rule.removeprefix("kcenter_")):
        keep = max(len(candidates) // 2, count) if spreads else count
        chosen = [chosen[k] for k in np.argsort(-measure(model.preferences(candidates)), kind="stable")[:keep]]
    if spreads:
        chosen = [chosen[k] for k in k_center(pair_features(chosen, model.input_kind), known, count)]
    return chosen[:count]


def disagreement(preferences: np.ndarray) -> np.ndarray:
    """[N]: the standard deviation over the members of [E, N] probabilities."""
    return np.asarray(preferences.std(0))


def entropy(preferences: np.ndarray) -> np.ndarray:
    """[N]: the mean over the members of the entropy (nats) of each preference, from [E, N] probabilities."""
    p = np.clip(preferences.astype(np.float64), 1e-12, 1 - 1e-12)
    return np.asarray(-(p * np.log(p) + (1 - p) * np.log(1 - p)).mean(0))


_UNCERTAINTY: dict[str, Callable[[np.ndarray], np.ndarray]] = {"disagreement": disagreement, "entropy": entropy}


def k_center(points: np.ndarray, known: np.ndarray, count: int) -> np.ndarray:
    """Places of `count` of the points [N, D], one by one the farthest from all that are known [M, D] or chosen; with
    none of these the farthest from the mean."""
    nearest = _squared_distances(points, known if len(known) else points.mean(0)[None]).min(1)
    chosen: list[int] = []
    for _ in range(count):
        chosen.append(int(nearest.argmax()))
        distance = _squared_distances(points, points[chosen[-1:]])[:, 0]
        nearest = np.minimum(nearest, distance) if len(known) or len(chosen) > 1 else distance
        nearest[chosen] = -1.0  # never twice, even among equal points
    return np.array(chosen, np.int64)


def _squared_distances(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    a, b = points.astype(np.float64), others.astype(np.float64)
    return np.maximum((a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T, 0.0)


def pair_features(pairs: Sequence[SegmentPair], kind: InputKind) -> np.ndarray:
    """float32 [N, D]: observations of both segments, or thumbnails of their pictures, one after the other."""
    features = [_segment_features(part, kind) for pair in pairs for part in (pair.first, pair.second)]
    return np.stack(features).reshape(len(pairs), -1) if pairs else NO_FEATURES


def _segment_features(segment: Segment, kind: InputKind) -> np.ndarray:
    if kind != "image" or segment.frames is None:
        return segment.observations.astype(np.float32).ravel()
    small = [Image.fromarray(frame).resize((_THUMBNAIL, _THUMBNAIL), Image.Resampling.BOX) for frame in segment.frames]
    return np.stack([np.asarray(picture) for picture in small]).astype(np.float32).ravel() / 255
