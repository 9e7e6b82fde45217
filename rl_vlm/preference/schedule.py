"""The schedule of a preference run in environment steps, and its log of finished episodes. No Ray here."""

from __future__ import annotations

import csv
import io
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rl_vlm.config import PreferenceSection
from rl_vlm.files import append_whole, whole_lines, write_atomic
from rl_vlm.numerics import wilson_interval
from rl_vlm.preference.collector import EpisodeResult
from rl_vlm.preference.replay import StepBatch
from rl_vlm.types import UserInputError

Phase = Literal["random", "explore", "learn"]


def first_session_step(settings: PreferenceSection) -> int:
    """When exploration ends: the first session, or (where the reward is not learned) the reset of the critics."""
    return settings.random_steps + settings.exploration_steps


def check_segments(settings: PreferenceSection, horizon: int) -> None:
    """Raise UserInputError where no episode of `horizon` steps holds a segment: no pair would ever be labelled."""
    asks_for_pairs = settings.reward == "learn_from_preference" and settings.labels.source != "cache"
    if asks_for_pairs and settings.segment_length > horizon:
        raise UserInputError(
            f"preference.segment_length is {settings.segment_length} and episodes have at most {horizon} steps: no "
            "pair of segments could be labelled. Take shorter segments, or longer episodes."
        )


def phase(settings: PreferenceSection, step: int) -> Phase:
    """The phase of the step after `step` steps."""
    if step < settings.random_steps:
        return "random"
    return "explore" if step < first_session_step(settings) else "learn"


def next_boundary(settings: PreferenceSection, step: int, next_session: int | None) -> int:
    """The next step at which the phase changes or a session takes place; collection stops there."""
    steps = [settings.random_steps, first_session_step(settings), settings.total_steps]
    if next_session is not None:
        steps.append(next_session)
    return min(boundary for boundary in steps if boundary > step)


def session_size(settings: PreferenceSection, step: int, asked: int) -> int:
    """Pairs of a session at `step` when `asked` were asked before; 0 when `max_feedback` is reached.

    Schedule 0 is constant. With T = total steps, 1 shrinks as (T - step) / T (never below a hundredth) and 2 grows as
    T / (T - step + 1), as in B-Pref.
    """
    total = settings.total_steps
    if settings.feedback_schedule == 1:
        share = max((total - step) / total, 0.01)
    elif settings.feedback_schedule == 2:
        share = total / max(total - step + 1, 1)
    else:
        share = 1.0
    wanted = max(int(settings.session_pairs * share), 1)
    return max(min(wanted, settings.max_feedback - asked), 0)


# Finished episodes, and RL-VLM-F's CSV files `train.csv` and `eval.csv`.

# RL-VLM-F's columns; `step` is the environment step, success is 0 or 1 in train.csv and percent in eval.csv. RL-VLM-F
# writes success under two names. New columns go to the end, because a resumed run keeps its lines.
TRAIN_COLUMNS = (
    "episode", "step", "episode_reward", "true_episode_reward", "true_episode_success", "duration", "total_feedback",
    "labeled_feedback", "reward_learning_acc", "vlm_acc", "batch_reward", "critic_loss", "actor_loss", "actor_entropy",
    "actor_target_entropy", "alpha_loss", "alpha_value", "episode_success",
)  # fmt: skip
EVAL_COLUMNS = (
    "episode", "step", "episode_reward", "true_episode_reward", "success_rate",
    "success_rate_low", "success_rate_high", "success_last", "episodes", "true_episode_reward_std",
)  # fmt: skip


@dataclass(slots=True)
class _Sums:
    learned: float = 0.0
    true: float = 0.0
    success: float = 0.0
    length: int = 0


@dataclass(frozen=True, slots=True)
class FinishedEpisode:
    """Returns by the learned and by the true reward, the best success of any moment (0 or 1), and the steps.

    `number` counts the finished episodes of a run from 1, `step` is the environment step at which the episode ended.
    """

    number: int
    step: int
    learned_return: float
    true_return: float
    success: float
    length: int


