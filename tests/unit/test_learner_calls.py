"""Calls to learners of which some are dead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray_support import DEAD, HANGS, RAY, Reference

from rl_vlm.algorithms import learners
from rl_vlm.algorithms.learners import LearnerDiedError, LearnerLostError, LearnerOutOfMemoryError, Learners
from rl_vlm.algorithms.policy import PolicyAlgorithm
from rl_vlm.algorithms.preference_sac import PreferenceSAC
from rl_vlm.config import LearnerSection, PolicyConfig, parse_config, save_config
from rl_vlm.evaluation.sight_faults import Fault, SightError
from rl_vlm.learning.plan import UpdateBatch
from rl_vlm.learning.sight_check import UnfitImagesError
from rl_vlm.rollout import actors
from rl_vlm.rollout.rollouts import TooManyFailuresError
from rl_vlm.rollout.sampler import RoundAbandonedError, SamplingError
from rl_vlm.runs import lifecycle
from rl_vlm.runs.policy import PolicyRun
from rl_vlm.types import RLVLMError, UserInputError

NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"),
    torch.AcceleratorError("CUDA error: out of memory"),  # of CUDA beside torch's allocator
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),  # of a first product
]


class Learner:
    """A learner's actor. `dies`: what its calls give in place of an answer; `updates`: what the next updates do."""

    def __init__(self, number: int, dies: Exception | None = None, updates: Sequence[Any] = ()) -> None:
        self._learner_index, self.dies, self.updates, self.asked = number, dies, list(updates), 0
        self.apply = SimpleNamespace(remote=lambda function: self._call(lambda: function(self)))
        self.update = SimpleNamespace(remote=lambda training_data: self._call(self._next_update))

    def _next_update(self) -> Any:
        found = self.updates.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def _call(self, work: Any) -> Reference:
        self.asked += 1
        if self.dies is not None:
            return Reference(self.dies)
        try:
            return Reference(work())
        except Exception as error:
            if error in (DEAD, HANGS):
                return Reference(error)
            return Reference(RayTaskError("apply", "traceback", error).as_instanceof_cause())  # as ray.get raises it

    def kill(self) -> None:
        self.dies = DEAD


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "ray", RAY)
    monkeypatch.setattr(learners, "ray", RAY)
    monkeypatch.setattr(learners, "TrainingData", lambda **fields: fields)


def supervised(*members: Learner, in_step: bool = False, **settings: Any) -> Learners:
    section = LearnerSection(**settings)
    group = SimpleNamespace(is_local=False, _workers=list(members))
    return Learners(group, SimpleNamespace(**section.model_dump(), in_step=in_step), lambda: None, Counter())  # type: ignore[arg-type]


def test_another_learner_answers_for_a_dead_one() -> None:
    assert supervised(Learner(0, DEAD), Learner(1)).call(lambda learner: learner._learner_index) == 1
    for members in ([Learner(0, DEAD)], []):
        with pytest.raises(LearnerLostError):
            supervised(*members).call(lambda _: 0)


def test_a_lost_learner_says_of_what_it_died() -> None:
    killed = ActorUnavailableError("Killed by the node's memory manager.", None)
    with pytest.raises(LearnerLostError, match="memory manager"):
        supervised(Learner(0, killed)).call(lambda _: 0)


def test_learners_that_hold_parts_of_a_model_are_all_called() -> None:
    assert supervised(Learner(0), Learner(1), in_step=True).call(lambda learner: 7) == 7
    with pytest.raises(LearnerLostError):
        supervised(Learner(0), Learner(1, DEAD), in_step=True).call(lambda _: 0)
    supervised(Learner(0), Learner(1)).call_each(lambda _: 0)
    with pytest.raises(LearnerLostError):
        supervised(Learner(0), Learner(1, DEAD)).call_each(lambda _: 0)


@pytest.mark.parametrize("error", [UnfitImagesError("4 tokens"), *NO_MEMORY, ZeroDivisionError("a defect")], ids=repr)
@pytest.mark.parametrize("in_step", [False, True])
def test_an_error_of_a_call_is_no_death(error: Exception, in_step: bool) -> None:
    """A full memory is named, because trying again would not help."""

    def fail(learner: Any) -> Any:
        raise error

    expected = LearnerOutOfMemoryError if error in NO_MEMORY else type(error)
    with pytest.raises(RayTaskError if isinstance(error, ZeroDivisionError) else expected):
        supervised(Learner(0), Learner(1), in_step=in_step).call(fail)


