"""Outcome: what an evaluation keeps of one finished episode, the file of them, and the results computed from it."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self, get_args

import numpy as np
from pydantic import ConfigDict, TypeAdapter

from rl_vlm.config import PolicyConfig
from rl_vlm.files import append_whole, open_own, to_jsonable, whole_lines
from rl_vlm.rollout.episodes import Conversation
from rl_vlm.rollout.metrics import Metrics, declared_metrics, judge_metrics
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.statistics import bootstrap_interval, mcnemar_p_value, pass_at_k, wilson_interval
from rl_vlm.types import Trajectory, TrajectoryGroup, UserInputError

Side = Literal["policy", "against"]
Kind = Literal["greedy", "sampled"]
LOST = "lost"  # the status of an item without an outcome, in tables


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished episode. Its attributes are the columns of the items file.

    `id` names the item within a side and `sample` the episode of a sampled item. `env` is the environment's id, in a
    mixture its name, which `variant` then begins with. `info` holds the environment's numbers at the end, and the
    item's category as text. `answers` holds the policy's texts, turn by turn; files of earlier versions lack it.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    side: Side
    id: str
    sample: int
    env: str
    split: str
    variant: str
    kind: Kind
    view: str
    index: int
    correct: bool
    reward: float
    turns: int
    tokens: int
    status: str
    info: dict[str, Any] = field(default_factory=dict)
    answers: list[str] = field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        """Whether it belongs to the main results: greedy and with the true images."""
        return self.kind == "greedy" and self.view == "true"


def label(env: str, variant: str) -> str:
    """The name of results: the variant, in a mixture after the environment's name."""
    if not env:
        return variant
    return env if variant == "default" else f"{env}/{variant}"


def new_outcome(task: RolloutTask, side: Side, sample: int, **measured: Any) -> Outcome:
    """An outcome whose place is the task's; `measured` holds the rest."""
    return Outcome(
        side=side,
        id=task.group_id,
        sample=sample,
        split=task.split,
        variant=label(task.env, task.variant),
        kind="greedy" if task.temperature == 0 else "sampled",
        view=task.view,
        index=task.index,
        **measured,
    )


def outcomes_of(
    config: PolicyConfig, task: RolloutTask, episodes: Iterable[Trajectory | Conversation], side: Side = "policy"
) -> list[Outcome]:
    return [
        new_outcome(
            task,
            side,
            sample,
            env=task.env or config.env.id,
            correct=episode.correct,
            reward=episode.reward,
            turns=episode.num_turns,
            tokens=episode.num_sampled,
            status=episode.status.value,
            info=kept_info(episode.info, config.evaluation.category),
            answers=answers_of(episode),
        )
        for sample, episode in enumerate(episodes)
    ]


def outcomes_of_groups(
    config: PolicyConfig, tasks: Iterable[RolloutTask], groups: Iterable[TrajectoryGroup]
) -> list[Outcome]:
    """What is kept of all groups; tasks whose group was lost have no outcome."""
    found = {group.group_id: group.trajectories for group in groups}
    return [one for task in tasks for one in outcomes_of(config, task, found.get(task.group_id, ()))]


def answers_of(episode: Trajectory | Conversation) -> list[str]:
    """The policy's texts, turn by turn; none where the conversation was not recorded."""
    said = [message.text for message in episode.messages if message.role == "assistant"]
    return list(to_jsonable(said[max(len(said) - episode.num_turns, 0) :]))  # a prompt may hold earlier ones


def kept_info(info: dict[str, Any], category: str) -> dict[str, Any]:
    """The numbers of an environment's info, and the value of its key `category`, which may be text."""
    return {
        key: value
        for key, value in to_jsonable(info).items()
        if isinstance(value, bool | int | float) or (key == category and isinstance(value, str))
    }


_OUTCOME = TypeAdapter(Outcome)


