"""Labelling sessions (PEBBLE's feedback): pairs from the replay buffer, their labels, the reward model. No Ray here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from rl_vlm.config import PreferenceSection
from rl_vlm.labelling.query_log import FILE_NAME, QueryLog, true_return
from rl_vlm.labelling.session import LabelledSession, LabellerDownError, is_answer, is_decided, label_session
from rl_vlm.labelling.store import LabelReplay, LabelStore
from rl_vlm.labelling.types import SKIPPED, HasState, KnowsMargin, Label, Labeller, Score, Scorer, Segment, SegmentPair
from rl_vlm.preference.feedback.cached_labels import check_length
from rl_vlm.preference.feedback.selection import num_candidates, pair_features, select_pairs
from rl_vlm.preference.replay.buffer import ReplayBuffer
from rl_vlm.preference.reward_model.ensemble import FitReport, RewardEnsemble
from rl_vlm.types import UserInputError

logger = logging.getLogger(__name__)

# How long a session that is under way may go on when the user wants to stop: batch systems and Kubernetes kill after 30 s or more.
_STOP_GRACE_S = 10.0


@dataclass(slots=True)
class SessionReport:
    """Figures of one session."""

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
        figures = {
            "labels/asked": float(self.asked),
            "labels/usable": float(self.usable),
            "labels/undecided": float(self.undecided),
            "labels/errors": float(self.errors),
            "labels/seconds": self.seconds,
            "time/fit": self.fit_seconds,
        }
        if np.isfinite(self.right):
            figures["labels/accuracy"] = self.right
        if self.fit is not None and self.fit.examples:
            figures |= {
                "reward_model/examples": float(self.fit.examples),
                "reward_model/gradient_steps": float(self.fit.gradient_steps),
                "reward_model/loss": self.fit.loss,
            }
            if np.isfinite(self.fit.accuracy):
                figures["reward_model/accuracy"] = self.fit.accuracy
        return figures


class Feedback:
    """Owns labeller, label store and reward model of a run.

    Args:
        settings: `preference` of the configuration.
        model: the reward ensemble.
        labeller: answers; None where only a label cache is replayed.
        folder: holds `labels/` and the query log.
        cache: labels of an earlier run, which are replayed first.
    """

    def __init__(
        self,
        settings: PreferenceSection,
        model: RewardEnsemble,
        labeller: Labeller | None,
        folder: Path,
        cache: LabelReplay | None = None,
    ) -> None:
        self.settings, self.model = settings, model
        self.store = LabelStore(folder / "labels")
        self.asked = self.usable = self.sessions = (
            0  # `asked` is held against max_feedback, pairs without an answer left out
        )
        self.stop_requested: Callable[[], bool] = lambda: False
        self._labeller, self._cache = labeller, cache
        self._cache_is_used_up = False
        self._log_path = folder / FILE_NAME
        # Features, not pairs, for rules that select pairs far from earlier ones: pictures of 20,000 pairs take 10 GiB.
        self._known = pair_features([], model.input_kind)
        # One loop for all sessions: clients of served models belong to the loop that they were first used in.
        self._loop = asyncio.new_event_loop()

    @property
    def exhausted(self) -> bool:
        """Whether no labels are left: no labeller, and the cache is replayed."""
        return self._labeller is None and (self._cache is None or self._cache_is_used_up)

    @property
    def cost(self) -> str:
        """What labelling has cost so far and how the labeller behaves, in one line; empty for labellers that count nothing."""
        stats = getattr(self._labeller, "stats", None)
        return stats.summary() if stats is not None else ""

    def session(
        self, replay: ReplayBuffer, count: int, step: int, rng: np.random.Generator, mean_return: float, horizon: int
    ) -> SessionReport | None:
        """Have `count` pairs labelled and train the reward model on all that are known.

        The first session's pairs are drawn uniformly, because the model is untrained. While the labeller is down, the
        session is tried again; nothing of a failed attempt is kept. Returns None if the user wants to stop, or if the cache
        is replayed and there is no labeller. Raises LabellerDownError after `labeller_patience_s`.
        """
        if isinstance(self._labeller, KnowsMargin):
            self._labeller.set_margin(mean_return, self.settings.segment_length, horizon)
        started = time.monotonic()
        if self.settings.reward == "learn_from_score":
            report = self._score(replay, count, step, rng, horizon)
        else:
            report = self._label(replay, count, step, rng, horizon)
        if report is None:
            return None
        report.seconds = time.monotonic() - started
        self.sessions += 1
        self.asked += report.asked - report.errors
        self.usable += report.usable
        started = time.monotonic()
        report.fit = self.model.fit_scores() if self.settings.reward == "learn_from_score" else self.model.fit()
        report.fit_seconds = time.monotonic() - started
        return report

    def _label(
        self, replay: ReplayBuffer, count: int, step: int, rng: np.random.Generator, horizon: int
    ) -> SessionReport | None:
        session = self._cached()
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
                return select_pairs(rule, candidates, wanted, self.model, self._known)

            most = self.settings.max_feedback - self.asked
            session = self._retried(lambda: label_session(labeller, draw, count, labels.rounds, most), rng)
        if session is None:
            return None
        if not session.pairs:
            logger.warning(
                "No pair could be drawn at step %d, so nothing was labelled: the newest %d episodes hold no two segments of %d "
                "steps (preference.segment_length).",
                step, self.settings.query_episodes, self.settings.segment_length,
            )  # fmt: skip
        session.labels = [_as_stored(label) for label in session.labels]
        now = time.time()
        self._store(session.pairs, session.labels, step, now)
        QueryLog(self._log_path).append(session.pairs, session.labels, iteration=self.sessions + 1, time=now)
        self._remember(session.pairs)
        return SessionReport(
            asked=len(session),
            usable=self.model.add_pairs(session.pairs, session.labels),
            undecided=sum(is_answer(label) and label.value == -1 for label in session.labels),
            errors=sum(bool(label.error) and label.error != SKIPPED for label in session.labels),
            right=label_accuracy(session.pairs, session.labels),
        )

    def _score(
        self, replay: ReplayBuffer, count: int, step: int, rng: np.random.Generator, horizon: int
    ) -> SessionReport | None:
        scorer = cast(Scorer, self._labeller)
        newest = self.settings.query_episodes * horizon

        async def ask() -> tuple[list[Segment], list[Score]]:
            segments = [pair.first for pair in replay.sample_pairs(count, 1, rng, newest)]
            scores = await scorer.score([cast(np.ndarray, segment.frames)[-1] for segment in segments])
            if scores and all(score.error for score in scores):
                raise LabellerDownError(f"None of {len(scores)} pictures could be scored: {scores[0].error}")
            return segments, scores

        found = self._retried(ask, rng)
        if found is None:
            return None
        segments, scores = found
        scores = [_label_as_score(_as_stored(_score_as_label(score))) for score in scores]
        # The store holds pairs; a scored picture is kept as a pair with itself, its score in the probabilities.
        pairs = [SegmentPair(segment, segment) for segment in segments]
        self._store(pairs, [_score_as_label(score) for score in scores], step, time.time())
        return SessionReport(
            asked=len(scores),
            usable=self.model.add_scores(segments, scores),
            undecided=sum(score.value is None and not score.error for score in scores),
            errors=sum(bool(score.error) for score in scores),
        )

    def _cached(self) -> LabelledSession | None:
        if self._cache is None or self._cache_is_used_up:
            return None
        stored = self._cache.next_session()
        self._cache_is_used_up = stored is None
        if stored is None:
            return None
        check_length(stored.pairs, self.settings.segment_length)
        return LabelledSession(stored.pairs, stored.labels)

    def _retried(self, ask: Callable[[], Any], rng: np.random.Generator) -> Any:
        """The result of `ask()`, tried again while the labeller is down. Every attempt draws the same pairs."""
        deadline = time.monotonic() + self.settings.labeller_patience_s
        drawn, labeller = rng.bit_generator.state, self._labeller
        before = labeller.state() if isinstance(labeller, HasState) else None
        pause, warned = 0.5, False

        def take_back() -> None:
            rng.bit_generator.state = drawn
            if isinstance(labeller, HasState) and before is not None:
                labeller.set_state(before)

        while not self.stop_requested():
            try:
                found = self._loop.run_until_complete(self._unless_stopped(ask()))
                if found is not None:
                    return found
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

    async def _unless_stopped(self, session: Coroutine[Any, Any, Any]) -> Any:
        """The result of a session; None where the user wants to stop and it does not end soon."""
        task = asyncio.ensure_future(session)
        while not (await asyncio.wait([task], timeout=0.5))[0]:
            if self.stop_requested() and not (await asyncio.wait([task], timeout=_STOP_GRACE_S))[0]:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                logger.warning("The labelling session did not end in time: --resume asks again for all of its pairs.")
                return None
        return task.result()

    def _store(self, pairs: Sequence[SegmentPair], labels: Sequence[Label], step: int, now: float) -> None:
        if len(self.store) > self.sessions:  # of an attempt that ended before its first checkpoint
            self._rewind()
        self.store.append(pairs, labels, step=step, time=now)

    def _rewind(self) -> None:
        """Move sessions aside that this run does not know, and take them out of the log."""
        self.store.rewind(self.sessions)
        QueryLog(self._log_path, keep_until=self.sessions)

    def _remember(self, pairs: Sequence[SegmentPair]) -> None:
        if self.settings.labels.rule.startswith("kcenter") and pairs:
            new = pair_features(pairs, self.model.input_kind)
            self._known = np.concatenate([self._known, new]) if len(self._known) else new

    def state(self) -> dict[str, Any]:
        """The state that neither the label store nor the reward model's file holds, as JSON."""
        return {
            "asked": self.asked,
            "usable": self.usable,
            "sessions": self.sessions,
            "labeller": self._labeller.state() if isinstance(self._labeller, HasState) else None,
            "cache": self._cache.state() if self._cache is not None else None,
            "cache_used_up": self._cache_is_used_up,
        }

    def load(self, state: Mapping[str, Any], model_file: Path) -> None:
        """Go on from a saved state; the label store must hold its sessions, later ones are moved aside.

        Raises UserInputError for the state of another labeller, or of a run without one.
        """
        try:
            self.asked, self.usable = int(state["asked"]), int(state["usable"])
            self.sessions = int(state["sessions"])
            if isinstance(self._labeller, HasState) and state["labeller"] is not None:
                self._labeller.set_state(state["labeller"])
        except (KeyError, TypeError) as error:
            raise UserInputError(
                "The checkpoint is of a run with another labeller: keep preference.reward, and of preference.labels source and "
                "coin_flips."
            ) from error
        if self._cache is not None and state["cache"] is not None:
            self._cache.set_state(state["cache"])
        self._cache_is_used_up = bool(state["cache_used_up"])
        self._rewind()
        self.model.load(model_file)
        self.model.forget_examples()
        self._known = pair_features([], self.model.input_kind)
        for stored in self.store.sessions():
            if self.settings.reward == "learn_from_score":
                scores = [_label_as_score(label) for label in stored.labels]
                self.model.add_scores([pair.first for pair in stored.pairs], scores)
            else:
                self.model.add_pairs(stored.pairs, stored.labels)
                self._remember(stored.pairs)

    def close(self) -> None:
        """End the event loop."""
        self._loop.close()


def label_accuracy(pairs: Sequence[SegmentPair], labels: Sequence[Label]) -> float:
    """Share of the decided labels, of pairs whose true returns are known and differ, that prefer the higher return; nan without any."""
    decided = [
        (true_return(pair.second) - true_return(pair.first), label.value == 1)
        for pair, label in zip(pairs, labels, strict=True)
        if is_decided(label)
    ]
    found = [(difference > 0) == second for difference, second in decided if np.isfinite(difference) and difference]
    return float(np.mean(found)) if found else float("nan")


def _as_stored(label: Label) -> Label:
    """With probabilities in float32, as the label store holds them, so that a resumed run trains on the same numbers."""
    if label.probabilities is None:
        return label
    first, second, neither = np.asarray(label.probabilities, np.float32).tolist()
    return replace(label, probabilities=(first, second, neither))


def _score_as_label(score: Score) -> Label:
    known = None if score.value is None else (score.value, 1 - score.value, 0.0)
    return Label(-1, known, score.text, score.seconds, score.error)


def _label_as_score(label: Label) -> Score:
    value = None if label.probabilities is None else label.probabilities[0]
    return Score(value, label.text, label.seconds, label.error)
