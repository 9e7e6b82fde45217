"""Labelling sessions (PEBBLE): which segments are asked about, what the labeller answers, and what is learned from
it."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from PIL import Image

from rl_vlm.config import PreferenceConfig, PreferenceSection
from rl_vlm.config.labels import Rule
from rl_vlm.labelling.store import (
    FILE_NAME,
    IDENTICAL,
    SKIPPED,
    InputKind,
    Label,
    Labeller,
    LabelStore,
    Score,
    ScoreStore,
    Segment,
    SegmentPair,
    SessionFiles,
    agreement,
    label_cache,
    log_row,
    query_log,
    true_return,
)
from rl_vlm.models.devices import driver_device
from rl_vlm.numerics import derive_seed
from rl_vlm.preference.replay import ReplayBuffer
from rl_vlm.preference.reward_model import Examples, RewardEnsemble
from rl_vlm.types import RLVLMError, UserInputError

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.5  # before a labeller that is down is asked again
T = TypeVar("T")
Draw = Callable[[int], Sequence[SegmentPair]]

# Selects the pairs to label: the six rules of B-Pref, for states and for pictures.
#
# Rules other than uniform draw more candidates than they keep. Uncertain pairs are those on which the members of the
# reward ensemble disagree, or whose preference has a high entropy; k-center keeps pairs that are far from each other
# and from what was labelled before (Sener and Savarese 2018, arXiv 1708.00489, algorithm 1).

_THUMBNAIL = 16  # pixels: the size at which pictures are compared
_NONE = np.empty((0, 0), np.float32)  # features of no pair


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


# One labelling session: draw pairs, have them labelled, draw more where too few were decided.


class LabellerDownError(RLVLMError):
    """Not one question of a session was answered: the labeller is down or refuses every question."""


async def label_session(
    labeller: Labeller, draw: Draw, wanted: int, max_rounds: int = 4, max_pairs: int | None = None
) -> tuple[list[SegmentPair], list[Label]]:
    """Label `wanted` pairs; while fewer than that are decided, draw and label as many again as are missing.

    With the original's single round, a policy that hardly moves (pairs look alike) leaves few usable pairs in a
    session, and the reward model learns nothing from them. `max_rounds` bounds the rounds (1: no further pairs are
    drawn), `max_pairs` the pairs of all rounds; `draw(n)` gives up to n new pairs. Raises LabellerDownError if nothing
    could be labelled.
    """
    pairs: list[SegmentPair] = []
    labels: list[Label] = []
    for number in range(max_rounds):
        missing = wanted - sum(label.is_decided for label in labels)
        if max_pairs is not None:
            missing = min(missing, max_pairs - len(pairs))
        drawn = list(draw(missing)) if missing > 0 else []
        if not drawn:
            break
        new = await labeller.label(drawn)
        pairs += drawn
        labels += new
        failed = [label for label in new if label.error and label.error != SKIPPED]
        if failed and not any(not label.error and label.text != IDENTICAL for label in new):
            if number == 0:
                raise LabellerDownError(
                    f"None of {len(failed)} pairs could be labelled: {failed[0].error.rstrip('.')}. Start the "
                    "labeller again."
                )
            break  # what was answered before is kept; the next session asks again
    return pairs, labels


class Feedback(ABC):
    """Asks about segments of the replay buffer, keeps the answers, and trains the reward model on them.

    Args:
        settings: `preference` of the configuration.
        model: the reward model.
        labeller: answers; None where only a label cache is replayed.
        store: keeps the answers of all sessions.
        segments_per_example: 2 for pairs, 1 for scores.
    """

    def __init__(
        self,
        settings: PreferenceSection,
        model: RewardEnsemble,
        labeller: Labeller | None,
        store: SessionFiles,
        segments_per_example: int,
    ) -> None:
        self.settings, self.model, self.labeller, self.store = settings, model, labeller, store
        self.asked = 0  # what is held against max_feedback: questions without an answer are left out
        self.usable = self.sessions = 0
        self.stop_requested: Callable[[], bool] = lambda: False
        self.examples = Examples(segments_per_example)
        # One loop for all sessions: clients of served models belong to the loop that they were first used in.
        self._loop = asyncio.new_event_loop()

    @property
    def exhausted(self) -> bool:
        """Whether no further answers can be had."""
        return self.labeller is None

    def session(
        self, replay: ReplayBuffer, count: int, step: int, rng: np.random.Generator, mean_return: float, horizon: int
    ) -> dict[str, float] | None:
        """Ask `count` questions, store the answers and train the reward model on all that are known; returns metrics.

        While the labeller is down, the session is tried again; nothing of a failed attempt is kept. Returns None if the
        user wants to stop, or if no further answers can be had. Raises LabellerDownError after `labeller_patience_s`.
        """
        if self.labeller is not None:
            self.labeller.set_margin(mean_return, self.settings.segment_length, horizon)
        started = time.monotonic()
        asked = self._ask(replay, count, rng, self.settings.query_episodes * horizon)
        if asked is None:
            return None
        examples, answers = asked[0], self._swapped(asked[1], rng)
        if not answers:
            logger.warning(
                "Nothing could be asked about at step %d: the newest %d episodes hold no two segments of %d steps "
                "(preference.segment_length).",
                step, self.settings.query_episodes, self.settings.segment_length,
            )  # fmt: skip
        if len(self.store) > self.sessions:  # of an attempt that ended before its first checkpoint
            self._rewind()
        now = time.time()
        self.store.append(examples, answers, step=step, time=now)
        self.sessions += 1
        self._log(examples, answers, now)
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
            "labels/accuracy": self._accuracy(examples, answers),
            "reward_model/accuracy": fit.accuracy,
        }
        if fit.losses:
            metrics |= {
                "reward_model/examples": float(len(self.examples)),
                "reward_model/gradient_steps": float(len(fit.losses)),
                "reward_model/loss": fit.losses[-1],
            }
        return {name: value for name, value in metrics.items() if np.isfinite(value)}

    def _swapped(self, answers: Sequence[Any], rng: np.random.Generator) -> Sequence[Any]:
        """The answers of two controls that must not succeed: all swapped, or each decided one by a coin flip.

        Undecided answers stay undecided, so there are as many usable ones as without the control.
        """
        labels = self.settings.labels
        if labels.coin_flips:
            return [a.swapped() if a.is_decided and rng.integers(2) else a for a in answers]
        return [answer.swapped() for answer in answers] if labels.flip else answers

    @abstractmethod
    def _ask(
        self, replay: ReplayBuffer, count: int, rng: np.random.Generator, newest: int
    ) -> tuple[Sequence[Any], Sequence[Any]] | None:
        """What was asked about, of the `newest` steps, and the answers."""

    @abstractmethod
    def _learn_from(self, examples: Sequence[Any], answers: Sequence[Any]) -> int:
        """Add the answers that may be trained on to the examples of the reward model; returns how many."""

    def _log(self, examples: Sequence[Any], answers: Sequence[Any], now: float) -> None:  # noqa: B027  # pairs alone
        """Write the answers to the query log."""

    def _accuracy(self, examples: Sequence[Any], answers: Sequence[Any]) -> float:
        """Share of the answers that agree with the true rewards; nan where that is not known."""
        return float("nan")

    def _rewind(self) -> None:
        """Move sessions aside that this run does not know."""
        self.store.rewind(self.sessions)

    def _patiently(self, ask: Callable[[], Coroutine[Any, Any, T]], rng: np.random.Generator) -> T | None:
        """The result of `ask()`, which is repeated while the labeller is down; None if the user wants to stop.

        Every attempt draws the same from `rng`. Raises LabellerDownError when the patience is over. Then, and where it
        returns None, `rng` and the labeller are as before: a resumed run asks for the same.
        """
        assert self.labeller is not None
        deadline = time.monotonic() + self.settings.labeller_patience_s
        drawn, before = rng.bit_generator.state, self.labeller.state()
        pause = _FIRST_PAUSE_S
        while not self.stop_requested():
            down: LabellerDownError | None = None
            try:
                result = self._loop.run_until_complete(self._unless_stopped(ask()))
                if result is not None:
                    return result
            except LabellerDownError as error:
                down = error
            rng.bit_generator.state = drawn
            self.labeller.set_state(before)
            if down is None:
                break
            left = deadline - time.monotonic()
            if left <= 0:
                raise LabellerDownError(f"{down} Then --resume goes on from the last checkpoint.") from down
            if pause == _FIRST_PAUSE_S:
                logger.warning("%s Waiting up to %.0f s for it.", down, left)
            time.sleep(min(pause, left))
            pause = min(2 * pause, 10.0)
        return None

    async def _unless_stopped(self, session: Coroutine[Any, Any, T]) -> T | None:
        task = asyncio.ensure_future(session)
        while not (await asyncio.wait([task], timeout=0.5))[0]:
            if self.stop_requested():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                logger.warning("The labelling session was interrupted: --resume asks again for all of its pairs.")
                return None
        return task.result()

    def state(self) -> dict[str, Any]:
        """The state that neither the label store nor the reward model's file holds, as JSON."""
        return {
            "asked": self.asked,
            "usable": self.usable,
            "sessions": self.sessions,
            "labeller": self.labeller.state() if self.labeller is not None else None,
        }

    def load(self, state: Mapping[str, Any], model_file: Path) -> None:
        """Go on from a saved state; the label store must hold its sessions, later ones are moved aside.

        Raises UserInputError for the state of another labeller, or of a run without one.
        """
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
        """End the event loop of the sessions."""
        self._loop.close()


