"""With `deterministic: true`, k + k iterations equal 2k byte for byte."""

from __future__ import annotations

import csv
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_vlm.algorithms.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from rl_vlm.algorithms.learners import LearnerLostError
from rl_vlm.config import PolicyConfig, load_config
from rl_vlm.learning.plan import ScoreBatch
from rl_vlm.models.weights import WeightPayload
from rl_vlm.runs.policy import PolicyRun
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
    return kind_of(run).algorithm_class(run).from_run_config(run, folder).build_algo()


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
    [
        ("serving.num_replicas=1",),
        *(pytest.param(changes, marks=pytest.mark.acceptance) for changes in (PPO, CURRICULUM, FULL, FULL_PPO)),
    ],
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
        write_checkpoint(saved, whole.checkpoint())
        for _ in range(HALF):
            whole.train()
        rewards = whole.last_metrics["reward/mean"]
        straight = whole.checkpoint()
        whole.stop()

        resumed = build(run, tmp_path / "resumed")
        resumed.load_checkpoint(str(saved))
        for _ in range(HALF):
            resumed.train()
        assert resumed.last_metrics["reward/mean"] == rewards
        same(resumed.checkpoint(), straight)
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


# --- A learner that dies beside the updates, in an evaluation or at the very end, is replaced too


class Dying(PolicyRun):
    """Kills its learner before the second evaluation and between the adapter and the averaged one at the end."""

    killed = 0

    def _kill(self) -> None:
        self.killed += 1
        os.kill(self.algorithm.learners.call(lambda _: os.getpid()), signal.SIGKILL)

    def evaluate(self) -> dict[str, Any]:
        if self.algorithm.updates == 2 and not self.killed:
            self._kill()
        return super().evaluate()

    def _save_trained(self, payload: WeightPayload, suffix: str = "") -> None:
        super()._save_trained(payload, suffix)
        if self.killed == 1:  # before the averaged adapter is fetched
            self._kill()


@pytest.mark.acceptance  # CI kills one in tests/e2e/test_faults.py
@pytest.mark.timeout(300)
def test_a_learner_that_dies_beside_an_update_is_replaced(tiny_folder: Path, tmp_path: Path) -> None:
    run = run_config(
        tiny_folder,
        "algorithm.iterations=3", "learner.num_learners=1", "resources.num_cpus=4", "learner.ema_decay=0.9",
        "evaluation={every: 2, num_items: 8, weights: ema}", "logging={checkpoint_every: 1, tensorboard: false}",
    )  # fmt: skip
    training = Dying(run, tmp_path, resume=False)
    result: dict[str, Any] = training.execute()
    assert training.killed == 2 and result["restarts"]["learner"] == 2
    assert (result["status"], result["iterations"]) == ("done", 3)
    assert [row["iteration"] for row in csv.DictReader((tmp_path / "progress.csv").open())] == ["1", "2", "3"]
    evaluated = [json.loads(line)["iteration"] for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert evaluated == [0, 2, 3]
    assert (tmp_path / "adapter-ema/adapter_model.safetensors").is_file()


# --- A PPO learner that is killed at any point, or silent, is replaced, and the run ends as it would have ended without


POINTS = ["sampling", "score", "between score and update", "update", "checkpoint"]


class Killer:
    """Kills or stops the learner once, at a point of the next iteration."""

    def __init__(self, algorithm: Any, how: signal.Signals = signal.SIGKILL) -> None:
        self.algorithm, self.how = algorithm, how
        self.point = ""
        self._update, self._sample = algorithm.learners.update, algorithm.rollouts.next_groups
        algorithm.learners.update, algorithm.rollouts.next_groups = self._update_learners, self._next_groups

    def kill(self) -> None:
        self.point = ""
        os.kill(self.algorithm.learners.call(lambda _: os.getpid()), self.how)

    def _next_groups(self, *arguments: Any) -> Any:
        if self.point == "sampling":
            self.kill()
        return self._sample(*arguments)

    def _update_learners(self, batches: list[Any]) -> Any:
        scores = isinstance(batches[0], ScoreBatch)
        if self.point == ("score" if scores else "update"):
            pid = self.algorithm.learners.call(lambda _: os.getpid())
            self.point = ""
            threading.Timer(0.05, os.kill, (pid, self.how)).start()
        answers = self._update(batches)
        if scores and self.point == "between score and update":
            self.kill()
        return answers


def train_to(algorithm: Any, updates: int, most: int = 12) -> None:
    for _ in range(most):
        if algorithm.updates >= updates:
            return
        try:
            algorithm.train()
        except LearnerLostError as error:  # as the run's loop does
            algorithm.recover(error)
    raise AssertionError(f"{algorithm.updates} updates after {most} iterations")


@contextmanager
def trained(tiny_folder: Path, folder: Path, *settings: str) -> Iterator[tuple[Any, Path]]:
    """An algorithm with one learner actor after two updates, and its checkpoint."""
    run = run_config(tiny_folder, *PPO, "learner.num_learners=1", "resources.num_cpus=4", *settings)
    with ray_cluster(run):
        algorithm = build(run, folder / "run")
        try:
            train_to(algorithm, 2)
            saved = folder / "checkpoint"
            saved.mkdir(parents=True)
            write_checkpoint(saved, algorithm.checkpoint())
            yield algorithm, saved
        finally:
            algorithm.stop()


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
def test_a_learner_that_is_killed_at_any_of_five_points_changes_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    with trained(tiny_folder, tmp_path, "learner.max_restarts=9") as (algorithm, saved):
        train_to(algorithm, 4)
        straight = algorithm.checkpoint()
        killer = Killer(algorithm)
        restarts: Callable[[], int] = lambda: algorithm.restarts["learner"]  # noqa: E731
        for point in POINTS:
            algorithm.load_checkpoint(str(saved))
            before = restarts()
            if point == "checkpoint":
                train_to(algorithm, 3)
                killer.kill()
                with pytest.raises(LearnerLostError):
                    algorithm.checkpoint()
            else:
                killer.point = point
            train_to(algorithm, 4)
            assert restarts() == before + 1, point
            same(algorithm.checkpoint(), straight, counts=False)


@pytest.mark.acceptance
@pytest.mark.timeout(600)
def test_a_learner_that_is_silent_is_replaced(tiny_folder: Path, tmp_path: Path) -> None:
    """As one whose node was cut off: its answer is lost, and nobody says that it died."""
    with trained(tiny_folder, tmp_path, "learner.update_timeout_s=20") as (algorithm, _):
        Killer(algorithm, signal.SIGSTOP).point = "update"
        train_to(algorithm, 4)
        assert algorithm.restarts["learner"] == 1