class EpisodeTracker:
    """Sums rewards and steps per episode, of `num_envs` environments that step together."""

    def __init__(self, num_envs: int = 1) -> None:
        self._num_envs = num_envs
        self.finished = 0
        self._open: dict[int, _Sums] = {}
        self._returns: deque[float] = deque(maxlen=10)

    def add(self, batch: StepBatch, rewards: np.ndarray, before: int) -> list[FinishedEpisode]:
        """Add a round with the agent's rewards, `before` steps into the run; returns the episodes that ended, in
        order."""
        done = batch.terminated | batch.truncated
        turns = self._turns(batch)
        ended = []
        for row in np.argsort(turns, kind="stable").tolist():  # runners' rows come one runner after the other
            episode = int(batch.episodes[row])
            sums = self._open.setdefault(episode, _Sums())
            sums.learned += float(rewards[row])
            sums.true += float(batch.true_rewards[row])
            sums.success = max(sums.success, float(batch.successes[row]))
            sums.length += 1
            if done[row]:
                del self._open[episode]
                self.finished += 1
                self._returns.append(sums.true)
                step = before + int(turns[row]) * self._num_envs
                ended.append(FinishedEpisode(self.finished, step, sums.learned, sums.true, sums.success, sums.length))
        return ended

    def _turns(self, batch: StepBatch) -> np.ndarray:
        """int64 [n], from 1: which step of its environment in this round a row is."""
        places = batch.episodes % self._num_envs  # as `Collector` numbers episodes
        turns = np.empty(len(batch), np.int64)
        for place in np.unique(places):
            rows = places == place
            turns[rows] = np.arange(1, np.count_nonzero(rows) + 1)
        return turns

    @property
    def mean_true_return(self) -> float:
        """Over the last ten episodes; 0 before the first ends."""
        return float(np.mean(self._returns)) if self._returns else 0.0

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "finished": self.finished,
            "returns": list(self._returns),
            "open": {str(episode): asdict(sums) for episode, sums in self._open.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.finished = int(state["finished"])
        self._returns = deque(state["returns"], maxlen=10)
        self._open = {int(episode): _Sums(**sums) for episode, sums in state["open"].items()}


class StepCsv:
    """A CSV file with a `step` column, continued after a given step."""

    def __init__(self, path: Path, columns: Sequence[str], keep_until: int) -> None:
        """Rows after step `keep_until` are removed, all of them at -1."""
        self._path, self._columns = path, tuple(columns)
        lines = whole_lines(path)
        header = self._line(self._columns)
        rows = [line + b"\n" for line in lines[1:] if self._step(line) <= keep_until]
        write_atomic(path, b"".join([header, *rows]))

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row; missing columns are empty."""
        append_whole(self._path, self._line([row.get(name, "") for name in self._columns]))

    def _step(self, line: bytes) -> float:
        cells = next(csv.reader([line.decode("utf-8", "replace")]))
        try:
            return int(cells[self._columns.index("step")])
        except (IndexError, ValueError):
            return float("inf")

    @staticmethod
    def _line(cells: Sequence[Any]) -> bytes:
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerow(cells)
        return buffer.getvalue().encode()


def evaluation_row(results: Sequence[EpisodeResult], step: int, episode: int) -> dict[str, float]:
    """A row of eval.csv: success in percent, with the 95 % interval of a proportion (Wilson, 1927)."""
    best = [result.success_best for result in results]
    returns = [result.true_return for result in results]
    low, high = wilson_interval(round(sum(best)), len(best))
    return {
        "episode": episode,
        "step": step,
        "episode_reward": float(np.mean(returns)),
        "true_episode_reward": float(np.mean(returns)),
        "success_rate": 100 * float(np.mean(best)),
        "success_rate_low": 100 * low,
        "success_rate_high": 100 * high,
        "success_last": 100 * float(np.mean([result.success_last for result in results])),
        "episodes": len(results),
        "true_episode_reward_std": float(np.std(returns)),
    }


def evaluation_metrics(results: Sequence[EpisodeResult]) -> dict[str, float]:
    """Metrics of evaluation episodes for eval.jsonl and `rl-vlm eval`: shares in [0, 1], returns by the true reward."""
    row = evaluation_row(results, step=0, episode=0)
    return {
        "accuracy/success": row["success_rate"] / 100,
        "accuracy_low/success": row["success_rate_low"] / 100,
        "accuracy_high/success": row["success_rate_high"] / 100,
        "reward/success": row["true_episode_reward"],
        "evaluation/reward_std": row["true_episode_reward_std"],
        "evaluation/success_last": row["success_last"] / 100,
        "items/success": len(results),
    }