@pytest.mark.parametrize("error", NO_MEMORY, ids=repr)
def test_an_update_that_does_not_fit_is_not_a_dead_learner(error: Exception) -> None:
    with pytest.raises(LearnerOutOfMemoryError, match="micro_batch_tokens"):
        supervised(Learner(0, updates=[error]), Learner(1, updates=[1])).update(["batch", "batch"])


BROKEN = RuntimeError("Connection closed by peer")  # of a collective


@pytest.mark.parametrize(
    ("members", "lost"),
    [
        ([Learner(0, updates=[BROKEN]), Learner(1, DEAD)], True),
        ([Learner(0, updates=[BROKEN]), Learner(1, updates=[BROKEN])], False),  # all live: a defect
        ([Learner(0, updates=[1]), Learner(1, ActorDiedError())], True),
    ],
)
def test_an_update_finds_out_whether_a_learner_is_lost(members: list[Learner], lost: bool) -> None:
    with pytest.raises(LearnerLostError if lost else RuntimeError) as caught:
        supervised(*members).update(["batch", "batch"])
    assert isinstance(caught.value, LearnerLostError) is lost


def test_a_silent_learner_is_lost_at_the_deadline_and_a_dead_one_without_asking_those_that_wait_for_it() -> None:
    """NCCL lets them wait for ever, and they would not answer."""
    silent = Learner(1, HANGS)
    with pytest.raises(LearnerLostError):
        supervised(Learner(0, updates=[1]), silent, update_timeout_s=0.01).update(["batch", "batch"])
    assert silent.dies is DEAD  # it was killed
    waiting = Learner(1, HANGS)
    with pytest.raises(LearnerLostError):
        supervised(Learner(0, ActorDiedError()), waiting).update(["batch", "batch"])
    assert waiting.asked == 1


def test_answers_come_in_the_order_of_the_batches() -> None:
    assert supervised(Learner(0, updates=["first"]), Learner(1, updates=["second"])).update(["a", "b"]) == [
        "first",
        "second",
    ]


