"""Feedback on pairs of segments: which of the two is better?"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_vlm.config import PreferenceSection
from rl_vlm.labelling.query_log import FILE_NAME, QueryLog, true_return
from rl_vlm.labelling.session import LabelledSession, is_answer, is_decided, label_session
from rl_vlm.labelling.store import LabelStore
from rl_vlm.labelling.types import SKIPPED, Label, Labeller, SegmentPair
from rl_vlm.preference.feedback.cached_labels import check_length
from rl_vlm.preference.feedback.feedback import Feedback, SessionReport
from rl_vlm.preference.feedback.selection import num_candidates, pair_features, select_pairs
from rl_vlm.preference.replay.buffer import ReplayBuffer
from rl_vlm.preference.reward_model.examples import add_pairs
from rl_vlm.preference.reward_model.training import RewardTrainer

logger = logging.getLogger(__name__)


class PairFeedback(Feedback):
    """Asks which segment of a pair is better. `folder` holds `labels/` and the query log.

    The sessions of `cache`, labels of an earlier run, are replayed first. As in the original, their pairs replace those of the
    policy, and are trained on as they were labelled.
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
        self._pair_labeller, self._cache = labeller, cache
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
        labeller, labels = self._pair_labeller, self.settings.labels
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
                "No pair could be drawn at step %d, so nothing was labelled: the newest %d episodes hold no two segments of %d "
                "steps (preference.segment_length).",
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
    """Share of the decided labels, of pairs whose true returns are known and differ, that prefer the higher return; nan without any."""
    decided = [
        (true_return(pair.second) - true_return(pair.first), label.value == 1)
        for pair, label in zip(pairs, labels, strict=True)
        if is_decided(label)
    ]
    right = [(difference > 0) == second for difference, second in decided if np.isfinite(difference) and difference]
    return float(np.mean(right)) if right else float("nan")
