"""Partial rollouts: a turn that goes on with newer weights keeps, for each token, the version and the likelihood under it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from core_support import adapted_policy, plain_model, reference_logprobs, text_side
from peft import PeftModel
from policy_loop import MAX_CONTEXT, ThreeTurns

from rl_vlm.config import RolloutSection, parse_config
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.rollout.env_pool import EnvPool
from rl_vlm.rollout.episodes import run_group
from rl_vlm.rollout.group_buffer import GroupBuffer
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import (
    Completion,
    GenerationRequest,
    StopReason,
    Trajectory,
    TrajectoryError,
    TrajectoryGroup,
    UserInputError,
)

PIECE, TURN = 4, 10
ROLLOUT = RolloutSection(
    max_turns=3, max_new_tokens_per_turn=TURN, max_new_tokens=3 * TURN, require_end_of_turn=False,
    max_policy_lag=1, partial_tokens=PIECE,
)  # fmt: skip
TASK = RolloutTask("g", 3, "train", seed=1, sampling_seed=5, size=3, temperature=0.8, min_version=1)


class NewWeightsMeanwhile:
    """An engine in this process that gets another adapter before every third request."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = TransformersEngine(folder, max_context=MAX_CONTEXT)
        self.requests: list[GenerationRequest] = []
        self.version = 0
        self.loading = asyncio.Lock()

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        if len(self.requests) % 3 == 1:
            async with self.loading:
                self.version += 1
                await self.engine.load_adapter(adapted_policy(self.folder, seed=self.version).payload(self.version))
        answer = (await self.engine.generate([request]))[0]
        return dataclasses.replace(answer, replica_id="here")

    async def group(self, rollout: RolloutSection) -> TrajectoryGroup:
        pool = EnvPool(ThreeTurns, timeout_s=30.0, inline=True)
        try:
            return await run_group(TASK, pool, self, text_side(self.folder), rollout, MAX_CONTEXT)
        finally:
            pool.close()
            await self.engine.close()


@pytest.fixture(scope="module")
def sampled(tiny_folder: Path) -> Iterator[tuple[TrajectoryGroup, NewWeightsMeanwhile]]:
    policy = NewWeightsMeanwhile(tiny_folder)
    yield asyncio.run(policy.group(ROLLOUT)), policy


def test_every_token_is_as_likely_as_under_the_version_that_it_names(
    sampled: tuple[TrajectoryGroup, NewWeightsMeanwhile], tiny_folder: Path, tmp_path: Path
) -> None:
    group, _ = sampled
    versions = sorted({int(v) for one in group.trajectories for v in one.versions if v >= 0})
    assert len(versions) >= 5
    under = {}
    for version in versions:
        adapted_policy(tiny_folder, seed=version).payload(version).write(tmp_path / str(version))
        model = PeftModel.from_pretrained(plain_model(tiny_folder), tmp_path / str(version)).eval()
        with torch.no_grad():
            under[version] = [
                reference_logprobs(tiny_folder, model, one.token_ids, one.images, TASK.temperature).numpy()
                for one in group.trajectories
            ]
    others = 0.0
    for k, one in enumerate(group.trajectories):
        for place in np.flatnonzero(one.loss_mask):
            version = int(one.versions[place])
            assert under[version][k][place - 1] == pytest.approx(one.logprobs[place], abs=1e-4)
            wrong = under[versions[(versions.index(version) + 1) % len(versions)]][k][place - 1]
            others = max(others, abs(wrong - one.logprobs[place]))
    assert others > 0.5  # another version gives other likelihoods


def test_turns_consist_of_pieces_and_their_budget_is_kept(
    sampled: tuple[TrajectoryGroup, NewWeightsMeanwhile],
) -> None:
    group, policy = sampled
    assert all(request.sampling.max_new_tokens <= PIECE for request in policy.requests)
    seeds = [seed for request in policy.requests for seed in request.sampling.seeds or ()]
    assert len(set(seeds)) == len(seeds)
    mixed = 0
    for one in group.trajectories:
        assert one.newest_version > one.oldest_version
        assert (one.versions >= 0).tolist() == one.loss_mask.tolist()
        for turn in one.turns:
            length = turn.stop - turn.start
            assert length == TURN or turn.stop_reason is StopReason.END_OF_TURN
            used = set(one.versions[turn.start : turn.stop].tolist())
            assert turn.policy_version == min(used) and bool(turn.pieces) == (len(used) > 1)
            mixed += len(used) > 1
    assert mixed >= 3


def test_in_one_piece_a_turn_has_one_version(tiny_folder: Path) -> None:
    group = asyncio.run(NewWeightsMeanwhile(tiny_folder).group(ROLLOUT.model_copy(update={"partial_tokens": None})))
    assert all(turn.pieces == () for one in group.trajectories for turn in one.turns)


def test_pieces_must_add_up_to_their_turn(sampled: tuple[TrajectoryGroup, NewWeightsMeanwhile]) -> None:
    one: Trajectory = sampled[0].trajectories[0]
    turn = dataclasses.replace(one.turns[0], pieces=((1, 1), (1, 2)))
    with pytest.raises(TrajectoryError, match="pieces of turn 0 do not add up"):
        dataclasses.replace(one, turns=(turn, *one.turns[1:])).check()


def test_the_age_of_a_partial_group_is_that_of_its_newest_token(
    sampled: tuple[TrajectoryGroup, NewWeightsMeanwhile],
) -> None:
    group, _ = sampled
    whole, partial = GroupBuffer(1), GroupBuffer(1, partial=True)
    for buffer in (whole, partial):
        buffer.add([group])
    assert whole.take(1, group.newest_version + 1) == ([], [group])
    assert partial.take(1, group.newest_version + 1) == ([group], [])
    partial.add([group])
    assert partial.take(1, group.newest_version + 2) == ([], [group])


def test_it_needs_a_lag() -> None:
    with pytest.raises(UserInputError, match="rollout.partial_tokens has no effect with rollout.max_policy_lag 0"):
        parse_config({"rollout": {"partial_tokens": 4}})