class PairFeedback(Feedback):
    """Asks which segment of a pair is better. `folder` holds `labels/` and the query log.

    The sessions of `cache`, labels of an earlier run, are replayed first. As in the original, their pairs replace those
    of the policy, and are trained on as they were labelled.
    """

    def __init__(
        self,
        settings: PreferenceSection,
        model: RewardEnsemble,
        labeller: Labeller | None,
        folder: Path,
        cache: LabelStore | None = None,
    ) -> None:
        super().__init__(settings, model, labeller, LabelStore(folder / "labels"), segments_per_example=2)
        self._cache = cache
        self._log_file = query_log(folder / FILE_NAME)
        # Features, not pairs, for rules that select pairs far from earlier ones: pictures of 20,000 pairs take 10 GiB.
        self._asked_features: list[np.ndarray] = []

    @property
    def _replays(self) -> bool:
        """Whether the cache has a session that was not replayed."""
        return self._cache is not None and self.sessions < len(self._cache)

    @property
    def exhausted(self) -> bool:
        """Whether there is no labeller, and the cache is replayed."""
        return super().exhausted and not self._replays

    def _ask(
        self, replay: ReplayBuffer, count: int, rng: np.random.Generator, newest: int
    ) -> tuple[Sequence[SegmentPair], Sequence[Label]] | None:
        """The first session's pairs are drawn uniformly, because the reward model is untrained."""
        labels, labeller = self.settings.labels, self.labeller
        if self._cache is not None and self._replays:
            return self._cache.read(self.sessions + 1)
        if labeller is None:
            return None

        def draw(wanted: int) -> list[SegmentPair]:
            rule = labels.rule if self.sessions else "uniform"
            drawn = wanted if rule == "uniform" else wanted * labels.large_batch
            candidates = replay.sample_pairs(drawn, self.settings.segment_length, rng, newest)
            known = np.stack(self._asked_features) if self._asked_features else _NONE
            return select_pairs(rule, candidates, wanted, self.model, known)

        most = self.settings.max_feedback - self.asked
        return self._patiently(lambda: label_session(labeller, draw, count, labels.rounds, most), rng)

    def _learn_from(self, examples: Sequence[SegmentPair], answers: Sequence[Label]) -> int:
        if self.settings.labels.rule.startswith("kcenter"):
            self._asked_features += list(pair_features(examples, self.model.input_kind))
        return self.model.add_pairs(self.examples, examples, answers)

    def _accuracy(self, examples: Sequence[SegmentPair], answers: Sequence[Label]) -> float:
        right = agreement([(true_return(pair.first), true_return(pair.second)) for pair in examples], answers)
        decided = [agrees for agrees in right if agrees is not None]
        return float(np.mean(decided)) if decided else float("nan")

    def _log(self, examples: Sequence[SegmentPair], answers: Sequence[Label], now: float) -> None:
        rows = (log_row(pair, label, self.sessions, now) for pair, label in zip(examples, answers, strict=True))
        self._log_file.add(*rows)

    def _rewind(self) -> None:
        super()._rewind()
        self._log_file.rewind(self.sessions)
        self._asked_features.clear()


