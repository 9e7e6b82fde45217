"""Labelling sessions: pairs, labels, reward model, log and store; a labeller that is down; exact restarts."""

from __future__ import annotations

import asyncio
import csv
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from control_support import steps
from label_support import pair, random_pairs
from scipy.spatial.distance import cdist
from scipy.stats import entropy as scipy_entropy

from rl_vlm.config import PreferenceSection, RewardModelSection, TeacherSection
from rl_vlm.config.labels import Rule
from rl_vlm.labelling.labels import Label, Labeller, Score, SegmentPair, agreement
from rl_vlm.labelling.store import LabelStore
from rl_vlm.labelling.teachers import ScriptedTeacher
from rl_vlm.preference.feedback import Feedback
from rl_vlm.preference.replay import ReplayBuffer
from rl_vlm.preference.reward_model import RewardEnsemble
from rl_vlm.preference.selection import disagreement, entropy, k_center, pair_features, select_pairs
from rl_vlm.preference.sessions import LabellerDownError
from rl_vlm.types import UserInputError

HORIZON = 7


def settings(**changes: Any) -> PreferenceSection:
    labels = {"source": "scripted", "rounds": 1, **changes.pop("labels", {})}
    base = {"session_pairs": 10, "max_feedback": 100, "labeller_patience_s": 0.0, "labels": labels}
    return PreferenceSection(**{**base, **changes})