class OutcomeLog:
    """Outcomes in memory, and in a file where one is given, which no other process may be writing.

    The file's first line says what is measured (`identity_of`); later ones are outcomes, each written when its item is
    finished. A line that was cut short by a kill is dropped, and an item of which only some samples are there is asked
    again. A file that holds outcomes needs `resume` or `overwrite`.
    """

    def __init__(
        self, path: Path | None, identity: Mapping[str, Any], *, resume: bool = False, overwrite: bool = False
    ) -> None:
        self._path = path
        self._found: dict[tuple[Side, str, int], Outcome] = {}
        with ExitStack() as opened:
            if path is not None:
                file = opened.enter_context(open_own(path))
                self._open(path, file, dict(to_jsonable(identity)), resume, overwrite)
            self._opened = opened.pop_all()

    def _open(self, path: Path, file: BinaryIO, identity: dict[str, Any], resume: bool, overwrite: bool) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserInputError(
                f"Another evaluation is writing {path}: wait for its end, or choose another --out."
            ) from error
        lines = whole_lines(path)
        if resume and lines:
            try:
                known = dict(json.loads(lines[0]))
                for key in sorted(known.keys() | identity.keys()):
                    before, now = (json.dumps(values.get(key)) for values in (known, identity))
                    if before != now:
                        raise UserInputError(
                            f"{path} was measured with {key} {before[:80]}, and this evaluation has {now[:80]}: repeat "
                            "the former command with --resume, or choose another --out."
                        )
                self._remember([_OUTCOME.validate_json(line) for line in lines[1:]])
            except (ValueError, TypeError) as error:
                raise UserInputError(
                    f"{path} is no items file of an evaluation by this version: remove it, or choose another --out."
                ) from error
            file.truncate(sum(len(line) + 1 for line in lines))  # what a kill left of a line
            return
        if len(lines) > 1 and not overwrite:
            raise UserInputError(
                f"{path} holds {len(lines) - 1} outcomes of an evaluation: add --resume to go on with it, or "
                "--overwrite to begin again."
            )
        file.truncate(0)
        append_whole(path, json.dumps(identity).encode() + b"\n")

    @property
    def outcomes(self) -> list[Outcome]:
        return list(self._found.values())

    def _remember(self, outcomes: Sequence[Outcome]) -> None:
        self._found.update({(outcome.side, outcome.id, outcome.sample): outcome for outcome in outcomes})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the outcomes of one finished item: in the file when this returns."""
        self._remember(outcomes)
        if self._path is not None:
            append_whole(self._path, b"".join(_OUTCOME.dump_json(outcome) + b"\n" for outcome in outcomes))

    def missing(self, tasks: Sequence[RolloutTask], side: Side) -> list[RolloutTask]:
        """The tasks that are not finished. Outcomes of an item whose samples are incomplete are forgotten."""
        left = []
        for task in tasks:
            keys = [(side, task.group_id, sample) for sample in range(task.size)]
            if not all(key in self._found for key in keys):
                left.append(task)
                for key in keys:
                    self._found.pop(key, None)
        return left


_Items = Mapping[str, list[Outcome]]  # of one side, by id


def _by_item(tasks: Sequence[RolloutTask], outcomes: Iterable[Outcome], side: Side) -> dict[str, list[Outcome]]:
    """The outcomes of each task; one that is lost has a single outcome, which is wrong and unrewarded."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.side == side:
            found.setdefault(outcome.id, []).append(outcome)
    lost = {"correct": False, "reward": 0.0, "turns": 0, "tokens": 0, "status": LOST}
    return {
        task.group_id: found.get(task.group_id) or [new_outcome(task, side, 0, env=task.env, **lost)] for task in tasks
    }


def summarize(
    config: PolicyConfig,
    tasks: Sequence[RolloutTask],
    outcomes: Sequence[Outcome],
    metrics: Mapping[str, Metrics] | None = None,
) -> dict[str, Any]:
    """Accuracy and mean reward per variant, with 95 % intervals.

    Keys: `accuracy/<variant>`, `accuracy_low/<variant>`, `accuracy_high/<variant>`, the same of `reward`,
    `items/<variant>`, and `pass@k/<variant>` for k = 1, 2, 4, ... and the samples. With a mixture these are over all
    its environments, and each has its own as well: `accuracy/<name>`, for further variants `accuracy/<name>/<variant>`.
    `env/<metric>/<variant or name>` are the `metrics` that each environment declares, over greedy episodes that were
    not lost.
    """
    items, results = _by_item(tasks, outcomes, "policy"), dict[str, Any]()
    for variant in config.evaluation.variants:
        for env in ("", *(part.name for part in config.env.mixture)):
            own = [t for t in tasks if t.variant == variant and t.view == "true" and env in ("", t.env)]
            results |= _summary(label(env, variant), config, own, items, (metrics or {}).get(env, {}))
    return results | _without_sight(tasks, items, config.seed)


def _summary(
    name: str, config: PolicyConfig, tasks: Sequence[RolloutTask], items: _Items, metrics: Metrics
) -> dict[str, Any]:
    greedy = [items[task.group_id][0] for task in tasks if task.temperature == 0]
    answered, samples = [outcome for outcome in greedy if outcome.status != LOST], config.evaluation.samples
    results = {
        **_share("accuracy", sum(outcome.correct for outcome in greedy), len(greedy)),
        **_mean("reward", (outcome.reward for outcome in greedy), config.seed),
        "turns": float(np.mean([outcome.turns for outcome in answered])) if answered else 0.0,
        "items": len(greedy),
        **declared_metrics(metrics, [one.info for one in answered]),
        **judge_metrics(one.info for one in answered),
    }
    counts = [sum(one.correct for one in items[task.group_id]) for task in tasks if task.temperature > 0]
    if counts:
        for k in sorted({2**power for power in range(samples.bit_length())} | {samples}):
            results[f"pass@{k}"] = pass_at_k(np.array(counts), samples, k)
    return {f"{key}/{name}": value for key, value in results.items()}


