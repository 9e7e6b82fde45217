"""Feedback: asks about segments of the replay buffer, keeps the answers, and trains the reward model on them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_vlm.config import PreferenceConfig, PreferenceSection
from rl_vlm.labelling.labels import SKIPPED, Labeller, SegmentPair, agreement, true_return
from rl_vlm.labelling.query_log import FILE_NAME, log_row, query_log
from rl_vlm.labelling.store import LabelStore, ScoreStore, SessionFiles, label_cache
from rl_vlm.models.devices import driver_device
from rl_vlm.preference.replay import ReplayBuffer
from rl_vlm.preference.reward_examples import Examples
from rl_vlm.preference.reward_model import RewardEnsemble
from rl_vlm.preference.selection import NO_FEATURES, pair_features, select_pairs
from rl_vlm.preference.sessions import SessionRunner, label_session, score_session
from rl_vlm.seeding import derive_seed
from rl_vlm.types import UserInputError

logger = logging.getLogger(__name__)


class Feedback:
    """Asks about segments of the replay buffer, keeps the answers, and trains the reward model on them.

    Segments are compared in pairs or, where the reward is learned from scores, scored one by one. `folder` holds the
    answers (`labels/`) and the query log of the pairs. As in the original, the pairs of `cache`, sessions of an earlier
    run, replace those of the policy at first. `labeller` is None where only a cache is replayed.
    """

    def __init__(
        self,
        settings: PreferenceSection,
        model: RewardEnsemble,
        labeller: Labeller | None,
        folder: Path,
        cache: LabelStore | None = None,
    ) -> None:
        self.settings, self.model, self.labeller, self._cache = settings, model, labeller, cache
        self._scores = settings.reward == "learn_from_score"
        self.store: SessionFiles = (ScoreStore if self._scores else LabelStore)(folder / "labels")
        self._log = query_log(folder / FILE_NAME)
        self.asked = 0  # what is held against max_feedback: questions without an answer are left out
        self.usable = self.sessions = 0
        self.stop_requested: Callable[[], bool] = lambda: False
        self.examples = Examples(1 if self._scores else 2)
        # Features, not pairs, for rules that select pairs far from earlier ones: pictures of 20,000 pairs take 10 GiB.
        self._asked_features: list[np.ndarray] = []
        self._runner = None if labeller is None else SessionRunner(labeller, settings.labeller_patience_s)

    @property
    def exhausted(self) -> bool:
        return self.labeller is None and not self._replays

    @property
    def _replays(self) -> bool:
        return self._cache is not None and self.sessions < len(self._cache)

    def session(
        self, replay: ReplayBuffer, count: int, step: int, rng: np.random.Generator, mean_return: float, horizon: int
    ) -> dict[str, float] | None:
        """Ask `count` questions, store the answers and train the reward model on all that are known; returns metrics,
        or None if the user wants to stop or no further answers can be had. Raises LabellerDownError."""
        started, newest = time.monotonic(), self.settings.query_episodes * horizon
        if self.labeller is not None:
            self.labeller.set_margin(mean_return, self.settings.segment_length, horizon)
        asked: tuple[Sequence[Any], Sequence[Any]] | None = None
        if self._cache is not None and self._replays:
            asked = self._cache.read(self.sessions + 1)
        elif self._runner is not None:
            asked = self._runner.retry_while_labeller_down(
                lambda: self._questions(replay, count, rng, newest), rng, self.stop_requested
            )
        if asked is None:
            return None
        examples, answers = asked[0], self._swapped(asked[1], rng)
        if not answers:
            logger.warning(
                "Nothing could be asked about at step %d: the newest %d episodes hold no two segments of %d steps "
                "(preference.segment_length).",
                step, self.settings.query_episodes, self.settings.segment_length,
            )  # fmt: skip
        right = self._record(examples, answers, step)
        usable = self._learn_from(examples, answers)
        lost = sum(bool(answer.error) and answer.error != SKIPPED for answer in answers)
        self.asked += len(answers) - lost
        self.usable += usable
        labelled = time.monotonic()
        fit = self.model.fit(self.examples)
        metrics = {
            "labels/asked": float(len(answers)),
            "labels/usable": float(usable),
            "labels/undecided": float(sum(not a.error and a.value in (-1, None) for a in answers)),
            "labels/errors": float(lost),
            "labels/seconds": labelled - started,
            "time/fit": time.monotonic() - labelled,
            "labels/accuracy": float(np.mean(right)) if right else float("nan"),
            "reward_model/accuracy": fit.accuracy,
        }
        if fit.losses:
            metrics |= {
                "reward_model/examples": float(len(self.examples)),
                "reward_model/gradient_steps": float(len(fit.losses)),
                "reward_model/loss": fit.losses[-1],
            }
        return {name: value for name, value in metrics.items() if np.isfinite(value)}

    def _questions(
        self, replay: ReplayBuffer, count: int, rng: np.random.Generator, newest: int
    ) -> Coroutine[Any, Any, tuple[Sequence[Any], Sequence[Any]]]:
        """A session of `count` questions about the `newest` steps: what it asked about, and the answers."""
        labels, labeller = self.settings.labels, self.labeller
        assert labeller is not None
        if self._scores:
            return score_session(labeller, replay.sample_pairs(count, 1, rng, newest))

        def draw(wanted: int) -> list[SegmentPair]:
            # The first session's pairs are drawn uniformly, because the reward model is untrained.
            rule = labels.rule if self.sessions else "uniform"
            drawn = wanted if rule == "uniform" else wanted * labels.large_batch
            candidates = replay.sample_pairs(drawn, self.settings.segment_length, rng, newest)
            known = np.stack(self._asked_features) if self._asked_features else NO_FEATURES
            return select_pairs(rule, candidates, wanted, self.model, known)

        return label_session(labeller, draw, count, labels.rounds, self.settings.max_feedback - self.asked)

    def _record(self, examples: Sequence[Any], answers: Sequence[Any], step: int) -> list[bool]:
        """Store and log a session; returns whether each decided label agrees with the true rewards, where these are
        known."""
        if len(self.store) > self.sessions:  # of an attempt that ended before its first checkpoint
            self._rewind()
        now = time.time()
        learned: list[tuple[float, float]] = []  # what the model says before it knows the answers
        if not self._scores:
            parts = [part for pair in examples for part in (pair.first, pair.second)]
            returns = self.model.segment_returns(parts).mean(0).tolist()
            learned = list(zip(returns[::2], returns[1::2], strict=True))
        self.store.append(examples, answers, step=step, time=now, learned=learned)
        self.sessions += 1
        if self._scores:
            return []
        self._log.add(*(log_row(*both, self.sessions, now) for both in zip(examples, answers, strict=True)))
        returns = [(true_return(pair.first), true_return(pair.second)) for pair in examples]
        return [agrees for agrees in agreement(returns, answers) if agrees is not None]

    def _swapped(self, answers: Sequence[Any], rng: np.random.Generator) -> Sequence[Any]:
        """The answers of two controls that must not succeed: all swapped, or each decided one by a coin flip."""
        labels = self.settings.labels
        if labels.coin_flips:
            return [a.swapped() if a.is_decided and rng.integers(2) else a for a in answers]
        return [answer.swapped() for answer in answers] if labels.flip else answers

    def _learn_from(self, examples: Sequence[Any], answers: Sequence[Any]) -> int:
        """Add the answers that may be trained on to the examples of the reward model; returns how many."""
        if self._scores:
            return self.model.add_scores(self.examples, examples, answers)
        if self.settings.labels.rule.startswith("kcenter"):
            self._asked_features += list(pair_features(examples, self.model.input_kind))
        return self.model.add_pairs(self.examples, examples, answers)

    def _rewind(self) -> None:
        self.store.rewind(self.sessions)
        self._log.rewind(self.sessions)
        self._asked_features.clear()

    def state(self) -> dict[str, Any]:
        """The state that neither the label store nor the reward model's file holds, as JSON."""
        return {
            "asked": self.asked,
            "usable": self.usable,
            "sessions": self.sessions,
            "labeller": self.labeller.state() if self.labeller is not None else None,
        }

    def load(self, state: Mapping[str, Any], model_file: Path) -> None:
        """Go on from a saved state; later sessions of the label store are moved aside. Raises UserInputError for the
        state of another labeller."""
        try:
            self.asked, self.usable = int(state["asked"]), int(state["usable"])
            self.sessions = int(state["sessions"])
            if self.labeller is not None and state["labeller"] is not None:
                self.labeller.set_state(state["labeller"])
        except (KeyError, TypeError) as error:
            raise UserInputError(
                "The checkpoint is of a run with another labeller: keep preference.reward and preference.labels.source."
            ) from error
        self._rewind()
        self.model.load(model_file)
        self.examples = Examples(self.examples.parts)
        for examples, answers in self.store.sessions():
            self._learn_from(examples, answers)

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()


