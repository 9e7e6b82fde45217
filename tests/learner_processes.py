"""Learners as plain processes that talk through gloo, for tests of how they share an update; without Ray."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from core_support import conversation, picture, plan_update, randomize, run_config, text_side
from ports import free_ports

from rl_vlm.learning.optimizer import make_optimizer
from rl_vlm.learning.plan import UpdateStats
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.update import PolicyUpdater, make_strategy
from rl_vlm.types import TrajectoryGroup

TIMEOUT_S = 300.0
LR = 1e-3


@dataclass
class Learned:
    """The first learner's adapter (or all its weights), moments and figures after some updates, and the micro-batches of each learner and step."""

    adapter: dict[str, np.ndarray]
    moments: dict[str, np.ndarray]
    norms: list[float]
    tokens: float
    scores: list[np.ndarray]  # log-probabilities of one trajectory after the last update
    passes: list[list[tuple[int, int]]] = field(default_factory=list)  # (all, those that count)
    held: list[int] = field(default_factory=list)  # weights of the frozen layers in each process
    skipped: int = 0  # steps
    grown: list[float] = field(
        default_factory=list
    )  # MiB of memory of its own that each process took for the prepared policy
    kept: list[int] = field(default_factory=list)  # numbers that each process has of what is trained, and of moments


def learn(
    folder: Path,
    learners: int,
    updates: Sequence[int],
    start: Learned | None = None,
    poisoned: int | None = None,
    **dotted: Any,
) -> Learned:
    """Updates of these numbers in that many processes, from a random adapter or from where another group ended.

    In the optimiser step of the number `poisoned` the first learner's loss is not a number.
    """
    dotted = {
        "learner__num_learners": learners,
        "learner__lr": LR,
        "learner__micro_batch_tokens": 300,
        "algorithm__minibatches": 2,
        "algorithm__kl_coef": 0.01,
        **dotted,
    }
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["learner_processes"])
    (port,) = free_ports(1)
    pipes, processes = [], []
    for rank in range(learners):
        ours, theirs = context.Pipe(duplex=False)
        given = (theirs, rank, learners, port, folder, dotted, list(updates), start, poisoned)
        process = context.Process(target=_learner, args=given, daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        results = [_answer(pipe) for pipe in pipes]
    finally:
        for process in processes:
            process.terminate()
            process.join()
    first = results[0]
    for other in results[1:]:
        for name, tensor in other.adapter.items():
            np.testing.assert_array_equal(first.adapter[name], tensor, err_msg=f"learners differ: {name}")
    first.passes = [result.passes[0] for result in results]
    first.held = [result.held[0] for result in results]
    first.grown = [result.grown[0] for result in results]
    first.kept = [result.kept[0] for result in results]
    return first


def _answer(pipe: Connection) -> Learned:
    assert wait([pipe], TIMEOUT_S), "a learner did not answer in time"
    answer = pipe.recv()  # raises EOFError when the process died
    if isinstance(answer, str):
        raise AssertionError(answer)
    return answer  # type: ignore[no-any-return]


def groups(folder: Path, seed: int) -> list[TrajectoryGroup]:
    """Five groups of very unequal length, one with two turns; behaviour as if drawn by another policy."""
    text, rng = text_side(folder), np.random.default_rng(seed)
    made = []
    for number, size in enumerate((2, 4, 3, 1, 2, 3)):
        prompt, later = (
            [picture(rng, 64 * (1 + number % 2), 64), f"Number {number}?"],
            [["And " + "now " * number + "?"]],
        )
        members = []
        for k in range(size):
            replies = [int(rng.integers(2, 9))] + ([int(rng.integers(2, 5))] if number == 1 else [])
            members.append(conversation(text, rng, prompt, replies, later, name=f"{number}:{k}"))
        made.append(TrajectoryGroup(str(number), number, members))
    return made


def _learner(pipe: Connection, *given: Any) -> None:
    import traceback

    try:
        pipe.send(_learned(*given))
    except Exception:
        pipe.send(f"learner {given[0]}: {traceback.format_exc()}")


def _learned(
    rank: int,
    learners: int,
    port: int,
    folder: Path,
    dotted: dict[str, Any],
    updates: list[int],
    start: Learned | None,
    poisoned: int | None,
) -> Learned:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", timedelta(seconds=TIMEOUT_S), learners, rank
    )
    run = run_config(folder, **dotted)
    before = _own_memory()
    policy = PolicyModel(folder, run)
    if run.model.train == "lora":  # whose own B is zero
        randomize(policy, 1, 0.05)
    updater = PolicyUpdater(policy, run)
    optimizer = make_optimizer(policy, run)
    strategy = make_strategy(run.learner, policy, optimizer)
    grown = _own_memory() - before
    if start is not None:
        policy.trained.load({name: torch.from_numpy(array) for name, array in start.adapter.items()})
        strategy.restore({name: torch.from_numpy(array) for name, array in start.moments.items()})
    stats, passes = UpdateStats(), []
    norms: list[float] = []
    for number in updates:
        plan = plan_update(groups(folder, number), run.algorithm, np.random.default_rng(number), num_learners=learners)
        packed = updater.pack(plan.batches[rank])
        passes += [(len(step), sum(micro.counts for micro in step)) for step in packed]
        for micro_batches, active in zip(packed, plan.active, strict=True):
            if active:
                bad = poisoned == len(norms) + stats["policy/skipped_steps"] and rank == 0
                before = stats["policy/grad_norm"]
                if bad:
                    micro_batches[0].weight *= np.float32("nan")
                if updater.step(strategy, micro_batches, run.learner.max_grad_norm, stats):
                    norms.append(stats["policy/grad_norm"] - before)
    moments = {name: tensor.numpy() for name, tensor in strategy.state().items()}
    trajectory, payload = groups(folder, 99)[0].trajectories[0], policy.payload(1)
    whole = payload.state() if payload.tensors else {}  # of shards the first learner alone has all
    return Learned(
        {name: tensor.numpy() for name, tensor in whole.items()},
        moments,
        norms,
        stats["tokens"],
        updater.recompute([trajectory]),
        [passes],
        [_held(policy)],
        stats["policy/skipped_steps"],
        [grown],
        [sum(one.numel() + sum(x.numel() for x in optimizer.state[one].values()) for one in policy.parameters)],
    )


def _own_memory() -> float:
    """MiB that are neither of a mapped file nor shared."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024


def _held(policy: PolicyModel) -> int:
    """Frozen weights of the decoder's layers that this process holds, counted in the tensors' memory."""
    total = 0
    for parameter in policy.model.model.language_model.layers.parameters():
        if not parameter.requires_grad:
            shard = parameter.to_local() if hasattr(parameter, "to_local") else getattr(parameter, "ds_tensor", None)
            total += parameter.numel() if shard is None else shard.numel()
    return total