def _share(name: str, right: int, items: int) -> dict[str, float]:
    low, high = wilson_interval(right, items)
    return {name: right / max(items, 1), f"{name}_low": low, f"{name}_high": high}


def _mean(name: str, values: Iterable[float], seed: int) -> dict[str, float]:
    numbers = np.array(list(values), dtype=float)
    low, high = bootstrap_interval(numbers, seed)
    return {name: float(numbers.mean()) if len(numbers) else 0.0, f"{name}_low": low, f"{name}_high": high}


def _without_sight(tasks: Sequence[RolloutTask], items: _Items, seed: int) -> dict[str, float]:
    """Accuracy with other images, `sight/accuracy_<view>`, and what the true ones gain over blank ones on the same
    items, `sight/accuracy_gap`, with its bootstrap interval."""
    results: dict[str, float] = {}
    for view in ("blank", "swapped"):
        names = [task.group_id for task in tasks if task.view == view]
        if names:
            unseen = np.array([items[name][0].correct for name in names], dtype=float)
            results[f"sight/accuracy_{view}"] = float(unseen.mean())
        if names and view == "blank":
            seen = [items[name.removesuffix(f"/{view}")][0].correct for name in names]
            results |= _mean("sight/accuracy_gap", np.array(seen, dtype=float) - unseen, seed)
    return results


def _asked(tasks: Sequence[RolloutTask], outcomes: Sequence[Outcome], side: Side) -> list[Outcome]:
    """Each item's outcome in the main results."""
    return [items[0] for items in _by_item(tasks, outcomes, side).values() if items[0].is_plain]


def by_category(
    tasks: Sequence[RolloutTask], outcomes: Sequence[Outcome], key: str
) -> dict[str, dict[str, dict[str, Any]]]:
    """Per variant and category of the policy: items, accuracy with its Wilson interval, and mean reward. An environment
    names an item's category when it is played, so lost items are a category of their own."""
    members: dict[str, dict[str, list[Outcome]]] = {}
    for outcome in _asked(tasks, outcomes, "policy"):
        category = str(outcome.info.get(key, outcome.status))
        if key in outcome.info or outcome.status == LOST:
            members.setdefault(outcome.variant, {}).setdefault(category, []).append(outcome)
    return {
        variant: {
            name: {
                "items": len(found),
                **_share("accuracy", sum(outcome.correct for outcome in found), len(found)),
                "reward": float(np.mean([outcome.reward for outcome in found])),
            }
            for name, found in sorted(categories.items())
        }
        for variant, categories in members.items()
        if set(categories) != {LOST}
    }


def info_numbers(outcomes: Sequence[Outcome], key: str) -> dict[str, dict[str, dict[str, float]]]:
    """Per variant and key of the info: how many items have it, and their mean, median (p50) and 90th percentile."""
    columns: dict[str, dict[str, list[float]]] = {}
    for outcome in outcomes:
        for name, value in outcome.info.items() if outcome.is_plain else ():
            if not isinstance(value, str) and name not in (key, "correct", "index"):
                columns.setdefault(outcome.variant, {}).setdefault(name, []).append(float(value))
    return {
        variant: {
            name: {
                "items": len(values),
                "mean": float(np.mean(values)),
                "p50": float(np.median(values)),
                "p90": float(np.quantile(values, 0.9)),
            }
            for name, values in sorted(names.items())
        }
        for variant, names in columns.items()
    }


def compared(tasks: Sequence[RolloutTask], outcomes: Sequence[Outcome], seed: int) -> dict[str, dict[str, Any]]:
    """Per variant: the policy against the other one on the same items, and the policy's minus the other's, with
    bootstrap intervals over items; `p_value` is McNemar's, from the items that only one of them got right."""
    pairs: dict[str, list[tuple[Outcome, Outcome]]] = {}
    for ours, theirs in zip(*(_asked(tasks, outcomes, side) for side in get_args(Side)), strict=True):
        pairs.setdefault(ours.variant, []).append((ours, theirs))
    return {variant: _comparison(of_variant, seed) for variant, of_variant in pairs.items()}


def _comparison(pairs: Sequence[tuple[Outcome, Outcome]], seed: int) -> dict[str, Any]:
    right = np.array([[outcome.correct for outcome in pair] for pair in pairs], dtype=float).T
    rewards = np.array([[outcome.reward for outcome in pair] for pair in pairs], dtype=float).T
    only_policy, only_against = int((right[0] > right[1]).sum()), int((right[0] < right[1]).sum())
    return {
        "items": len(pairs),
        **_share("accuracy", int(right[0].sum()), len(pairs)),
        **_share("accuracy_against", int(right[1].sum()), len(pairs)),
        **_mean("reward", rewards[0], seed),
        **_mean("reward_against", rewards[1], seed),
        **_mean("accuracy_difference", right[0] - right[1], seed),
        **_mean("reward_difference", rewards[0] - rewards[1], seed),
        "only_policy": only_policy,
        "only_against": only_against,
        "p_value": mcnemar_p_value(only_policy, only_against),
    }
