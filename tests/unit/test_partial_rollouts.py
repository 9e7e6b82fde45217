"""Partial rollouts: a turn that goes on with newer weights keeps, for each token, the version and the likelihood under it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from policy_loop import MAX_CONTEXT
from version_support import PIECE, ROLLOUT, TURN, NewWeightsMeanwhile, check_named_versions

from rl_vlm.config import parse_config
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.rollout.rollouts import GroupBuffer
from rl_vlm.types import StopReason, Trajectory, TrajectoryError, TrajectoryGroup, UserInputError


def meanwhile(folder: Path) -> NewWeightsMeanwhile:
    return NewWeightsMeanwhile(folder, TransformersEngine(folder, max_context=MAX_CONTEXT))


@pytest.fixture(scope="module")
def sampled(tiny_folder: Path) -> Iterator[tuple[TrajectoryGroup, NewWeightsMeanwhile]]:
    policy = meanwhile(tiny_folder)
    yield asyncio.run(policy.group(ROLLOUT)), policy


@pytest.mark.slow
def test_every_token_is_as_likely_as_under_the_version_that_it_names(
    sampled: tuple[TrajectoryGroup, NewWeightsMeanwhile], tiny_folder: Path, tmp_path: Path
) -> None:
    check_named_versions(sampled[0], tiny_folder, tmp_path)


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
    group = asyncio.run(meanwhile(tiny_folder).group(ROLLOUT.model_copy(update={"partial_tokens": None})))
    assert all(turn.pieces == () for one in group.trajectories for turn in one.turns)


def test_pieces_must_add_up_to_their_turn(sampled: tuple[TrajectoryGroup, NewWeightsMeanwhile]) -> None:
    one: Trajectory = sampled[0].trajectories[0]
    turn = dataclasses.replace(one.turns[0], pieces=((1, 1), (1, 2)))
    with pytest.raises(TrajectoryError, match="pieces"):
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
    with pytest.raises(UserInputError, match="rollout.partial_tokens"):
        parse_config({"rollout": {"partial_tokens": 4}})