def check_cache(folder: Path, settings: PreferenceSection, sizes: tuple[int, int]) -> None:
    """Check the first pair of every session of a label cache; `sizes` are those of observation and action. Raises
    UserInputError before a step is taken."""
    store = LabelStore(folder)
    model = RewardEnsemble(_input_shape(settings, sizes), settings.reward_model.model_copy(update={"size": 1}))
    for number in range(1, len(store) + 1):
        for pair in store.read(number, most=1)[0]:
            try:
                if len(pair.first) != settings.segment_length:
                    raise UserInputError(f"It has segments of {len(pair.first)} steps.")
                model.inputs_of(pair.first)
            except UserInputError as error:
                raise UserInputError(
                    f"The label cache {folder} does not fit this run: {error} Set env.id, preference.segment_length, "
                    "preference.image_size and preference.reward_model.architecture to those of the run that it comes "
                    "from, or leave preference.labels.cache out."
                ) from error


def _input_shape(settings: PreferenceSection, sizes: tuple[int, int]) -> tuple[int, ...]:
    return (settings.image_size, settings.image_size, 3) if settings.rewards_images else (sum(sizes),)


def build_feedback(
    config: PreferenceConfig, folder: Path, served: tuple[Any, Any], sizes: tuple[int, int]
) -> Feedback | None:
    """Labeller, reward model and label store of a run whose reward is learned. `served` are client and text side of the
    served model, or None twice; `sizes` are those of observation and action."""
    settings, section = config.preference, config.preference.reward_model
    if not settings.learns_reward:
        return None
    from rl_vlm.labelling.building import build_labeller

    cache, device = label_cache(settings.labels.cache), driver_device(config)
    if cache is not None:
        check_cache(cache, settings, sizes)
    labeller = None
    if settings.labels.source != "cache":
        seed = derive_seed(config.seed, 50) % 2**31
        labeller = build_labeller(settings.labels, config.env.id, seed, *served, device)
    seed = derive_seed(config.seed, 51) % 2**31
    model = RewardEnsemble(_input_shape(settings, sizes), section, seed, device)
    if section.load:
        model.load(Path(section.load), weights_only=True)
    return Feedback(settings, model, labeller, folder, LabelStore(cache) if cache is not None else None)
