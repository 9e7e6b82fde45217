"""Labelling sessions (PEBBLE): which segments are asked about, what the labeller answers, and what is learned from
it."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from PIL import Image

from rl_vlm.config import PreferenceSection
from rl_vlm.config.labels import Rule
from rl_vlm.labelling.store import (
    FILE_NAME,
    LabelledSession,
    LabellerDownError,
    LabelStore,
    QueryLog,
    ScoreStore,
    SessionFiles,
    is_answer,
    is_decided,
    label_session,
    true_return,
)
from rl_vlm.labelling.types import SKIPPED, InputKind, Label, Labeller, Score, Segment, SegmentPair
from rl_vlm.preference.replay import ReplayBuffer
from rl_vlm.preference.reward_model import Examples, FitReport, RewardEnsemble, RewardTrainer, add_pairs, add_scores
from rl_vlm.types import UserInputError

# Selects the pairs to label: the six rules of B-Pref, for states and for pictures.
#
# Rules other than uniform draw more candidates than they keep. Uncertain pairs are those on which the members of the
# reward ensemble disagree, or whose preference has a high entropy; k-center keeps pairs that are far from each other
# and from what was labelled before (Sener and Savarese 2018, arXiv 1708.00489, algorithm 1).

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
    indices = np.arange(len(candidates))
    if rule in _UNCERTAINTY:
        uncertainty = _UNCERTAINTY[rule](model.preferences(candidates))
        keep = count if rule in ("disagreement", "entropy") else max(len(candidates) // 2, count)
        indices = np.argsort(-uncertainty, kind="stable")[:keep]
    if rule.startswith("kcenter"):
        features = pair_features([candidates[int(index)] for index in indices], model.input_kind)
        indices = indices[k_center(features, known, count)]
    return [candidates[int(index)] for index in indices]


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
        index = int(nearest.argmax())
        chosen[number] = index
        distance = _squared_distances(points, points[index : index + 1])[:, 0]
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


def check_cache(folder: Path, settings: PreferenceSection, sizes: tuple[int, int]) -> None:
    """Check the first pair of every session of a label cache; `sizes` are those of observation and action.

    Raises UserInputError: at the first labelling session the environment steps before it would be lost.
    """
    store = LabelStore(folder)
    for number in range(1, len(store) + 1):
        pair = store.example(number)
        if pair is not None:
            check_length([pair], settings.segment_length)
            _check_inputs(pair.first, settings, sizes)


def check_length(pairs: Sequence[SegmentPair], wanted: int) -> None:
    """Raise UserInputError unless all segments have the wanted steps."""
    for length in {len(segment) for pair in pairs for segment in (pair.first, pair.second)} - {wanted}:
        raise UserInputError(
            f"The label cache has segments of {length} steps, and preference.segment_length is {wanted}: set it to "
            f"{length}, or leave preference.labels.cache out."
        )


def _check_inputs(segment: Segment, settings: PreferenceSection, sizes: tuple[int, int]) -> None:
    if not settings.rewards_images:
        size = segment.observations.shape[1] + segment.actions.shape[1]
        if size != sum(sizes):
            raise UserInputError(
                f"The label cache has states and actions of {size} numbers together, and those of env.id have "
                f"{sum(sizes)}: give the cache of a run in this environment, or leave preference.labels.cache out."
            )
        return
    architecture, stride = settings.reward_model.architecture, settings.reward_model.stride
    if segment.frames is None:
        raise UserInputError(
            f"The label cache has no pictures, and preference.reward_model.architecture {architecture} learns from "
            "them: set it to mlp, or leave preference.labels.cache out."
        )
    height, width = segment.frames.shape[1:3]
    # The reward model also takes pictures that its stride has thinned out already.
    seen = -(-settings.image_size // stride)
    if any((-(-height // step), -(-width // step)) == (seen, seen) for step in (1, stride)):
        return
    remedy = f"set it to {height}" if height == width else "give the cache of a run with this one"
    raise UserInputError(
        f"The label cache has pictures of {height} × {width} pixels, and preference.image_size is "
        f"{settings.image_size}: {remedy}, or leave preference.labels.cache out."
    )


logger = logging.getLogger(__name__)

# How long a session that is under way may go on when the user wants to stop: batch systems and Kubernetes kill after 30
# s or more.
_STOP_GRACE_S = 10.0
T = TypeVar("T")


class PatientSessions:
    """Runs sessions with a labeller, and repeats a session while the labeller is down, for up to `patience_s`."""

    def __init__(self, labeller: Labeller | None, patience_s: float) -> None:
        self._labeller, self._patience_s = labeller, patience_s
        # One loop for all sessions: clients of served models belong to the loop that they were first used in.
        self._loop = asyncio.new_event_loop()

    def run(
        self,
        session: Callable[[], Coroutine[Any, Any, T]],
        rng: np.random.Generator,
        stop_requested: Callable[[], bool],
    ) -> T | None:
        """The result of `session()`; None if the user wants to stop. Every attempt draws the same from `rng`.

        Raises LabellerDownError when the patience is over. Then, and where it returns None, `rng` and the labeller are
        as before.
        """
        deadline = time.monotonic() + self._patience_s
        drawn, labeller = rng.bit_generator.state, self._labeller
        before = labeller.state() if labeller is not None else {}
        pause, warned = 0.5, False

        def take_back() -> None:
            rng.bit_generator.state = drawn
            if labeller is not None:
                labeller.set_state(before)

        while not stop_requested():
            try:
                result = self._loop.run_until_complete(self._unless_stopped(session(), stop_requested))
                if result is not None:
                    return result
                take_back()
            except LabellerDownError as error:
                take_back()  # a checkpoint may follow
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LabellerDownError(f"{error} Then --resume goes on from the last checkpoint.") from error
                if not warned:
                    logger.warning("%s Waiting up to %.0f s for it.", error, left)
                    warned = True
                time.sleep(min(pause, left))
                pause = min(2 * pause, 10.0)
        return None

    async def _unless_stopped(self, session: Coroutine[Any, Any, T], stop_requested: Callable[[], bool]) -> T | None:
        """The result of a session; None where the user wants to stop and it does not end soon."""
        task = asyncio.ensure_future(session)
        while not (await asyncio.wait([task], timeout=0.5))[0]:
            if stop_requested() and not (await asyncio.wait([task], timeout=_STOP_GRACE_S))[0]:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                logger.warning("The labelling session did not end in time: --resume asks again for all of its pairs.")
                return None
        return task.result()

    def close(self) -> None:
        """End the event loop."""
        self._loop.close()


@dataclass(slots=True)
class SessionReport:
    """What one session gave."""

    asked: int = 0
    usable: int = 0  # pairs (or scores) that the reward model is trained on
    undecided: int = 0
    errors: int = 0
    right: float = float("nan")  # share of the decided labels that agree with the true rewards
    seconds: float = 0.0
    fit_seconds: float = 0.0
    fit: FitReport | None = None

    def metrics(self) -> dict[str, float]:
        """As metrics of a run."""
        metrics = {
            "labels/asked": float(self.asked),
            "labels/usable": float(self.usable),
            "labels/undecided": float(self.undecided),
            "labels/errors": float(self.errors),
            "labels/seconds": self.seconds,
            "time/fit": self.fit_seconds,
        }
        if np.isfinite(self.right):
            metrics["labels/accuracy"] = self.right
        if self.fit is not None and self.fit.examples:
            metrics |= {
                "reward_model/examples": float(self.fit.examples),
                "reward_model/gradient_steps": float(self.fit.gradient_steps),
                "reward_model/loss": self.fit.loss,
            }
            if np.isfinite(self.fit.accuracy):
                metrics["reward_model/accuracy"] = self.fit.accuracy
        return metrics


class Feedback(ABC):
    """Asks about segments of the replay buffer, keeps the answers, and trains the reward model on them.

    Args:
        settings: `preference` of the configuration.
        trainer: trains the reward ensemble.
        labeller: answers; None where only a label cache is replayed.
        store: keeps the answers of all sessions.
        segments_per_example: 2 for pairs, 1 for scores.
    """

    def __init__(
        self,
        settings: PreferenceSection,
        trainer: RewardTrainer,
        labeller: Labeller | None,
        store: SessionFiles,
        segments_per_example: int,
    ) -> None:
        self.settings, self.trainer, self.store = settings, trainer, store
        self.asked = 0  # what is held against max_feedback: questions without an answer are left out
        self.usable = self.sessions = 0
        self.stop_requested: Callable[[], bool] = lambda: False
        self.examples = Examples(segments_per_example, settings.max_feedback)
        self._labeller = labeller
        self._patient = PatientSessions(labeller, settings.labeller_patience_s)

    @property
    def model(self) -> RewardEnsemble:
        """The reward model."""
        return self.trainer.ensemble

    @property
    def exhausted(self) -> bool:
        """Whether no further answers can be had."""
        return self._labeller is None

    @property
    def cost(self) -> str:
        """What labelling has cost so far and how the labeller behaves, in one line; empty for labellers that count
        nothing."""
        stats = self._labeller.stats if self._labeller is not None else None
        return stats.summary() if stats is not None else ""

    def session(
        self, replay: ReplayBuffer, count: int, step: int, rng: np.random.Generator, mean_return: float, horizon: int
    ) -> SessionReport | None:
        """Ask `count` questions and train the reward model on all answers that are known.

        While the labeller is down, the session is tried again; nothing of a failed attempt is kept. Returns None if the
        user wants to stop, or if no further answers can be had. Raises LabellerDownError after `labeller_patience_s`.
        """
        if self._labeller is not None:
            self._labeller.set_margin(mean_return, self.settings.segment_length, horizon)
        started = time.monotonic()
        report = self._ask(replay, count, step, rng, horizon)
        if report is None:
            return None
        report.seconds = time.monotonic() - started
        self.sessions += 1
        self.asked += report.asked - report.errors
        self.usable += report.usable
        started = time.monotonic()
        report.fit = self.trainer.fit(self.examples)
        report.fit_seconds = time.monotonic() - started
        return report

    @abstractmethod
    def _ask(
        self, replay: ReplayBuffer, count: int, step: int, rng: np.random.Generator, horizon: int
    ) -> SessionReport | None:
        """One session: ask, store the answers and add them to the examples."""

    @abstractmethod
    def _restore_examples(self) -> None:
        """Add the answers in the store to the examples."""

    def _rewind(self) -> None:
        """Move sessions aside that this run does not know: of an attempt that ended before its first checkpoint, or
        later ones."""
        self.store.rewind(self.sessions)

    def state(self) -> dict[str, Any]:
        """The state that neither the label store nor the reward model's file holds, as JSON."""
        labeller = self._labeller
        return {
            "asked": self.asked,
            "usable": self.usable,
            "sessions": self.sessions,
            "labeller": labeller.state() if labeller is not None else None,
        }

    def load(self, state: Mapping[str, Any], model_file: Path) -> None:
        """Go on from a saved state; the label store must hold its sessions, later ones are moved aside.

        Raises UserInputError for the state of another labeller, or of a run without one.
        """
        try:
            self.asked, self.usable = int(state["asked"]), int(state["usable"])
            self.sessions = int(state["sessions"])
            if self._labeller is not None and state["labeller"] is not None:
                self._labeller.set_state(state["labeller"])
        except (KeyError, TypeError) as error:
            raise UserInputError(
                "The checkpoint is of a run with another labeller: keep preference.reward, and of preference.labels "
                "source and coin_flips."
            ) from error
        self._rewind()
        self.trainer.load(model_file)
        self.examples.clear()
        self._restore_examples()

    def close(self) -> None:
        """End the event loop of the sessions."""
        self._patient.close()


