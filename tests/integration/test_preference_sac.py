"""PreferenceSAC on Ray: exact resume from any moment, several env runners, a runner that dies, all reward modes."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from preference_loop import build, content, run_config, saved, train_to
from ray.exceptions import RayActorError

from rl_vlm.algorithms.learners import LearnerDiedError, LearnerLostError
from rl_vlm.config import PolicyConfig
from rl_vlm.control_envs.cartpole import ContinuousCartPole
from rl_vlm.labelling.store import LabelStore
from rl_vlm.preference.evaluation import evaluation_seeds
from rl_vlm.runs.ray_session import ray_cluster
from rl_vlm.types import UserInputError

# While acting at random, while exploring, after the first session, after relabelling with an overwritten ring, at the end.
POINTS = (40, 100, 140, 260, 280)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with ray_cluster(run_config()):
        yield


def two_runners(**dotted: Any) -> PolicyConfig:
    collection = {"num_env_runners": 2, "cpus_per_env_runner": 0.25, "steps": 5}
    return run_config(**{**{f"preference__collection__{key}": value for key, value in collection.items()}, **dotted})


def same_metrics(one: dict[str, float], other: dict[str, float]) -> None:
    measured = ("time/", "memory/", "labels/seconds", "rollout/steps_per_s")
    kept = [name for name in one if not name.startswith(measured)]
    assert kept == [name for name in other if not name.startswith(measured)]
    for name in kept:
        assert np.array_equal(one[name], other[name], equal_nan=True), name


@pytest.mark.timeout(900)
def test_a_run_resumed_at_any_of_five_points_is_the_same_run(tmp_path: Path) -> None:
    run = run_config(deterministic=True)
    whole = build(run, tmp_path / "whole")
    checkpoints, metrics = {}, {}
    for point in POINTS:
        train_to(whole, point)
        checkpoints[point] = saved(whole, tmp_path / f"at-{point}")
        whole.train()
        metrics[point] = whole.last_metrics
    train_to(whole, 300)
    assert whole.feedback.sessions == 3 and whole.replay.total > whole.replay.capacity
    straight = content(saved(whole, tmp_path / "straight"))
    labels = [LabelStore(tmp_path / "whole" / "labels").read(k)[1] for k in (1, 2, 3)]
    whole.stop()
    for point in POINTS:
        folder = tmp_path / f"resumed-{point}"
        resumed = build(run, folder)
        resumed.load_checkpoint(str(checkpoints[point]))
        assert content(saved(resumed, tmp_path / f"again-{point}")) == content(checkpoints[point])
        resumed.train()
        same_metrics(resumed.last_metrics, metrics[point])
        train_to(resumed, 300)
        assert content(saved(resumed, tmp_path / f"end-{point}")) == straight
        assert [LabelStore(folder / "labels").read(k)[1] for k in (1, 2, 3)] == labels
        resumed.stop()


@pytest.mark.acceptance
@pytest.mark.parametrize("deterministic", [True, False])
def test_several_env_runners_fill_one_replay_buffer(tmp_path: Path, deterministic: bool) -> None:
    run = two_runners(deterministic=deterministic)
    algorithm = build(run, tmp_path)
    train_to(algorithm, 200)
    replay = algorithm.replay
    size = len(replay)
    assert size == algorithm.env_steps >= 200
    # Every environment's steps follow each other: the next observation of a step is the observation of the next one.
    followers = np.flatnonzero(replay.previous[:size] >= 0)
    assert len(followers) > 150
    before = replay.previous[followers]
    assert np.array_equal(replay.next_observations[before], replay.observations[followers])
    assert len(set(replay.episodes[:size] % 2)) == 2
    assert algorithm._sums["updates"] > 0 and algorithm.feedback.sessions == 2
    results = algorithm.evaluate_policy()
    assert len(results) == 3 and len({result.true_return for result in results}) == 3
    state = saved(algorithm, tmp_path / "checkpoint")
    algorithm.stop()
    resumed = build(run, tmp_path)
    resumed.load_checkpoint(str(state))
    assert content(saved(resumed, tmp_path / "again")) == content(state)
    train_to(resumed, 240)
    resumed.stop()


def test_an_env_runner_that_dies_is_replaced(tmp_path: Path) -> None:
    algorithm = build(two_runners(), tmp_path)
    train_to(algorithm, 60)
    ray.kill(algorithm.runners[1], no_restart=False)
    train_to(algorithm, 160)
    assert algorithm.sampler.restarts == 1  # one death, although several calls failed until the runner was back
    replay = algorithm.replay
    pairs = list(zip(replay.episodes[:160].tolist(), replay.times[:160].tolist(), strict=True))
    assert len(set(pairs)) == 160  # no number of an episode was used twice
    ray.kill(algorithm.runners[2], no_restart=False)
    expected = evaluation_seeds(algorithm.run_config)
    assert [result.seed for result in algorithm.evaluate_policy(film=False)] == expected
    # A call that is sent after Ray has noticed the death waits for the new runner, and none fails.
    assert algorithm.sampler.restarts in (1, 2)
    algorithm.stop()


@pytest.mark.acceptance
def test_a_dead_env_runner_costs_its_open_episodes_and_not_the_checkpoint(tmp_path: Path) -> None:
    run = two_runners()
    algorithm = build(run, tmp_path / "one")
    train_to(algorithm, 80)
    runner = algorithm.runners[1]
    ray.kill(runner)
    with pytest.raises(RayActorError):  # a kill takes a moment
        for _ in range(600):
            ray.get(runner.ping.remote(), timeout=60)
    state = saved(algorithm, tmp_path / "checkpoint")
    counts = algorithm.sampler.episode_counts
    algorithm.stop()
    found = json.loads((state / "state.json").read_text())
    assert [one is None for one in found["collectors"]] == [True, False] and found["episode_counts"] == counts
    resumed = build(run, tmp_path / "two")
    resumed.load_checkpoint(str(state))
    train_to(resumed, 160)
    rows = resumed.env_steps
    pairs = list(zip(resumed.replay.episodes[:rows].tolist(), resumed.replay.times[:rows].tolist(), strict=True))
    assert len(set(pairs)) == rows  # no number of an episode was used twice
    resumed.stop()
    fewer = build(run_config(preference__collection__num_env_runners=0), tmp_path / "three")
    with pytest.raises(UserInputError, match="preference.collection.num_env"):
        fewer.load_checkpoint(str(state))
    fewer.stop()


def test_a_stop_leaves_no_steps_that_are_not_in_the_replay_buffer(tmp_path: Path) -> None:
    algorithm = build(two_runners(preference__collection__steps=2), tmp_path)
    train_to(algorithm, 140)  # behind the first session, where runners step while the learner learns
    stop_at = algorithm.env_steps + 8
    algorithm.stop_requested = lambda: algorithm.env_steps >= stop_at
    algorithm.train()
    assert stop_at <= algorithm.env_steps < 160 and not algorithm.sampler.is_running
    states = algorithm.sampler.states()
    steps = sum(len(state["actions"]) for state in states)
    size = algorithm.env_steps
    ended = algorithm.replay.continues[:size]
    open_steps = [
        int(algorithm.replay.times[:size][algorithm.replay.episodes[:size] == episode].max()) + 1
        for episode in (
            algorithm.replay.episodes[:size][algorithm.replay.episodes[:size] % 2 == env].max() for env in (0, 1)
        )
    ]
    assert ended.size == size and steps == sum(count for count in open_steps if count < 30)
    algorithm.stop()


@pytest.mark.acceptance
def test_the_reset_critics_stay_reset_when_the_learner_dies_after_it(tmp_path: Path) -> None:
    run = run_config(learner__num_learners=1, learner__cpus_per_learner=0.25, preference__reset_updates=0)
    algorithm = build(run, tmp_path)
    train_to(algorithm, 100)
    before = {name: tensor.clone() for name, tensor in algorithm._learner_state.items() if "critic" in name}
    algorithm.env_steps, kept = algorithm._next_session(), algorithm.env_steps
    algorithm._session()
    algorithm.env_steps = kept
    after = {name: tensor for name, tensor in algorithm._learner_state.items() if "critic" in name}
    assert before and all(not np.array_equal(before[name], after[name]) for name in before if "weight" in name)
    algorithm.stop()


@pytest.mark.parametrize("reward", ["gt_task_reward", "sparse_task_reward"])
def test_rewards_that_are_not_learned_ask_nobody(tmp_path: Path, reward: str) -> None:
    algorithm = build(run_config(preference__reward=reward, preference__exploration_steps=0), tmp_path)
    train_to(algorithm, 100)
    replay = algorithm.replay
    expected = replay.true_rewards if reward == "gt_task_reward" else replay.successes
    assert np.array_equal(replay.rewards[:100], expected[:100]) and replay.frames is None
    assert algorithm.feedback is None and not (tmp_path / "labels").exists()
    assert algorithm.last_metrics["policy/updates"] == 20
    algorithm.stop()


def test_the_reward_of_every_step_is_the_models_after_a_session(tmp_path: Path) -> None:
    algorithm = build(run_config(), tmp_path)
    train_to(algorithm, 120)
    before = algorithm.replay.rewards[:120].copy()
    train_to(algorithm, 140)
    replay, model = algorithm.replay, algorithm.feedback.model
    frames = replay.frames_of(np.arange(140))
    assert replay.rewards[:140] == pytest.approx(model.rewards(frames), abs=1e-6)
    assert not np.array_equal(before, replay.rewards[:120])
    algorithm.stop()


@pytest.mark.acceptance
def test_a_remote_learner_learns_the_same(tmp_path: Path) -> None:
    local = build(run_config(), tmp_path / "local")
    remote = build(run_config(learner__num_learners=1, learner__cpus_per_learner=0.25), tmp_path / "remote")
    for algorithm in (local, remote):
        train_to(algorithm, 140)
    assert np.array_equal(local.replay.actions[:140], remote.replay.actions[:140])
    one, other = (content(saved(a, tmp_path / f"c{k}")) for k, a in enumerate((local, remote)))
    assert one == other
    local.stop()
    remote.stop()


def test_tune_saves_and_restores_it_as_it_is(tmp_path: Path) -> None:
    algorithm = build(run_config(), tmp_path / "one")
    train_to(algorithm, 140)
    checkpoint = algorithm.save(str(tmp_path / "tune"))
    algorithm.stop()
    other = build(run_config(), tmp_path / "two")
    other.restore(checkpoint.checkpoint.path)
    assert other.env_steps == 140 and other.feedback.sessions == 1 and len(other.feedback.store) == 1
    other.stop()


@pytest.mark.real
def test_rl_vlm_train_leaves_the_files_that_users_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rl_vlm.cli.app import run as rl_vlm
    from rl_vlm.config import save_config

    monkeypatch.setenv("ARTIFACT_ROOT", str(tmp_path / "scratch"))
    config, folder = tmp_path / "config.yaml", tmp_path / "run"
    save_config(run_config(), config)
    assert rl_vlm(["train", str(config), "--dry-run"]) == 0
    assert rl_vlm(["train", str(config), "preference.total_steps=200", "--run-dir", str(folder)]) == 0
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["iterations"], result["labels"]["sessions"]) == ("done", 200, 2)
    assert [row["step"] for row in csv.DictReader((folder / "eval.csv").open())] == ["0", "100", "200"]
    train = list(csv.DictReader((folder / "train.csv").open()))
    assert [row["step"] for row in train] == ["30", "60", "90", "120", "150", "180"]
    assert float(train[-1]["true_episode_reward"]) < 0 and train[-1]["total_feedback"] != "0"
    assert all(row["episode_success"] == row["true_episode_success"] != "" for row in train)
    assert float(train[-1]["critic_loss"]) > 0 and train[0]["critic_loss"] == ""
    assert {path.name for path in (tmp_path / "scratch" / "test" / "checkpoints").iterdir()} == {
        "step-00000100", "step-00000200",
    }  # fmt: skip
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000200"]
    assert len(list((tmp_path / "scratch" / "test" / "videos").glob("step*_episode00_*.gif"))) == 3
    assert (folder / "curve.png").stat().st_size > 10_000
    # The last evaluation was due at the step of the last checkpoint, and the run ended during it.
    for name in ("eval.jsonl", "eval.csv"):
        lines = (folder / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:-1]))
    assert rl_vlm(["train", str(config), "--run-dir", str(folder), "--resume"]) == 0
    assert [json.loads(line)["iteration"] for line in (folder / "eval.jsonl").read_text().splitlines()] == [
        0,
        100,
        200,
        300,
    ]
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["iterations"], result["labels"]["sessions"]) == ("done", 300, 3)
    assert [row["step"] for row in csv.DictReader((folder / "eval.csv").open())] == ["0", "100", "200", "300"]
    progress = [row["iteration"] for row in csv.DictReader((folder / "progress.csv").open())]
    assert progress == [str(step) for step in range(20, 301, 20)]
    # `rl-vlm eval` plays the same episodes with the same agent as the run's last evaluation.
    capsys.readouterr()
    assert rl_vlm(["eval", str(folder), "--out", str(tmp_path / "eval.json")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "eval.json").read_text())
    last = json.loads((folder / "eval.jsonl").read_text().splitlines()[-1])
    assert found["step"] == 300 and found["checkpoint"].endswith("step-00000300") and len(found["episodes"]) == 3
    for name in (
        "accuracy/success",
        "accuracy_low/success",
        "reward/success",
        "evaluation/reward_std",
        "items/success",
    ):
        assert found[name] == pytest.approx(last[name], rel=1e-5), name
    older = tmp_path / "scratch" / "test" / "checkpoints" / "step-00000100"
    arguments = ["preference.evaluation.episodes=5", "--run-dir", str(older)]
    assert rl_vlm(["eval", str(config), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["items/success"]) == (100, 5)


def test_an_environment_that_fails_ends_the_run_with_its_message(tmp_path: Path) -> None:
    from rl_vlm.preference.collector import CollectionError

    run = run_config(env__id=f"{__file__}:Breaking", env__kwargs={})
    algorithm: Any = build(run, tmp_path)
    with pytest.raises(CollectionError):
        train_to(algorithm, 60)
    algorithm.stop()


class Breaking(ContinuousCartPole):
    """Breaks at its twentieth step."""

    def step(self, action: np.ndarray) -> Any:
        if self._steps == 19:
            raise ZeroDivisionError("the pole broke")
        return super().step(action)


def test_a_learner_that_dies_is_replaced_and_nothing_but_its_newest_updates_is_lost(tmp_path: Path) -> None:
    algorithm = build(
        run_config(learner__num_learners=1, learner__cpus_per_learner=0.25, learner__max_restarts=1), tmp_path
    )
    train_to(algorithm, 160)
    replay, sessions = len(algorithm.replay), algorithm.feedback.sessions
    kept = {name: tensor.clone() for name, tensor in algorithm._learner_state.items()}
    ray.kill(algorithm.learners.actors[0])
    with pytest.raises(LearnerLostError) as lost:
        algorithm.train()
    algorithm.recover(lost.value)
    algorithm.train()
    assert algorithm.restarts["learner"] == 1
    # The newest remembered state is of the replaced learner, whose updates went on from what was kept.
    assert algorithm._learner_state.keys() == kept.keys()
    train_to(algorithm, 220)
    assert algorithm.last_metrics["restarts/learner"] == 1 and algorithm.last_metrics["policy/updates"] == 20
    assert len(algorithm.replay) > replay and algorithm.feedback.sessions >= sessions
    # Once more than `max_restarts` is an error that says so, and not a loop.
    ray.kill(algorithm.learners.actors[0])
    with pytest.raises(LearnerLostError) as lost:
        algorithm.train()
    with pytest.raises(LearnerDiedError):
        algorithm.recover(lost.value)
    algorithm.stop()