def test_learners_get_ten_times_as_long_as_they_took_for_such_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    found = supervised(Learner(0, updates=["result"] * 9))
    update = UpdateBatch([], [False], {}, {}, [])

    def took(batch: Any, seconds: float) -> float:
        """What such batches may take after one that took so long."""
        ticks = iter([0.0, seconds])
        monkeypatch.setattr(learners, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
        assert found.update([batch]) == ["result"]
        return found.timeout_s(type(batch))

    assert found.timeout_s(str) == found.timeout_s(int) == 1800.0
    assert took("scores", 20.0) == took("other scores", 15.0) == 200.0 and found.timeout_s(int) == 1800.0
    assert (took(1, 0.1), took(2, 1000.0)) == (120.0, 1800.0)
    assert took(update, 0.05) == 1800.0  # nothing was to be learned
    assert took(replace(update, active=[True]), 30.0) == 300.0


@pytest.mark.parametrize(
    "failures", [[ActorDiedError(), ActorDiedError()], [LearnerLostError("gone"), ActorDiedError()]]
)
@pytest.mark.parametrize("max_restarts", [3, 2])
def test_learners_that_start_on_a_dying_node_are_replaced_again(failures: list[Exception], max_restarts: int) -> None:
    left, restarts, shut = list(failures), Counter[str](), [0]

    def build() -> Any:
        if left and isinstance(left[0], ActorDiedError):
            raise left.pop(0)
        return group

    def restore() -> None:
        if left:
            raise left.pop(0)

    group = SimpleNamespace(is_local=True, shutdown=lambda: shut.__setitem__(0, shut[0] + 1))
    found = Learners(group, LearnerSection(max_restarts=max_restarts), build, restarts)
    if max_restarts == 3:
        found.replace(RuntimeError("the first one died"), restore)
        assert restarts["learner"] == 3 and found.group is group
        return
    with pytest.raises(LearnerDiedError):
        found.replace(RuntimeError("the first one died"), restore)


class Reset(PreferenceSAC):
    """A session whose reset of the critics meets a learner that dies `deaths` times."""

    def __init__(self, deaths: int) -> None:
        self.deaths, self.asked = deaths, []  # type: ignore[var-annotated]
        self.settings = parse_config(  # type: ignore[assignment]
            {
                "algorithm": {"name": "preference_sac"},
                "env": {"id": "CartPole"},
                "preference": {"sac": {"batch_size": 2}},
            }
        ).preference
        rows = np.zeros((4, 1), np.float32)
        self.replay: Any = SimpleNamespace(
            sample_rows=lambda count, rng: np.zeros(count, np.int64),
            observations=rows, actions=rows, rewards=rows, next_observations=rows, continues=rows,
        )  # fmt: skip
        self._rng, self._sums, self.feedback = np.random.default_rng(0), Counter(), None  # type: ignore[assignment]
        self.env_steps, self.last_session, self._reset_is_due = 0, -1, False
        self.learner_group, self.sampler = SimpleNamespace(is_local=True), SimpleNamespace(is_running=False)  # type: ignore[assignment]
        self.on_session, self.stop_requested = lambda _: None, lambda: True
        self.learners: Any = SimpleNamespace(update=self._update_learners, call=lambda _: ([], None))

    def _update_learners(self, batches: Sequence[Any]) -> list[Any]:
        self.asked.append(batches[0].reset_critics)
        if len(self.asked) <= self.deaths:
            raise LearnerLostError("gone")
        return [({}, [])]


def test_the_critics_are_reset_though_the_learner_died_before_it() -> None:
    """The labels of that session are there: nothing is asked again."""
    algorithm = Reset(deaths=2)
    for attempt in (algorithm._session, algorithm.iterate):
        with pytest.raises(LearnerLostError):
            attempt()
    algorithm.iterate()
    algorithm.iterate()
    assert algorithm.asked == [True, True, True]


class Averaging:
    """The exchange of weights around an evaluation; `fails` is what giving the trained ones back raises."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.run_config = PolicyConfig.model_validate({"evaluation": {"weights": "ema"}, "learner": {"ema_decay": 0.9}})
        self.version, self.published, self.fails = 4, [], fails  # type: ignore[var-annotated]
        self.learners = SimpleNamespace(call=self._call)
        self.publish_restored, self.averaged_adapter = self.published.append, lambda: "average"

    def _call(self, function: Any) -> Any:
        policy = SimpleNamespace(payload=lambda version: f"trained {version}")
        learner = SimpleNamespace(policy=policy)
        if self.published and self.fails is not None:
            raise self.fails
        return function(learner)


def test_the_trained_weights_come_back_after_an_evaluation_that_fails() -> None:
    algorithm = Averaging()
    with PolicyAlgorithm._evaluated_weights(algorithm):  # type: ignore[arg-type]
        assert algorithm.published == ["average"]
    assert algorithm.published == ["average", "trained 4"]
    for fails in (None, LearnerLostError("gone")):
        algorithm = Averaging(fails)
        with pytest.raises(RoundAbandonedError), PolicyAlgorithm._evaluated_weights(algorithm):  # type: ignore[arg-type]
            raise RoundAbandonedError("Sampling was stopped.")
        assert algorithm.published == ["average", "trained 4"][: 2 - bool(fails)]
    with pytest.raises(LearnerLostError), PolicyAlgorithm._evaluated_weights(Averaging(LearnerLostError("gone"))):  # type: ignore[arg-type]
        pass


# --- What a policy run does where sampling ends it, and which resumes it refuses. Nothing is started


@pytest.mark.parametrize(
    ("error", "updates", "saves"),
    [
        (SamplingError("All env runners died."), 5, True),
        (TooManyFailuresError("16 groups were lost."), 5, True),
        (SightError("Rows are missing."), 5, True),
        (SightError("Rows are missing."), 2, False),  # the gate of a resumed run: what it began with is there
        (SamplingError("All env runners died."), 2, False),  # it is saved already
        (LearnerDiedError("There is nobody to ask."), 5, False),
    ],
)
def test_what_was_learned_is_saved_where_sampling_ends_a_run(
    monkeypatch: pytest.MonkeyPatch, error: RLVLMError, updates: int, saves: bool
) -> None:
    saved: list[int] = []

    def fail(self: Any) -> None:
        raise error

    def save(self: Any) -> None:
        saved.append(self.algorithm.updates)
        raise RLVLMError("no matter what becomes of it, the first error is told")

    monkeypatch.setattr(PolicyRun, "_check_sight", fail)
    monkeypatch.setattr(PolicyRun, "checkpoint", save)
    run = PolicyRun.__new__(PolicyRun)
    run.algorithm, run.saved_at = SimpleNamespace(updates=updates), 2
    monkeypatch.setattr(PolicyRun, "_report_failures", lambda _: None)
    with pytest.raises(type(error), match=str(error)):
        list(run.iterations())
    assert saved == ([5] if saves else [])


def test_an_iteration_that_shows_a_fault_is_recorded_before_the_run_ends() -> None:
    """Its update is in the checkpoint, so a resume goes on behind its row."""
    recorded: list[int] = []
    run = PolicyRun.__new__(PolicyRun)
    run.config, run.last_iteration = parse_config({}), 4
    run.algorithm = SimpleNamespace(
        train=lambda: None,
        updates=5,
        last_metrics={},
        last_spans=[],
        sight_faults=[Fault("positions", "Rows are missing.")],
        rollouts=SimpleNamespace(take_failures=dict),
    )
    run.recorder = SimpleNamespace(  # type: ignore[assignment]
        log_iteration=lambda iteration, _: recorded.append(iteration),
        log_spans=lambda *_: None,
        log_failures=lambda *_: [],
    )
    run.display = SimpleNamespace(update=lambda *_: None)  # type: ignore[assignment]
    with pytest.raises(SightError):
        run._iterate()
    assert recorded == [5]


@pytest.mark.parametrize(
    "changes",
    [
        {"env": {"id": "GridWalk-v0"}},
        {"env": {"id": "Shapes-v0", "kwargs": {"task": "colour"}}},
        {"env": {"id": "Shapes-v0", "reward": {"weights": {"own": 1.0, "format": 0.1}}}},
        {"model": {"path": "tiny-wide"}},
        {"algorithm": {"name": "ppo"}},
    ],
)
def test_a_resume_that_would_mix_two_runs_is_refused_and_changes_nothing(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = {"env": {"id": "Shapes-v0"}, "model": {"path": "tiny"}}
    saved = begin(begun, tmp_path, monkeypatch)
    with pytest.raises(UserInputError, match=r"cannot go on with other settings \((env|model|algorithm)"):
        PolicyRun(parse_config(begun | changes), tmp_path, resume=True)
    assert (tmp_path / "config.yaml").read_text() == saved


def test_a_resume_with_other_settings_lists_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = {"env": {"id": "Shapes-v0"}, "model": {"path": "tiny"}}
    begin(begun, tmp_path, monkeypatch)
    PolicyRun(parse_config(begun | {"algorithm": {"iterations": 7}}), tmp_path, resume=True)
    assert "algorithm.iterations 100 → 7" in " ".join(capsys.readouterr().out.split())


def test_a_resume_without_anything_to_do_or_to_go_on_from_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = {"env": {"id": "Shapes-v0"}, "model": {"path": "tiny"}, "algorithm": {"iterations": 2}}
    PolicyRun(parse_config(begun), tmp_path, resume=True)
    assert "the run begins anew" in " ".join(capsys.readouterr().out.split())
    begin(begun, tmp_path, monkeypatch)
    (tmp_path / "result.json").write_text('{"status": "done", "iterations": 2}')
    assert PolicyRun(parse_config(begun), tmp_path, resume=True).execute() == {"status": "done", "iterations": 2}
    assert "to go on, add algorithm.iterations above 2" in " ".join(capsys.readouterr().out.split())


def begin(settings: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make the folder of a run with a checkpoint; its saved configuration."""
    monkeypatch.setattr(lifecycle, "latest_checkpoint", lambda *_: folder / "checkpoints/iteration-000002")
    save_config(parse_config(settings), folder / "config.yaml")
    return (folder / "config.yaml").read_text()
