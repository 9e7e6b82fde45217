"""Feedback on single pictures: how near is it to the goal?"""

from __future__ import annotations

import time
from pathlib import Path
from typing import cast

import numpy as np

from rl_vlm.config import PreferenceSection
from rl_vlm.labelling.session import LabellerDownError
from rl_vlm.labelling.store import ScoreStore
from rl_vlm.labelling.types import Score, Scorer, Segment
from rl_vlm.preference.feedback.feedback import Feedback, SessionReport
from rl_vlm.preference.replay.buffer import ReplayBuffer
from rl_vlm.preference.reward_model.examples import add_scores
from rl_vlm.preference.reward_model.training import RewardTrainer


class ScoreFeedback(Feedback):
    """Asks for scores of single steps. `folder` holds the store, `labels/`."""

    store: ScoreStore

    def __init__(self, settings: PreferenceSection, trainer: RewardTrainer, scorer: Scorer, folder: Path) -> None:
        super().__init__(settings, trainer, scorer, ScoreStore(folder / "labels"), segments_per_example=1)
        self._scorer = scorer

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