class PairFeedback(Feedback):
    """Asks which segment of a pair is better. `folder` holds `labels/` and the query log.

    The sessions of `cache`, labels of an earlier run, are replayed first. As in the original, their pairs replace those
    of the policy, and are trained on as they were labelled.
    """

    store: LabelStore

    def __init__(
        self,
        settings: PreferenceSection,
        trainer: RewardTrainer,
        labeller: Labeller | None,
        folder: Path,
        cache: LabelStore | None = None,
    ) -> None:
        super().__init__(settings, trainer, labeller, LabelStore(folder / "labels"), segments_per_example=2)
        self._cache = cache
        self._next_cached = 1
        self._log_path = folder / FILE_NAME
        # Features, not pairs, for rules that select pairs far from earlier ones: pictures of 20,000 pairs take 10 GiB.
        self._asked_features = pair_features([], self.model.input_kind)

    @property
    def exhausted(self) -> bool:
        """Whether there is no labeller, and the cache is replayed."""
        return super().exhausted and (self._cache is None or self._next_cached > len(self._cache))

    def _ask(
        self, replay: ReplayBuffer, count: int, step: int, rng: np.random.Generator, horizon: int
    ) -> SessionReport | None:
        """The first session's pairs are drawn uniformly, because the reward model is untrained."""
        session = self._cached_session()
        labeller, labels = self._labeller, self.settings.labels
        if session is None and labeller is not None:

            def draw(wanted: int) -> list[SegmentPair]:
                rule = labels.rule if self.sessions else "uniform"
                candidates = replay.sample_pairs(
                    num_candidates(rule, wanted, labels.large_batch),
                    self.settings.segment_length,
                    rng,
                    self.settings.query_episodes * horizon,
                )
                return select_pairs(rule, candidates, wanted, self.model, self._asked_features)

            most = self.settings.max_feedback - self.asked
            session = self._patient.run(
                lambda: label_session(labeller, draw, count, labels.rounds, most), rng, lambda: self.stop_requested()
            )
        if session is None:
            return None
        if not session.pairs:
            logger.warning(
                "No pair could be drawn at step %d, so nothing was labelled: the newest %d episodes hold no two "
                "segments of %d steps (preference.segment_length).",
                step, self.settings.query_episodes, self.settings.segment_length,
            )  # fmt: skip
        now = time.time()
        if len(self.store) > self.sessions:
            self._rewind()
        self.store.append(session.pairs, session.labels, step=step, time=now)
        QueryLog(self._log_path).append(session.pairs, session.labels, iteration=self.sessions + 1, time=now)
        return SessionReport(
            asked=len(session),
            usable=self._learn_from(session.pairs, session.labels),
            undecided=sum(is_answer(label) and label.value == -1 for label in session.labels),
            errors=sum(bool(label.error) and label.error != SKIPPED for label in session.labels),
            right=label_accuracy(session.pairs, session.labels),
        )

    def _cached_session(self) -> LabelledSession | None:
        if self._cache is None or self._next_cached > len(self._cache):
            return None
        stored = self._cache.read(self._next_cached)
        self._next_cached += 1
        check_length(stored.pairs, self.settings.segment_length)
        return LabelledSession(stored.pairs, stored.labels)

    def _learn_from(self, pairs: Sequence[SegmentPair], labels: Sequence[Label]) -> int:
        """Add the pairs that may be trained on to the examples; returns how many."""
        if self.settings.labels.rule.startswith("kcenter") and pairs:
            new = pair_features(pairs, self.model.input_kind)
            self._asked_features = np.concatenate([self._asked_features, new]) if len(self._asked_features) else new
        return add_pairs(self.examples, self.model, pairs, labels)

    def _rewind(self) -> None:
        super()._rewind()
        QueryLog(self._log_path, keep_until=self.sessions)

    def _restore_examples(self) -> None:
        self._asked_features = pair_features([], self.model.input_kind)
        for stored in self.store.sessions():
            self._learn_from(stored.pairs, stored.labels)

    def state(self) -> dict[str, Any]:
        """As in the base class, and which session of the cache comes next."""
        return {**super().state(), "next_cached": self._next_cached}

    def load(self, state: Mapping[str, Any], model_file: Path) -> None:
        """See the base class."""
        super().load(state, model_file)
        self._next_cached = int(state["next_cached"])


