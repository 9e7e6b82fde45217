"""`rl-vlm eval`: held-out items played by a served policy or an endpoint, kept one by one, and summed up in a report."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rl_vlm.config import PolicyConfig
from rl_vlm.envs.parts import Survey, survey
from rl_vlm.evaluation.heldout import evaluation_tasks, viewed_tasks
from rl_vlm.evaluation.identity import identity_of
from rl_vlm.evaluation.options import EvaluationOptions
from rl_vlm.evaluation.outcome_log import OutcomeLog, items_path
from rl_vlm.evaluation.outcomes import Outcome, Side
from rl_vlm.evaluation.play import EpisodesLostError, losses, play_tasks
from rl_vlm.evaluation.summary import by_category, compared, info_numbers, summarize
from rl_vlm.files import to_jsonable, write_atomic
from rl_vlm.models.trained import find_trained, is_full, trained_folder
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.runs.players import players
from rl_vlm.runs.served import run_for, starting_adapter
from rl_vlm.runs.throughput import measure_throughput
from rl_vlm.types import Split, UserInputError


@dataclass(slots=True)
class _Session:
    """What this process did, beside what the items file held already."""

    asked: int = 0
    lost: dict[str, str] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0
    throughput: dict[str, Any] | None = None


def evaluate_policy_run(
    config: PolicyConfig,
    *,
    adapter: Path | None = None,
    run_dir: Path | None = None,
    out: Path | None = None,
    options: EvaluationOptions | None = None,
) -> dict[str, Any]:
    """Held-out accuracy per variant with intervals (see `tables.summary_of`), and what the options ask for.

    The adapter is named by itself or through its run's folder, or by model.adapter; without these the base model is measured. With `out` the results
    are written there as JSON, and beside it the items (`.items.jsonl`, as they are finished), a page (`.md`) and a figure (`.png`).
    """
    options = options or EvaluationOptions()
    adapters = _adapters(config, find_trained(adapter, run_dir), options)
    config = _run_for(config, adapters)
    splits = options.split or (config.evaluation.split,)
    envs = survey(config.env, *splits)
    tasks = _tasks(config, envs, options.blind)
    started = time.monotonic()
    path = items_path(out) if out is not None else None
    identity = identity_of(config, options, adapters, envs.sizes)
    with OutcomeLog(path, identity, resume=options.resume, finished=out is not None and out.exists()) as log:
        if out is not None:
            out.unlink(missing_ok=True)
        session = _play_missing(config, options, adapters, tasks, log)
        if not log.outcomes:
            reason = next(iter(session.lost.values()), "no tasks")
            raise EpisodesLostError(f"All {len(tasks)} episodes failed, the last because of: {reason}")
        results = {
            "env": config.env.title,
            "model": config.model.path if options.endpoint is None else options.endpoint_model,
            "adapter": str(adapters["policy"]) if adapters["policy"] is not None else None,
            **_results(config, envs, tasks, log, adapters),
            "asked": session.asked,
            **losses(session.lost),
            "seconds": round(time.monotonic() - started, 2),
            "tokens_per_s": session.tokens / session.seconds if session.seconds else None,
            **({"throughput": session.throughput} if session.throughput is not None else {}),
        }
        results = dict(to_jsonable(results))
        if out is not None:
            _write(results, out)
    return results


def _write(results: dict[str, Any], out: Path) -> None:
    from rl_vlm.reporting.evaluation import draw_evaluation, evaluation_page  # matplotlib takes seconds

    write_atomic(out.with_suffix(".md"), evaluation_page(results))
    draw_evaluation(results, out.with_suffix(".png"))
    write_atomic(out, json.dumps(results, indent=2) + "\n")


def _adapters(config: PolicyConfig, named: Path | None, options: EvaluationOptions) -> dict[Side, Path | None]:
    """The adapter of each side; None is the base model."""
    if options.endpoint is not None:
        if named is not None or options.against is not None or options.benchmark_runs:
            raise UserInputError(
                "--endpoint measures a server as it is: leave out --adapter, --run-dir, --against and --benchmark-runs."
            )
        return {"policy": None}
    if options.compare_hf and not options.benchmark_runs:
        raise UserInputError("--compare-hf belongs to the throughput measurement: add --benchmark-runs 5.")
    adapters: dict[Side, Path | None] = {"policy": named or starting_adapter(config)}
    if options.against is not None:
        adapters["against"] = _other_adapter(options.against)
        if adapters["against"] == adapters["policy"]:
            raise UserInputError(f"--against {options.against} names what is measured itself: name another policy.")
    return adapters


def _run_for(config: PolicyConfig, adapters: dict[Side, Path | None]) -> PolicyConfig:
    """The run with replicas for what is measured. Raises UserInputError where its two sides need different ones."""
    kinds = {is_full(folder): folder for folder in adapters.values() if folder is not None}
    if len(kinds) > 1:
        raise UserInputError(
            "One side is an adapter and the other full weights, which no replica serves both: measure each by itself."
        )
    if kinds.get(True) and config.serving.shared:
        raise UserInputError("Replicas that are shared serve adapters only: set serving.shared=null.")
    return run_for(config, next(iter(kinds.values()))) if kinds else config


def _other_adapter(name: str) -> Path | None:
    if name == "base":
        return None
    folder = Path(name)
    return trained_folder(folder) or find_trained(folder, None)


def _tasks(config: PolicyConfig, envs: Survey, blind: bool) -> list[RolloutTask]:
    """The tasks of all splits, whose ids begin with the split. The side that plays them sets `min_version`."""
    found: list[RolloutTask] = []
    for split, sizes in envs.sizes.items():
        evaluation = config.evaluation.model_copy(update={"split": split})
        tasks = evaluation_tasks(config.model_copy(update={"evaluation": evaluation}), sizes, min_version=0)
        tasks = [replace(task, group_id=f"{split}/{task.group_id}") for task in tasks]
        found += tasks
        if blind:
            found += [*viewed_tasks(tasks, "blank"), *viewed_tasks(tasks, "swapped")]
    if not found:
        raise UserInputError(f"The {' and '.join(envs.sizes)} split of {config.env.title} holds no items.")
    return found


def _play_missing(
    config: PolicyConfig,
    options: EvaluationOptions,
    adapters: dict[Side, Path | None],
    tasks: Sequence[RolloutTask],
    log: OutcomeLog,
) -> _Session:
    """Ask what the items file does not hold, one side after the other, and measure the throughput."""
    if options.benchmark_runs and config.serving.shared:
        raise UserInputError("A throughput is that of replicas of one's own: set serving.shared=null, or measure none.")
    session = _Session()
    missing = {side: log.missing(tasks, side) for side in adapters}
    if not any(missing.values()) and not options.benchmark_runs:
        return session
    with players(config, options, adapters) as found:
        for side, todo in missing.items():
            play = found.play_as(side)
            began = time.monotonic()

            def keep(outcomes: list[Outcome]) -> None:
                session.tokens += sum(one.tokens for one in outcomes)
                log.add(outcomes)

            settings = {"at_once": config.evaluation.at_once, "max_losses": config.rollout.max_consecutive_failures}
            lost = found.runner.run(play_tasks(todo, play, keep, **settings))
            session.lost.update({f"{side}/{name}": reason for name, reason in lost.items()})
            session.asked += len(todo)
            session.seconds += time.monotonic() - began
            if side == "policy" and options.benchmark_runs and found.served is not None:
                session.throughput = found.runner.run(
                    measure_throughput(
                        config,
                        found.served.run_id,
                        adapters["policy"],
                        runs=options.benchmark_runs,
                        compare_hf=options.compare_hf,
                    )
                )
    return session


def _results(
    config: PolicyConfig,
    envs: Survey,
    tasks: Sequence[RolloutTask],
    log: OutcomeLog,
    adapters: dict[Side, Path | None],
) -> dict[str, Any]:
    """The figures of one split at the top; those of several each under `splits`."""
    parts = {split: _split_results(config, split, envs, tasks, log, adapters) for split in envs.sizes}
    if len(parts) == 1:
        ((split, figures),) = parts.items()
        return {"split": split, **figures}
    return {"split": list(parts), "splits": parts}


def _split_results(
    config: PolicyConfig,
    split: Split,
    envs: Survey,
    tasks: Sequence[RolloutTask],
    log: OutcomeLog,
    adapters: dict[Side, Path | None],
) -> dict[str, Any]:
    own = [task for task in tasks if task.split == split]
    asked = {task.group_id for task in own}
    found = [one for one in log.outcomes if one.id in asked]
    ours = [one for one in found if one.side == "policy"]
    key = config.evaluation.category
    results = summarize(config, own, found, envs.metrics)
    tables, unnamed = by_category(own, found, key)
    more: dict[str, Any] = {"categories": tables, "categories_lost": unnamed, "info": info_numbers(ours, key)}
    if "against" in adapters:
        more["against"] = {
            "adapter": adapters["against"] and str(adapters["against"]),
            "variants": compared(own, found, config.seed),
        }
    return results | {name: value for name, value in more.items() if value}