def replay() -> ReplayBuffer:
    buffer = ReplayBuffer(200, 2, 1)
    for first in range(0, 140, HORIZON):
        buffer.add(steps(first, HORIZON, episode=first // HORIZON, done="truncated"), np.zeros(HORIZON))
    return buffer


def feedback(folder: Path, labeller: Labeller | None, **changes: Any) -> Feedback:
    options = RewardModelSection(architecture="mlp", size=2, hidden=8, layers=1, epochs=2, min_gradient_steps=0)
    cache = changes.pop("cache", None)
    return Feedback(settings(**changes), RewardEnsemble((3,), options, seed=1), labeller, folder, cache)


def run(one: Feedback, seed: int = 0, count: int = 10) -> Any:
    return one.session(replay(), count, 140, np.random.default_rng(seed), mean_return=-50.0, horizon=HORIZON)


def counts(report: dict[str, float]) -> tuple[float, ...]:
    return tuple(report[f"labels/{name}"] for name in ("asked", "usable", "undecided", "errors"))


def test_a_session_is_stored_logged_and_learned_from(tmp_path: Path) -> None:
    one = feedback(tmp_path, ScriptedTeacher())
    before = one.model.rewards(np.eye(3, dtype=np.float32))
    report = run(one)
    assert counts(report) == (10, 10, 0, 0) and report["labels/accuracy"] == 1.0
    assert (one.asked, one.usable, one.sessions) == (10, 10, 1)
    assert not np.array_equal(one.model.rewards(np.eye(3, dtype=np.float32)), before)
    ((pairs, _),) = LabelStore(tmp_path / "labels").sessions()
    assert len(pairs) == 10
    rows = list(csv.DictReader((tmp_path / "vlm_query_log.csv").open()))
    assert len(rows) == 10 and {row["train_iter"] for row in rows} == {"1"}
    for row in rows:
        better = float(row["ground_truth_score_2"]) > float(row["ground_truth_score_1"])
        assert row["vlm_predicted_label"] == str(int(better))
    assert report["reward_model/examples"] == 10


class Flaky(Labeller):
    """Down for the first calls; remembers what it was asked."""

    def __init__(self, down: int) -> None:
        self.down, self.asked = down, []  # type: ignore[var-annotated]

    async def label(self, pairs: Sequence[SegmentPair]) -> list[Label]:
        self.asked.append([float(pair.first.observations[0, 0]) for pair in pairs])
        if len(self.asked) <= self.down:
            return [Label(-1, error="connection refused") for _ in pairs]
        return [Label(0) for _ in pairs]


def test_a_labeller_that_is_down_stops_the_session_without_a_label(tmp_path: Path) -> None:
    one, rng = feedback(tmp_path, Flaky(down=9)), np.random.default_rng(0)
    with pytest.raises(LabellerDownError):
        one.session(replay(), 10, 140, rng, mean_return=-50.0, horizon=HORIZON)
    # The run's last checkpoint is written after this: a resumed one draws the same pairs.
    assert rng.bit_generator.state == np.random.default_rng(0).bit_generator.state
    assert one.sessions == one.asked == 0 and len(one.examples) == 0
    assert not (tmp_path / "labels").exists() and not (tmp_path / "vlm_query_log.csv").exists()


def test_a_session_waits_for_the_labeller_and_asks_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rl_vlm.preference.sessions.time.sleep", lambda _: None)
    labeller = Flaky(down=2)
    with caplog.at_level(logging.WARNING):
        report = run(feedback(tmp_path, labeller, labeller_patience_s=60.0))
    assert report["labels/usable"] == 10
    assert len(labeller.asked) == 3 and labeller.asked[0] == labeller.asked[1] == labeller.asked[2]
    assert caplog.text.count("Waiting up to") == 1


class NeverAnswers(Flaky):
    """The second session hangs."""

    async def label(self, pairs: Sequence[SegmentPair]) -> list[Label]:
        labels = await super().label(pairs)
        if len(self.asked) > 1:
            await asyncio.Event().wait()
        return labels


def test_a_session_that_does_not_end_does_not_keep_a_run_from_stopping(tmp_path: Path) -> None:
    one = feedback(tmp_path, NeverAnswers(down=0))
    rng = np.random.default_rng(0)
    assert one.session(replay(), 10, 140, rng, mean_return=0.0, horizon=HORIZON) is not None
    drawn = rng.bit_generator.state
    started = time.monotonic()
    one.stop_requested = lambda: time.monotonic() > started + 0.2
    assert one.session(replay(), 10, 140, rng, mean_return=0.0, horizon=HORIZON) is None
    # A resumed run asks for the same pairs.
    assert (one.sessions, one.asked, len(one.store)) == (1, 10, 1) and rng.bit_generator.state == drawn


class Says(Labeller):
    """Gives these labels in turn."""

    def __init__(self, *labels: Label) -> None:
        self.labels = labels

    async def label(self, pairs: Sequence[SegmentPair]) -> list[Label]:
        return [self.labels[k % len(self.labels)] for k in range(len(pairs))]


def test_errors_and_ties_are_counted_and_not_trained_on(tmp_path: Path) -> None:
    one = feedback(tmp_path, Says(Label(1), Label(-1), Label(-1, error="timeout")))
    report = run(one)
    assert counts(report) == (10, 4, 3, 3)
    assert one.asked == 7  # what got no answer may be asked again within max_feedback


def test_rounds_that_replace_undecided_pairs_stay_within_max_feedback(tmp_path: Path) -> None:
    one = feedback(tmp_path, Says(Label(-1)), labels={"rounds": 4}, max_feedback=55)
    assert run(one)["labels/asked"] == 40 and run(one)["labels/asked"] == 15 and one.asked == 55


def test_controls_swap_what_is_decided(tmp_path: Path) -> None:
    def values(name: str, **control: bool) -> list[int]:
        one = feedback(tmp_path / name, ScriptedTeacher(TeacherSection(eps_equal=0.5)), labels=control)
        one.session(replay(), 200, 140, np.random.default_rng(0), mean_return=50.0, horizon=1)
        return [label.value for label in LabelStore(tmp_path / name / "labels").read(1)[1]]

    plain, flipped, coins = values("plain"), values("flip", flip=True), values("coins", coin_flips=True)
    decided = [k for k, value in enumerate(plain) if value != -1]
    assert 50 < len(decided) < 200
    assert flipped == [{0: 1, 1: 0, -1: -1}[value] for value in plain]
    assert [k for k, value in enumerate(coins) if value != -1] == decided
    right = sum(coins[k] == plain[k] for k in decided) / len(decided)
    assert 0.3 < right < 0.7
    assert Label(0, (0.7, 0.2, 0.1), answers=(0, -1)).swapped() == Label(1, (0.2, 0.7, 0.1), answers=(1, -1))


def test_a_cache_is_replayed_first_and_then_the_labeller_is_asked(tmp_path: Path) -> None:
    run(feedback(tmp_path / "old", ScriptedTeacher()), seed=3)
    labeller = Flaky(down=0)
    one = feedback(tmp_path / "new", labeller, cache=LabelStore(tmp_path / "old" / "labels"))
    run(one)
    assert labeller.asked == [] and len(one.examples) == 10
    run(one)
    assert len(labeller.asked) == 1
    alone = feedback(tmp_path / "alone", None, cache=LabelStore(tmp_path / "old" / "labels"))
    assert not alone.exhausted
    run(alone)
    assert run(alone) is None and alone.exhausted
    kept, before = (LabelStore(tmp_path / name / "labels").read(1)[1] for name in ("alone", "old"))
    assert kept == before


def test_labels_of_an_attempt_without_a_checkpoint_are_moved_aside(tmp_path: Path) -> None:
    """A run that is killed before its first checkpoint begins anew, in the same folder."""
    killed = feedback(tmp_path, ScriptedTeacher())
    for seed in (1, 2, 3):
        run(killed, seed=seed)
    again = feedback(tmp_path, ScriptedTeacher())
    for seed in (11, 12):
        run(again, seed=seed)
    labels = [labels for _, labels in LabelStore(tmp_path / "labels").sessions()]
    assert len(labels) == again.sessions == 2
    assert len(list((tmp_path / "labels" / "superseded").glob("*.parquet"))) == 3
    assert len(list(csv.DictReader((tmp_path / "vlm_query_log.csv").open()))) == 20
    state = json.loads(json.dumps(again.state()))
    again.model.save(tmp_path / "model.safetensors")
    resumed = feedback(tmp_path, ScriptedTeacher())
    resumed.load(state, tmp_path / "model.safetensors")
    assert [labels for _, labels in LabelStore(tmp_path / "labels").sessions()] == labels


@pytest.mark.parametrize("rule", ["uniform", "kcenter_disagreement"])
def test_a_restored_feedback_goes_on_exactly(tmp_path: Path, rule: str) -> None:
    def fresh() -> Feedback:
        teacher = ScriptedTeacher(TeacherSection(beta=0.1, eps_mistake=0.2), seed=4)
        return feedback(tmp_path, teacher, labels={"rule": rule})

    straight = fresh()
    run(straight, seed=1)
    run(straight, seed=2)
    state = json.loads(json.dumps(straight.state()))
    straight.model.save(tmp_path / "model.safetensors")
    run(straight, seed=3)
    expected = straight.model.rewards(np.eye(3, dtype=np.float32)), straight.state()
    last = LabelStore(tmp_path / "labels").read(3)[1]

    resumed = fresh()
    resumed.load(state, tmp_path / "model.safetensors")
    assert len(LabelStore(tmp_path / "labels")) == 2
    run(resumed, seed=3)
    assert np.array_equal(resumed.model.rewards(np.eye(3, dtype=np.float32)), expected[0])
    assert resumed.state() == expected[1]
    again = LabelStore(tmp_path / "labels").read(3)[1]
    assert again == last
    assert len(list(csv.DictReader((tmp_path / "vlm_query_log.csv").open()))) == 30


@pytest.mark.parametrize("saved_by", [None, Says(Label(-1))])
def test_the_state_of_another_labeller_is_refused(tmp_path: Path, saved_by: Labeller | None) -> None:
    state = feedback(tmp_path, saved_by).state() if saved_by is not None else None
    with pytest.raises(UserInputError, match="another labeller: keep"):
        feedback(tmp_path, ScriptedTeacher()).load(state, tmp_path / "model.safetensors")  # type: ignore[arg-type]


@pytest.mark.parametrize("resumed", [False, True])
def test_k_center_does_not_ask_again_what_an_earlier_session_has_asked(tmp_path: Path, resumed: bool) -> None:
    """Both sessions draw the same candidates."""
    one = feedback(tmp_path, ScriptedTeacher(), labels={"rule": "kcenter"})
    run(one, seed=1)
    if resumed:
        one.model.save(tmp_path / "model.safetensors")
        state = one.state()
        one = feedback(tmp_path, ScriptedTeacher(), labels={"rule": "kcenter"})
        one.load(state, tmp_path / "model.safetensors")
    run(one, seed=1)
    first, second = (
        {(pair.first.observations.tobytes(), pair.second.observations.tobytes()) for pair in pairs}
        for pairs, _ in LabelStore(tmp_path / "labels").sessions()
    )
    assert len(first) == len(second) == 10 and not first & second


class Scorer(Labeller):
    async def score(self, frames: Sequence[np.ndarray]) -> list[Score]:
        values = [float(frame[0, 0, 0]) / 256 + 1e-9 for frame in frames]
        return [Score(None) if k == 0 else Score(value) for k, value in enumerate(values)]


def test_scores_are_learned_and_come_back_from_the_store(tmp_path: Path) -> None:
    buffer = ReplayBuffer(50, 2, 1, frame_capacity=50, image_size=16)
    buffer.add(steps(0, 40, size=16), np.zeros(40))
    layers = {"kernels": (3,), "channels": (4,), "strides": (2,)}
    options = RewardModelSection(architecture="cnn", size=2, epochs=1, min_gradient_steps=0, **layers)  # type: ignore[arg-type]
    section = PreferenceSection(reward="learn_from_score", labels={"source": "vlm"}, image_size=16)

    def fresh() -> Feedback:
        return Feedback(section, RewardEnsemble((16, 16, 3), options), Scorer(), tmp_path)

    def session(one: Feedback, seed: int) -> Any:
        return one.session(buffer, 8, 40, np.random.default_rng(seed), 0.0, 40)

    one = fresh()
    report = session(one, 0)
    assert counts(report) == (8, 7, 1, 0)
    assert len(one.examples.targets) == 7 and all(-1 <= target <= 1 for (target,) in one.examples.targets)
    state = json.loads(json.dumps(one.state()))
    one.model.save(tmp_path / "model.safetensors")
    session(one, 1)
    other = fresh()
    other.load(state, tmp_path / "model.safetensors")
    session(other, 1)
    frames = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)
    assert np.array_equal(one.model.rewards(frames), other.model.rewards(frames))


def test_agreement_counts_pairs_that_differ() -> None:
    returns = [(1.0, 2.0), (2.0, 1.0), (1.0, 1.0), (1.0, 2.0), (1.0, 2.0), (np.nan, 1.0)]
    labels = [Label(1), Label(1), Label(0), Label(-1), Label(1, error="x"), Label(0)]
    assert agreement(returns, labels) == [True, False, None]


# --- Query selection: entropies by scipy, k-center by brute force, every rule with states and with pictures


PREFERENCES = np.array([[0.1, 0.5, 0.9, 0.5, 1.0], [0.1, 0.5, 0.1, 0.6, 0.0], [0.2, 0.5, 0.5, 0.4, 1.0]], np.float32)


class Given:
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
    for rule, places in (("disagreement", [4, 2]), ("entropy", [1, 3]), ("uniform", [0, 1])):
        assert select_pairs(rule, pairs, 2, Given()) == [pairs[place] for place in places]  # type: ignore[arg-type]


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


def test_k_center_takes_equal_points_once() -> None:
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


def test_mixed_rules_choose_among_the_uncertain_half() -> None:
    model = RewardEnsemble((5,), RewardModelSection(architecture="mlp", hidden=8))
    candidates = random_pairs(20, size=32)
    for rule, measure in (("kcenter_disagreement", disagreement), ("kcenter_entropy", entropy)):
        half = {id(candidates[k]) for k in np.argsort(-measure(model.preferences(candidates)), kind="stable")[:10]}
        chosen = select_pairs(rule, candidates, 5, model)  # type: ignore[arg-type]
        assert {id(one) for one in chosen} <= half