def label_accuracy(pairs: Sequence[SegmentPair], labels: Sequence[Label]) -> float:
    """Share of the decided labels, of pairs whose true returns are known and differ, that prefer the higher return; nan
    without any."""
    decided = [
        (true_return(pair.second) - true_return(pair.first), label.value == 1)
        for pair, label in zip(pairs, labels, strict=True)
        if is_decided(label)
    ]
    right = [(difference > 0) == second for difference, second in decided if np.isfinite(difference) and difference]
    return float(np.mean(right)) if right else float("nan")


class ScoreFeedback(Feedback):
    """Asks for scores of single steps. `folder` holds the store, `labels/`."""

    store: ScoreStore

    def __init__(self, settings: PreferenceSection, trainer: RewardTrainer, labeller: Labeller, folder: Path) -> None:
        super().__init__(settings, trainer, labeller, ScoreStore(folder / "labels"), segments_per_example=1)
        self._scorer = labeller

    def _ask(
        self, replay: ReplayBuffer, count: int, step: int, rng: np.random.Generator, horizon: int
    ) -> SessionReport | None:
        newest = self.settings.query_episodes * horizon

        async def ask() -> tuple[list[Segment], list[Score]]:
            segments = [pair.first for pair in replay.sample_pairs(count, 1, rng, newest)]
            scores = await self._scorer.score([cast(np.ndarray, segment.frames)[-1] for segment in segments])
            if scores and all(score.error for score in scores):
                raise LabellerDownError(f"None of {len(scores)} pictures could be scored: {scores[0].error}")
            return segments, scores

        session = self._patient.run(ask, rng, lambda: self.stop_requested())
        if session is None:
            return None
        segments, scores = session
        if len(self.store) > self.sessions:
            self._rewind()
        self.store.append(segments, scores, step=step, time=time.time())
        return SessionReport(
            asked=len(scores),
            usable=add_scores(self.examples, self.model, segments, scores),
            undecided=sum(score.value is None and not score.error for score in scores),
            errors=sum(bool(score.error) for score in scores),
        )

    def _restore_examples(self) -> None:
        for number in range(1, len(self.store) + 1):
            add_scores(self.examples, self.model, *self.store.read(number))
