"""Labelling sessions (PEBBLE): which segments are asked about, what is answered, and what is learned from it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from rl_vlm.preference.replay import ReplayBuffer
from rl_vlm.preference.reward_model import Examples, RewardEnsemble
from rl_vlm.seeding import derive_seed
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
    return np.stack(features).reshape(len(pairs), -1) if pairs else _NONE


def _segment_features(segment: Segment, kind: InputKind) -> np.ndarray:
    if kind != "image" or segment.frames is None:
        return segment.observations.astype(np.float32).ravel()
    small = [Image.fromarray(frame).resize((_THUMBNAIL, _THUMBNAIL), Image.Resampling.BOX) for frame in segment.frames]
    return np.stack([np.asarray(picture) for picture in small]).astype(np.float32).ravel() / 255


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


# One labelling session: draw pairs, have them labelled, draw more where too few were decided.


class LabellerDownError(RLVLMError):
    """Not one question of a session was answered: the labeller is down or refuses every question.

    Do: start the labeller again, then `--resume`.
    """


async def label_session(
    labeller: Labeller, draw: Draw, wanted: int, max_rounds: int, max_pairs: int
) -> tuple[list[SegmentPair], list[Label]]:
    """Label `wanted` pairs; while fewer than that are decided, draw and label as many again as are missing.

    With the original's single round, a policy that hardly moves (pairs look alike) leaves few usable pairs in a
    session. `max_rounds` bounds the rounds, `max_pairs` the pairs of all rounds; `draw(n)` gives up to n new pairs.
    Raises LabellerDownError if nothing could be labelled.
    """
    pairs: list[SegmentPair] = []
    labels: list[Label] = []
    for number in range(max_rounds):
        missing = min(wanted - sum(label.is_decided for label in labels), max_pairs - len(pairs))
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


async def score_session(labeller: Labeller, drawn: Sequence[SegmentPair]) -> tuple[list[Segment], list[Score]]:
    """Score the first segment of each pair. Raises LabellerDownError if nothing could be scored."""
    segments = [pair.first for pair in drawn]
    scores = await labeller.score([cast(np.ndarray, segment.frames)[-1] for segment in segments])
    if scores and all(score.error for score in scores):
        raise LabellerDownError(f"None of {len(scores)} pictures could be scored: {scores[0].error}")
    return segments, scores


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
        # One loop for all sessions: clients of served models belong to the loop that they were first used in.
        self._loop = asyncio.new_event_loop()
        self._thread = ThreadPoolExecutor(1)  # in which it runs: the driver's own may have one, as a notebook's has

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
        or None if the user wants to stop or no further answers can be had (`_patiently`)."""
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
        learned: list[tuple[float, float]] = []  # what the model says before it knows the answers
        if not self._scores:
            parts = [part for pair in examples for part in (pair.first, pair.second)]
            returns = self.model.segment_returns(parts).mean(0).tolist()
            learned = list(zip(returns[::2], returns[1::2], strict=True))
        self.store.append(examples, answers, step=step, time=now, learned=learned)
        self.sessions += 1
        right: list[bool] = []  # whether each decided label agrees with the true rewards, where these are known
        if not self._scores:
            self._log.add(*(log_row(*both, self.sessions, now) for both in zip(examples, answers, strict=True)))
            returns = [(true_return(pair.first), true_return(pair.second)) for pair in examples]
            right = [agrees for agrees in agreement(returns, answers) if agrees is not None]
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

    def _swapped(self, answers: Sequence[Any], rng: np.random.Generator) -> Sequence[Any]:
        """The answers of two controls that must not succeed: all swapped, or each decided one by a coin flip."""
        labels = self.settings.labels
        if labels.coin_flips:
            return [a.swapped() if a.is_decided and rng.integers(2) else a for a in answers]
        return [answer.swapped() for answer in answers] if labels.flip else answers

    def _ask(
        self, replay: ReplayBuffer, count: int, rng: np.random.Generator, newest: int
    ) -> tuple[Sequence[Any], Sequence[Any]] | None:
        labels, labeller = self.settings.labels, self.labeller
        if self._cache is not None and self._replays:
            return self._cache.read(self.sessions + 1)
        if labeller is None:
            return None
        if self._scores:
            return self._patiently(lambda: score_session(labeller, replay.sample_pairs(count, 1, rng, newest)), rng)

        def draw(wanted: int) -> list[SegmentPair]:
            # The first session's pairs are drawn uniformly, because the reward model is untrained.
            rule = labels.rule if self.sessions else "uniform"
            drawn = wanted if rule == "uniform" else wanted * labels.large_batch
            candidates = replay.sample_pairs(drawn, self.settings.segment_length, rng, newest)
            known = np.stack(self._asked_features) if self._asked_features else _NONE
            return select_pairs(rule, candidates, wanted, self.model, known)

        most = self.settings.max_feedback - self.asked
        return self._patiently(lambda: label_session(labeller, draw, count, labels.rounds, most), rng)

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

    def _patiently(self, ask: Callable[[], Coroutine[Any, Any, T]], rng: np.random.Generator) -> T | None:
        """The result of `ask()`, repeated while the labeller is down; None if the user wants to stop.

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
                result = self._thread.submit(self._loop.run_until_complete, self._unless_stopped(ask())).result()
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
        self._thread.shutdown()
        self._loop.close()


def build_feedback(
    config: PreferenceConfig, folder: Path, served: tuple[Any, Any], sizes: tuple[int, int]
) -> Feedback | None:
    """Labeller, reward model and label store of a run whose reward is learned. `served` are client and text side of the
    served model, or None twice; `sizes` are those of observation and action."""
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
    return Feedback(settings, model, labeller, folder, LabelStore(cache) if cache is not None else None)
