"""With `deterministic: true`, k + k iterations equal 2k byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_vlm.algorithms.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from rl_vlm.config import PolicyConfig, load_config
from rl_vlm.runs.ray_session import ray_cluster
from rl_vlm.runs.train import kind_of

ROOT = Path(__file__).resolve().parents[2]
HALF = 3


PPO = (
    "algorithm.preset=ppo",
    "critic.kind=adapter",
    "critic.warmup_iterations=1",
    "algorithm.kl_in=reward",
    "algorithm.kl_target=0.02",
    "learner.ema_decay=0.9",
)
FULL = ("model.train=full", "learner.lr=2e-4", "algorithm.kl_coef=0.01", "learner.ema_decay=0.9")
FULL_PPO = ("model.train=full", "learner.lr=2e-4", "algorithm.preset=ppo", "critic.warmup_iterations=1")
# Three iterations are 144 episodes: the middle of the second stage, and of a blend.
CURRICULUM = (
    "env={mixture: [{name: count, id: Shapes-v0, kwargs: {task: count, turns: 2}, num_items: 12, "
    "reward: {weights: {env: 1.0, format: 0.2, length: -0.01}}}, {name: rule, id: Shapes-v0, kwargs: {task: rule}, num_items: 12}]}",
    "curriculum={blend: true, blend_levels: 4, sampling: solve_rate, stages: [{start: 0, mixture: {count: 3.0}}, "
    "{start: 100, env: {count: {second_reward: 0.9}}}, {start: 220, env: {count: {second_reward: 0.1}}}]}",
)


def run_config(folder: Path, *changes: str) -> PolicyConfig:
    return load_config(
        ROOT / "configs/quickstart.yaml",
        [
            f"model.path={folder}",
            "deterministic=true",
            "env.kwargs={task: count, turns: 2}",
            "rollout.max_turns=2",
            "rollout.prompts_per_iteration=6",
            "algorithm.iterations=6",
            "algorithm.minibatches=2",
            "algorithm.shuffle_rewards=true",  # so that an undertrained model has advantages
            "algorithm.entropy_coef=0.01",
            "env.num_items=16",  # so that the cursor starts a second epoch
            *changes,
        ],
    )


def build(run: PolicyConfig, folder: Path) -> Any:
    return kind_of(run).rllib_config(run).from_run_config(run, folder).build_algo()


def same(one: Checkpoint, other: Checkpoint, counts: bool = True) -> None:
    """Byte for byte; `counts` False: but for what counts repeated work too."""
    assert one.adapter.tensors == other.adapter.tensors
    for ours, theirs in ((one.moments, other.moments), (one.extras, other.extras)):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert np.asarray(tensor).tobytes() == np.asarray(theirs[name]).tobytes(), name
    for key in ("updates", "rng", "torch_rng", "kl_coef", "return_scale"):
        assert one.state[key] == other.state[key], key
    for key in ("tasks", "trajectories") if counts else ("tasks",):
        assert one.state["rollouts"][key] == other.state["rollouts"][key], key


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "changes",
    [(), *(pytest.param(changes, marks=pytest.mark.acceptance) for changes in (PPO, CURRICULUM, FULL, FULL_PPO))],
    ids=["grpo", "ppo", "curriculum", "full", "full ppo"],
)
def test_three_and_three_iterations_equal_six(changes: tuple[str, ...], tiny_folder: Path, tmp_path: Path) -> None:
    run = run_config(tiny_folder, *changes)
    with ray_cluster(run):
        whole = build(run, tmp_path / "whole")
        for _ in range(HALF):
            whole.train()
        saved = tmp_path / "checkpoint"
        saved.mkdir()
        write_checkpoint(saved, whole.recovery.checkpoint())
        for _ in range(HALF):
            whole.train()
        rewards = whole.last_metrics["reward/mean"]
        straight = whole.recovery.checkpoint()
        whole.stop()

        resumed = build(run, tmp_path / "resumed")
        resumed.load_checkpoint(str(saved))
        for _ in range(HALF):
            resumed.train()
        assert resumed.last_metrics["reward/mean"] == rewards
        same(resumed.recovery.checkpoint(), straight)
        resumed.stop()
    before = read_checkpoint(saved)
    assert before.adapter.tensors != straight.adapter.tensors
    if changes == CURRICULUM:
        sources = [checkpoint.state["rollouts"]["tasks"]["source"] for checkpoint in (before, straight)]
        assert [source["stage"] for source in sources] == [1, 2]
        assert all(rates["rates"] for rates in sources[1]["mixture"]["items"].values())
    if changes == PPO:
        assert straight.state["kl_coef"] != before.state["kl_coef"]
        assert any(name.startswith("critic.") for name in before.extras)
        assert any(name.startswith("average.") for name in before.extras)
