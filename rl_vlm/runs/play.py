"""`rl-vlm rollout`: episodes of a policy through Ray Serve, without a learner."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from rl_vlm.config import PolicyConfig
from rl_vlm.envs.registry import survey
from rl_vlm.evaluation.players import check_some_are_left
from rl_vlm.evaluation.results import losses
from rl_vlm.files import to_jsonable, write_atomic
from rl_vlm.models.trained import find_trained, read_payload
from rl_vlm.rollout.tasks import RolloutResult, RolloutTask, merged
from rl_vlm.runs.evaluate import run_for, served_worker
from rl_vlm.safe_text import printable_json
from rl_vlm.seeding import derive_seed
from rl_vlm.supervised.example import write_kept
from rl_vlm.types import Trajectory, TrajectoryGroup


def rollout(
    config: PolicyConfig,
    adapter: Path | None = None,
    *,
    episodes: int = 4,
    sampling: dict[str, Any] | None = None,
    out: Path | None = None,
    show: Callable[[Trajectory], None] | None = None,
    keep: Path | None = None,
    least: float = 1.0,
) -> dict[str, Any]:
    """Play episodes of the training split; one JSON line each (to `out`, else printed, unless `show` is given each
    episode); returns a summary. `keep`: a folder for the conversations of episodes with at least the reward `least`, as
    data of `rl-vlm sft`. `sampling`: temperature, top_p, top_k, max_new_tokens, seed, batch_size; what is absent
    is as in training."""
    options = dict(sampling or {})
    adapter = adapter or find_trained(config.model.adapter)
    config = run_for(config, adapter)
    seed = options.get("seed", config.seed)
    if "max_new_tokens" in options:
        config = config.model_copy(update={"rollout": config.rollout.with_turns_of(options["max_new_tokens"])})
    with redirect_stdout(sys.stderr):  # what the environment prints: on stdout there are JSON lines only
        sizes = survey(config.env, "train").sizes["train"]
    names = [name for name, _ in zip(itertools.cycle(sizes), range(episodes), strict=False)]
    order = np.random.default_rng(seed).integers(0, [sizes[name] or 2**31 - 1 for name in names])
    tasks = [
        RolloutTask(
            group_id=f"episode-{number:06d}",
            index=int(index),
            split="train",
            seed=derive_seed(seed, 2, int(index)),
            sampling_seed=derive_seed(seed, 6, number),
            size=1,
            temperature=options.get("temperature", config.rollout.temperature),
            min_version=1 if adapter is not None else 0,
            top_p=options.get("top_p", 1.0),
            top_k=options.get("top_k", 0),
            record=True,
            env=name,
        )
        for number, (index, name) in enumerate(zip(order, names, strict=True))
    ]
    with redirect_stdout(sys.stderr):
        result = _run_tasks(config, adapter, tasks, options.get("batch_size", episodes))
    lines = [json.dumps(to_jsonable(_line(group)), ensure_ascii=False) for group in result.groups]
    if out is not None:
        write_atomic(out, "\n".join(lines) + "\n")
    trajectories = [group.trajectories[0] for group in result.groups]
    if show is not None:
        for trajectory in trajectories:
            show(trajectory)
    elif out is None:
        print(printable_json("\n".join(lines)))
    kept = {} if keep is None else {"kept": write_kept(keep, trajectories, least)}
    tokens = sum(trajectory.num_sampled for trajectory in trajectories)
    return {
        "episodes": len(trajectories),
        **losses(result.lost),
        **kept,
        "reward_mean": float(np.mean([trajectory.reward for trajectory in trajectories])),
        "correct": float(np.mean([trajectory.correct for trajectory in trajectories])),
        "turns_mean": float(np.mean([trajectory.num_turns for trajectory in trajectories])),
        "tokens": tokens,
        "tokens_per_s": tokens / max(result.seconds, 1e-9),
    }


def _line(group: TrajectoryGroup) -> dict[str, Any]:
    (trajectory,) = group.trajectories
    return {
        "episode": trajectory.trajectory_id,
        **({"env": group.env} if group.env else {}),
        "index": group.index,
        "reward": trajectory.reward,
        "correct": trajectory.correct,
        "status": trajectory.status.value,
        "turns": trajectory.num_turns,
        "tokens": trajectory.num_sampled,
        "responses": [message.text for message in trajectory.messages if message.role == "assistant"],
        "info": trajectory.info,
    }


def _run_tasks(config: PolicyConfig, adapter: Path | None, tasks: list[RolloutTask], batch: int) -> RolloutResult:
    with served_worker(config) as (worker, service), asyncio.Runner() as loop:
        if adapter is not None:
            service.publish(read_payload(adapter, version=1))
        parts = [loop.run(worker.run(tasks[start : start + batch])) for start in range(0, len(tasks), batch)]
        result = merged(parts)
    check_some_are_left(result.groups, result.lost, len(tasks))
    return result
