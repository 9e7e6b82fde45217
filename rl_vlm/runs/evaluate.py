"""`rl-vlm eval`: plays held-out items with a served policy or an endpoint, keeps them one by one, sums them up."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_vlm.asking.http import HTTPEndpoint
from rl_vlm.config import PolicyConfig
from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.engines.grammars import format_matcher
from rl_vlm.envs.registry import Survey, survey
from rl_vlm.evaluation.heldout import EvaluationOptions, evaluation_tasks, identity_of, viewed_tasks
from rl_vlm.evaluation.outcome_log import OutcomeLog
from rl_vlm.evaluation.outcomes import Outcome, Side, outcomes_of
from rl_vlm.evaluation.players import EndpointPlayer, Play, check_some_are_left, play_tasks
from rl_vlm.evaluation.results import by_category, compared, info_numbers, losses, summarize
from rl_vlm.files import to_jsonable, write_atomic
from rl_vlm.models.loading import load_text_side, resolve_model
from rl_vlm.models.trained import check_trained, find_trained, is_full, read_payload
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.runs.throughput import measure_throughput
from rl_vlm.types import Split, UserInputError

if TYPE_CHECKING:
    from rl_vlm.rollout.env_runner import RolloutWorker
    from rl_vlm.serving.service import PolicyService


def run_for(config: PolicyConfig, *trained: Path | None) -> PolicyConfig:
    """The run with replicas that can serve what each folder holds, an adapter or full weights (None: the base model).
    Raises UserInputError where no replica serves them all, and for the weights of another model."""
    for folder in filter(None, trained):
        check_trained(folder, config.model.path)
    kinds = {is_full(folder) for folder in trained if folder is not None}
    if len(kinds) > 1:
        raise UserInputError(
            "One side is an adapter and the other full weights, which no replica serves both: measure each by itself."
        )
    if True in kinds and config.serving.shared:
        raise UserInputError("Replicas that are shared serve adapters only: set serving.shared=null.")
    if not kinds:
        return config
    model = config.model.model_copy(update={"train": "full" if True in kinds else "lora"})
    return config.model_copy(update={"model": model})


@contextmanager
def served_worker(config: PolicyConfig) -> Iterator[tuple[RolloutWorker, PolicyService]]:
    """Start Ray, the replicas, and a rollout worker in this process that asks them; all end with the context."""
    from rl_vlm.rollout.env_runner import RolloutWorker
    from rl_vlm.runs.ray_session import ray_cluster
    from rl_vlm.serving.service import start_service

    if config.rollout.format:
        format_matcher(load_text_side(resolve_model(config.model.path)), config.rollout.grammar)
    with ray_cluster(config):
        service = start_service(config)
        worker = RolloutWorker(config, service.run_id, service.model.folder, key=service.key)
        try:
            service.wait_until_ready()
            yield worker, service
        finally:
            worker.close_envs()
            service.stop()


def evaluate_policy_run(
    config: PolicyConfig,
    *,
    adapter: Path | None = None,
    run_dir: Path | None = None,
    out: Path | None = None,
    options: EvaluationOptions | None = None,
) -> dict[str, Any]:
    """Held-out accuracy per variant with intervals (see `summarize`), and what the options ask for.

    The adapter is named by itself or through its run's folder, or by model.adapter; without these the base model is
    measured. With `out` the results are written there as JSON, and beside it the items (`.items.jsonl`, as they are
    finished), a page (`.md`) and a figure (`.png`).
    """
    options = options or EvaluationOptions()
    adapters = _adapters(config, find_trained(adapter, run_dir), options)
    config = run_for(config, *adapters.values())
    envs = survey(config.env, *(options.split or (config.evaluation.split,)))
    tasks = _tasks(config, envs, options.blind)
    started = time.monotonic()
    path = out.with_name(f"{out.stem}.items.jsonl") if out is not None else None
    identity = identity_of(config, options, adapters, envs.sizes)
    with OutcomeLog(path, identity, resume=options.resume, overwrite=options.overwrite) as log:
        if out is not None:
            out.unlink(missing_ok=True)
        measured = _Evaluation(config, options, adapters, envs, tasks, log)
        lost: dict[str, str] = {}
        session = measured.play_missing(lost)
        check_some_are_left(log.outcomes, lost, len(tasks))
        results = dict(
            to_jsonable(
                {
                    "env": config.env.title,
                    "model": config.model.path if options.endpoint is None else options.endpoint.model,
                    "adapter": str(adapters["policy"]) if adapters["policy"] is not None else None,
                    **measured.results(),
                    **losses(lost),
                    "seconds": round(time.monotonic() - started, 2),
                    **session,
                }
            )
        )
        if out is not None:
            from rl_vlm.plots.evaluation import draw_evaluation, evaluation_page  # matplotlib takes seconds

            write_atomic(out.with_suffix(".md"), evaluation_page(results))
            draw_evaluation(results, out.with_suffix(".png"))
            write_atomic(out, json.dumps(results, indent=2) + "\n")
    return results


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
    adapters: dict[Side, Path | None] = {"policy": named or find_trained(config.model.adapter)}
    if options.against is not None:
        adapters["against"] = find_trained(None if options.against == "base" else options.against)
        if adapters["against"] == adapters["policy"]:
            raise UserInputError(f"--against {options.against} names what is measured itself: name another policy.")
    return adapters


def _tasks(config: PolicyConfig, envs: Survey, blind: bool) -> list[RolloutTask]:
    """The tasks of all splits, whose ids begin with the split. The side that plays them sets `min_version`."""
    all_tasks: list[RolloutTask] = []
    for split, sizes in envs.sizes.items():
        evaluation = config.evaluation.model_copy(update={"split": split})
        tasks = evaluation_tasks(config.model_copy(update={"evaluation": evaluation}), sizes, min_version=0)
        tasks = [replace(task, group_id=f"{split}/{task.group_id}", record=True) for task in tasks]
        all_tasks += tasks
        if blind:
            all_tasks += [*viewed_tasks(tasks, "blank"), *viewed_tasks(tasks, "swapped")]
    if not all_tasks:
        raise UserInputError(f"The {' and '.join(envs.sizes)} split of {config.env.title} holds no items.")
    return all_tasks


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """What is measured, and the outcomes so far."""

    config: PolicyConfig
    options: EvaluationOptions
    adapters: dict[Side, Path | None]
    envs: Survey
    tasks: list[RolloutTask]
    log: OutcomeLog

    def play_missing(self, lost: dict[str, str]) -> dict[str, Any]:
        """Ask what the items file does not hold, one side after the other, and measure the throughput. Returns what is
        said of this process, and adds to `lost` why items were."""
        config, options, log = self.config, self.options, self.log
        if options.benchmark_runs and config.serving.shared:
            raise UserInputError(
                "A throughput is that of replicas of one's own: set serving.shared=null, or measure none."
            )
        missing = {side: log.missing(self.tasks, side) for side in self.adapters}
        said: dict[str, Any] = {"asked": sum(map(len, missing.values())), "tokens_per_s": None}
        if not said["asked"] and not options.benchmark_runs:
            return said
        limits = {"at_once": config.evaluation.at_once, "max_losses": config.rollout.max_consecutive_failures}
        before, seconds = len(log.outcomes), 0.0
        with asyncio.Runner() as runner, self._players(runner) as (player_of, service):
            for side, todo in missing.items():
                play = player_of(side)
                began = time.monotonic()
                reasons = runner.run(play_tasks(todo, play, log.add, **limits))
                lost.update({f"{side}/{name}": reason for name, reason in reasons.items()})
                seconds += time.monotonic() - began
                if side == "policy" and options.benchmark_runs:
                    adapter, runs = self.adapters[side], options.benchmark_runs
                    measuring = measure_throughput(config, service.run_id, adapter, runs, options.compare_hf)
                    said["throughput"] = runner.run(measuring)
        if said["asked"]:
            said["tokens_per_s"] = sum(outcome.tokens for outcome in log.outcomes[before:]) / seconds
        return said

    @contextmanager
    def _players(self, runner: asyncio.Runner) -> Iterator[tuple[Callable[[Side], Play], Any]]:
        """A function that gives each side's player, which is an endpoint or the served model; and the service."""
        config, options = self.config, self.options
        if options.endpoint is None:
            with served_worker(config) as (worker, service):
                yield lambda side: self._served_player(worker, service, side), service
            return
        client = AsyncExitStack()
        asking = client.enter_async_context(HTTPEndpoint(options.endpoint).open())
        player = EndpointPlayer(config, runner.run(asking))
        try:
            yield lambda side: player.play, None
        finally:
            player.close()
            runner.run(client.aclose())

    def _served_player(self, worker: RolloutWorker, service: PolicyService, side: Side) -> Play:
        adapter, oldest = self.adapters[side], BASE_MODEL
        if adapter is not None:
            oldest = 1 + list(self.adapters).index(side)
            service.publish(read_payload(adapter, oldest))

        async def play(task: RolloutTask) -> list[Outcome] | str:
            result = await worker.run([replace(task, min_version=oldest)])
            if not result.groups:
                return next(iter(result.lost.values()))
            return outcomes_of(self.config, task, result.groups[0].trajectories, side)

        return play

    def results(self) -> dict[str, Any]:
        """The results of one split at the top; those of several each under `splits`."""
        parts = {split: self._split_results(split) for split in self.envs.sizes}
        if len(parts) == 1:
            ((split, only),) = parts.items()
            return {"split": split, **only}
        return {"split": list(parts), "splits": parts}

    def _split_results(self, split: Split) -> dict[str, Any]:
        config, other = self.config, self.adapters.get("against")
        own = [task for task in self.tasks if task.split == split]
        asked = {task.group_id for task in own}
        outcomes = [outcome for outcome in self.log.outcomes if outcome.id in asked]
        ours, key = [outcome for outcome in outcomes if outcome.side == "policy"], config.evaluation.category
        results = summarize(config, own, outcomes, self.envs.metrics)
        more: dict[str, Any] = {"categories": by_category(own, outcomes, key), "info": info_numbers(ours, key)}
        if "against" in self.adapters:
            variants = compared(own, outcomes, config.seed)
            more["against"] = {"adapter": other and str(other), "variants": variants}
        return results | {name: value for name, value in more.items() if value}
