"""`rl-vlm eval` and `rl-vlm rollout`: episodes of a policy through Ray Serve, without a learner."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rl_vlm.config import RunConfig
from rl_vlm.envs.parts import declared_metrics, split_sizes
from rl_vlm.evaluation.heldout import evaluation_tasks, summarize, viewed_tasks
from rl_vlm.files import write_atomic
from rl_vlm.models.adapter import AdapterPayload, find_adapter
from rl_vlm.models.initial_adapter import initial_adapter_folder
from rl_vlm.models.loading import resolve_model
from rl_vlm.rollout.tasks import RolloutResult, RolloutTask
from rl_vlm.seeding import derive_seed
from rl_vlm.types import RLVLMError, TrajectoryGroup


class EpisodesLostError(RLVLMError):
    """No episode could be finished."""


def starting_adapter(run: RunConfig) -> Path | None:
    """The adapter folder that `model.adapter` names, if it names one."""
    return initial_adapter_folder(run.model) if run.model.adapter is not None else None


@contextmanager
def served_worker(run: RunConfig, adapter: Path | None) -> Iterator[Any]:
    """A rollout worker in this process, with the model (and an adapter) behind Ray Serve."""
    import tempfile

    from rl_vlm.rollout.worker import RolloutWorker
    from rl_vlm.runs.cluster import ray_cluster
    from rl_vlm.serving.publisher import PolicyService

    model = resolve_model(run.model.path)
    payload = AdapterPayload.read(adapter, version=1) if adapter is not None else None
    run_id = f"{run.name}-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory(prefix="rl-vlm-") as scratch, ray_cluster(run):
        service = PolicyService(run, run_id, model, Path(scratch))
        try:
            service.wait_until_ready()
            if payload is not None:
                service.publish(payload)
            yield RolloutWorker(run, run_id, model)
        finally:
            service.stop()


def _run_tasks(run: RunConfig, adapter: Path | None, tasks: list[RolloutTask], batch: int) -> RolloutResult:
    """Run the tasks, `batch` at a time."""
    merged = RolloutResult()
    with served_worker(run, adapter) as worker:
        loop = asyncio.new_event_loop()
        for start in range(0, len(tasks), batch):
            part: RolloutResult = loop.run_until_complete(worker.run(tasks[start : start + batch]))
            merged.groups.extend(part.groups)
            merged.lost.update(part.lost)
            merged.timings["sample"] = merged.timings.get("sample", 0.0) + part.timings["sample"]
        worker.close_envs()
        loop.close()
    if not merged.groups:
        reason = next(iter(merged.lost.values()), "no tasks")
        raise EpisodesLostError(f"All {len(tasks)} episodes failed, the last because of: {reason}")
    return merged


def evaluate_policy_run(
    run: RunConfig,
    *,
    adapter: Path | None = None,
    run_dir: Path | None = None,
    out: Path | None = None,
    blind: bool = False,
) -> dict[str, Any]:
    """Held-out accuracy per variant with intervals (see `heldout.summarize`); written to `out` as JSON if given.

    The adapter is named by itself or through its run's folder, or by model.adapter; without these the base model is measured.
    `blind` asks about all items of the first variant again with blank images, and with those of the next item.
    """
    adapter = find_adapter(adapter, run_dir) or starting_adapter(run)
    sizes = split_sizes(run.env, run.evaluation.split)
    started = time.monotonic()
    tasks = evaluation_tasks(run, sizes, min_version=1 if adapter is not None else 0)
    if blind:
        tasks += [*viewed_tasks(tasks, "blank"), *viewed_tasks(tasks, "swapped")]
    result = _run_tasks(run, adapter, tasks, batch=len(tasks))
    summary = {
        "env": run.env.title,
        "model": run.model.path,
        "adapter": str(adapter) if adapter is not None else None,
        "split": run.evaluation.split,
        **summarize(run, tasks, result.groups, declared_metrics(run.env)),
        "lost": len(result.lost),
        "seconds": round(time.monotonic() - started, 2),
        "tokens_per_s": _tokens(result.groups) / max(result.timings["sample"], 1e-9),
    }
    if out is not None:
        write_atomic(out, json.dumps(summary, indent=2) + "\n")
    return summary


def rollout(
    run: RunConfig,
    adapter: Path | None = None,
    *,
    episodes: int = 4,
    sampling: dict[str, Any] | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Play episodes of the training split; one JSON line each (to `out`, else printed); returns a summary.

    `sampling`: temperature, top_p, top_k, max_new_tokens, seed, batch_size; what is absent is as in training.
    """
    options = dict(sampling or {})
    adapter = adapter or starting_adapter(run)
    batch = options.get("batch_size", episodes)
    seed = options.get("seed", run.seed)
    changes: dict[str, Any] = {}
    if "max_new_tokens" in options:
        changes["max_new_tokens_per_turn"] = options["max_new_tokens"]
    run = run.model_copy(update={"rollout": run.rollout.model_copy(update=changes)})
    sizes = split_sizes(run.env, "train")
    names = [name for name, _ in zip(itertools.cycle(sizes), range(episodes), strict=False)]
    order = np.random.default_rng(seed).integers(0, [sizes[name] or 2**31 - 1 for name in names])
    template = RolloutTask(
        group_id="",
        index=0,
        split="train",
        seed=0,
        sampling_seed=0,
        size=1,
        temperature=options.get("temperature", run.rollout.temperature),
        min_version=1 if adapter is not None else 0,
        top_p=options.get("top_p", 1.0),
        top_k=options.get("top_k", 0),
        record=True,
    )
    tasks = [
        replace(
            template,
            group_id=f"episode-{number:06d}",
            index=int(index),
            seed=derive_seed(seed, 2, int(index)),
            sampling_seed=derive_seed(seed, 6, number),
            env=name,
        )
        for number, (index, name) in enumerate(zip(order, names, strict=True))
    ]
    result = _run_tasks(run, adapter, tasks, batch)
    lines = [json.dumps(_line(group), ensure_ascii=False) for group in result.groups]
    if out is not None:
        write_atomic(out, "\n".join(lines) + "\n")
    else:
        print("\n".join(lines))
    trajectories = [group.trajectories[0] for group in result.groups]
    return {
        "episodes": len(trajectories),
        "lost": len(result.lost),
        "reward_mean": float(np.mean([trajectory.reward for trajectory in trajectories])),
        "correct": float(np.mean([trajectory.correct for trajectory in trajectories])),
        "turns_mean": float(np.mean([len(trajectory.turns) for trajectory in trajectories])),
        "tokens": _tokens(result.groups),
        "tokens_per_s": _tokens(result.groups) / max(result.timings["sample"], 1e-9),
    }


def _tokens(groups: list[TrajectoryGroup]) -> int:
    return sum(trajectory.num_sampled for group in groups for trajectory in group.trajectories)


def _line(group: TrajectoryGroup) -> dict[str, Any]:
    (trajectory,) = group.trajectories
    responses = [message.text for message in trajectory.messages if message.role == "assistant"]
    return {
        "episode": trajectory.trajectory_id,
        **({"env": group.env} if group.env else {}),
        "index": group.index,
        "reward": trajectory.reward,
        "correct": trajectory.correct,
        "status": trajectory.status.value,
        "turns": len(trajectory.turns),
        "tokens": trajectory.num_sampled,
        "responses": responses,
        "info": trajectory.info,
    }
