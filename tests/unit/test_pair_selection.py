"""Query selection: entropies by scipy, k-center by brute force, every rule with states and with pictures."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from label_support import pair, random_pairs
from scipy.spatial.distance import cdist
from scipy.stats import entropy as scipy_entropy

from rl_vlm.config import RewardModelSection
from rl_vlm.config.labels import Rule
from rl_vlm.labelling.store import SegmentPair
from rl_vlm.preference.feedback import (
    disagreement,
    entropy,
    k_center,
    pair_features,
    select_pairs,
)
from rl_vlm.preference.reward_model import RewardEnsemble

PREFERENCES = np.array([[0.1, 0.5, 0.9, 0.5, 1.0], [0.1, 0.5, 0.1, 0.6, 0.0], [0.2, 0.5, 0.5, 0.4, 1.0]], np.float32)


class Told:
    """A model whose preferences are given."""

    input_kind: Any = "image"

    def preferences(self, pairs: Any) -> np.ndarray:
        return PREFERENCES


def test_entropy_and_disagreement_by_hand() -> None:
    expected = [np.mean([scipy_entropy([p, 1 - p]) for p in column]) for column in PREFERENCES.T.astype(float)]
    np.testing.assert_allclose(entropy(PREFERENCES), expected, atol=1e-6)
    np.testing.assert_allclose(disagreement(PREFERENCES), np.std(PREFERENCES, axis=0))


def test_the_most_uncertain_pairs_are_kept() -> None:
    pairs = [pair(number, 0, size=32) for number in range(5)]
    chosen = {
        rule: [pairs.index(one) for one in select_pairs(rule, pairs, 2, Told())] for rule in ("entropy", "disagreement")
    }
    assert chosen["disagreement"] == [4, 2]
    assert chosen["entropy"] == [1, 3]
    assert select_pairs("uniform", pairs, 3, Told()) == pairs[:3]


def brute_force(points: np.ndarray, known: np.ndarray, count: int) -> list[int]:
    chosen: list[int] = []
    for _ in range(count):
        centres = np.concatenate([known, points[chosen]])
        if not len(centres):
            centres = points.mean(0)[None]
        distance = cdist(points, centres).min(1)
        distance[chosen] = -1
        chosen.append(int(distance.argmax()))
    return chosen


@pytest.mark.parametrize("num_known", [0, 1, 7])
def test_k_center_is_the_greedy_algorithm(num_known: int) -> None:
    rng = np.random.default_rng(num_known)
    points, known = rng.normal(size=(40, 6)), rng.normal(size=(num_known, 6))
    assert k_center(points, known, 12).tolist() == brute_force(points, known, 12)


def test_k_center_covers_clusters_and_takes_equal_points_once() -> None:
    rng = np.random.default_rng(0)
    centres = np.array([[0, 0], [10, 0], [0, 10], [10, 10]])
    points = np.repeat(centres, 10, axis=0) + rng.normal(scale=0.1, size=(40, 2))
    assert {place // 10 for place in k_center(points, points[:1], 3)} == {1, 2, 3}
    assert sorted(k_center(np.zeros((4, 2)), np.empty((0, 2)), 4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("rule", get_args(Rule))
@pytest.mark.parametrize("kind", ["image", "state_action"])
def test_every_rule_works_with_states_and_with_pictures(rule: Any, kind: str) -> None:
    options = (
        RewardModelSection(channels=(4, 4, 4, 4))
        if kind == "image"
        else RewardModelSection(architecture="mlp", hidden=8)
    )
    model = RewardEnsemble((48, 48, 3) if kind == "image" else (5,), options)
    candidates = random_pairs(4 if rule == "uniform" else 20, size=48)
    for known in ([], random_pairs(3, seed=5, size=48)):
        chosen = select_pairs(rule, candidates, 4, model, pair_features(known, model.input_kind))
        assert len({id(one) for one in chosen}) == 4 and all(any(one is c for c in candidates) for one in chosen)
    assert len(select_pairs(rule, candidates[:2], 4, model)) == 2
    if rule != "uniform" and kind == "state_action":
        preferences = model.preferences(candidates)
        if rule == "disagreement":
            best = np.argsort(-preferences.std(0))[:4]
            assert {id(one) for one in select_pairs(rule, candidates, 4, model)} == {id(candidates[k]) for k in best}


def test_mixed_rules_choose_among_the_uncertain_half() -> None:
    model = RewardEnsemble((5,), RewardModelSection(architecture="mlp", hidden=8))
    candidates = random_pairs(20, size=32)
    for rule, measure in (("kcenter_disagreement", disagreement), ("kcenter_entropy", entropy)):
        half = {id(candidates[k]) for k in np.argsort(-measure(model.preferences(candidates)), kind="stable")[:10]}
        chosen = select_pairs(rule, candidates, 5, model)  # type: ignore[arg-type]
        assert {id(one) for one in chosen} <= half


@pytest.mark.parametrize("rule", ["kcenter", "kcenter_disagreement", "kcenter_entropy"])
def test_k_center_keeps_away_from_what_was_labelled_before(rule: Any) -> None:
    pairs = [pair(angle, 0, size=32) for angle in (0, 1, 20, 40)]
    model = RewardEnsemble((5,), RewardModelSection(architecture="mlp", hidden=8))
    candidates = pairs if rule == "kcenter" else [one for one in pairs for _ in range(2)]  # half of them are dropped

    def known(some: list[SegmentPair]) -> np.ndarray:
        return pair_features(some, model.input_kind)

    alone = select_pairs(rule, candidates, 1, model)
    (other,) = select_pairs(rule, candidates, 1, model, known(alone))
    assert other.first.observations.tolist() != alone[0].first.observations.tolist()
    if rule == "kcenter":
        (farthest,) = select_pairs(rule, pairs, 1, model, known(pairs[:1]))
        assert farthest is pairs[3]
        (farthest,) = select_pairs(rule, pairs, 1, model, known(pairs[2:]))
        assert farthest is pairs[0]