class ScoreFeedback(Feedback):
    """Asks for scores of single steps. `folder` holds the store, `labels/`."""

    def __init__(self, settings: PreferenceSection, model: RewardEnsemble, labeller: Labeller, folder: Path) -> None:
        super().__init__(settings, model, labeller, ScoreStore(folder / "labels"), segments_per_example=1)
        self._scorer = labeller

    def _ask(
        self, replay: ReplayBuffer, count: int, rng: np.random.Generator, newest: int
    ) -> tuple[Sequence[Segment], Sequence[Score]] | None:
        async def ask() -> tuple[list[Segment], list[Score]]:
            segments = [pair.first for pair in replay.sample_pairs(count, 1, rng, newest)]
            scores = await self._scorer.score([cast(np.ndarray, segment.frames)[-1] for segment in segments])
            if scores and all(score.error for score in scores):
                raise LabellerDownError(f"None of {len(scores)} pictures could be scored: {scores[0].error}")
            return segments, scores

        return self._patiently(ask, rng)

    def _learn_from(self, examples: Sequence[Segment], answers: Sequence[Score]) -> int:
        return self.model.add_scores(self.examples, examples, answers)


def build_feedback(
    config: PreferenceConfig, folder: Path, served: tuple[Any, Any], sizes: tuple[int, int]
) -> Feedback | None:
    """Labeller, reward model and label store of a run whose reward is learned; None for others.

    `served` are client and text side of the served model, or None twice; `sizes` are those of observation and action.
    """
    settings, section = config.preference, config.preference.reward_model
    if not settings.learns_reward:
        return None
    from rl_vlm.labelling.teachers import build_labeller

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
    if settings.reward == "learn_from_score":
        assert labeller is not None
        return ScoreFeedback(settings, model, labeller, folder)
    return PairFeedback(settings, model, labeller, folder, LabelStore(cache) if cache is not None else None)
