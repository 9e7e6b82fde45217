"""The scripted teacher of B-Pref."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_vlm.config import TeacherSection
from rl_vlm.labelling.labels import SKIPPED, Label, Labeller, SegmentPair, true_return

logger = logging.getLogger(__name__)


class ScriptedTeacher(Labeller):
    """Labels by the true reward; exactly equal returns are label -1 for a rational teacher."""

    def __init__(self, settings: TeacherSection | None = None, seed: int = 0) -> None:
        self._settings = settings or TeacherSection()
        self._rng = np.random.default_rng(seed)
        self._margin = 0.0
        self._has_warned = False

    def set_margin(self, mean_return: float, segment_length: int, horizon: int) -> None:
        """Scale the thresholds to the policy: the recent mean return of episodes, as share of a segment. Below 0, which
        B-Pref's tasks never reach, no pair meets them."""
        self._margin = mean_return * segment_length / horizon
        eps = [name for name in ("eps_skip", "eps_equal") if getattr(self._settings, name)]
        if eps and mean_return < 0 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "preference.labels.teacher.%s: thresholds are shares of the episodes' mean return, which is %.4g, and "
                "below 0 they have no effect. Make rewards positive, or leave the thresholds out.",
                " and ".join(eps), mean_return,
            )  # fmt: skip

    async def label(self, pairs: Sequence[SegmentPair]) -> list[Label]:
        return [self._label_one(pair) for pair in pairs]

    def state(self) -> dict[str, Any]:
        return {"rng": self._rng.bit_generator.state, "margin": self._margin}

    def set_state(self, state: dict[str, Any]) -> None:
        self._rng.bit_generator.state = state["rng"]
        self._margin = float(state["margin"])

    def _label_one(self, pair: SegmentPair) -> Label:
        settings = self._settings
        plain = [true_return(pair.first), true_return(pair.second)]
        # Drawn for every pair, used or not, so that labels of later pairs do not depend on earlier thresholds.
        noise, mistake = self._rng.random(2)
        if not np.isfinite(plain).all():
            return Label(-1, error="the true reward of this pair is not known (nan or infinite)")
        skip = self._margin * settings.eps_skip
        if skip > 0 and max(plain) <= skip:
            return Label(-1, error=SKIPPED)
        if abs(plain[0] - plain[1]) < self._margin * settings.eps_equal:
            return Label(-1)
        # The sum over t of gamma^(T - 1 - t) r_t.
        weights = settings.gamma ** np.arange(len(pair.first) - 1, -1, -1, dtype=np.float64)
        first, second = (float(np.sum(weights * part.true_rewards)) for part in (pair.first, pair.second))
        prefers_second = first < second
        if settings.beta > 0:
            # P(second preferred) = sigmoid(beta (R2 - R1)), Bradley and Terry (1952).
            prefers_second = noise < 0.5 * (1 + math.tanh(settings.beta * (second - first) / 2))
        elif first == second:
            return Label(-1)
        return Label(1 if prefers_second != (mistake < settings.eps_mistake) else 0)
