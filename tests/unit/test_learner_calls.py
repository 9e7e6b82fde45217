"""Calls to learners of which some are dead."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import ActorDiedError
from ray.exceptions import OutOfMemoryError as NodeOutOfMemoryError

from rl_vlm.algorithms import learners, policy
from rl_vlm.algorithms.checkpoint import Checkpoint
from rl_vlm.algorithms.evaluation import evaluated_weights
from rl_vlm.algorithms.grpo import GRPO
from rl_vlm.algorithms.learners import (
    LearnerDiedError,
    LearnerLostError,
    LearnerOutOfMemoryError,
    Learners,
)
from rl_vlm.algorithms.preference_sac import PreferenceSAC
from rl_vlm.config import LearnerSection, PolicyConfig, parse_config, save_config
from rl_vlm.evaluation.sight_faults import Fault, SightError
from rl_vlm.learning.plan import UpdateBatch
from rl_vlm.learning.update import UnfitImagesError
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.rollout.rollouts import TooManyFailuresError
from rl_vlm.rollout.sampler import RoundAbandonedError, SamplingError
from rl_vlm.runs import lifecycle
from rl_vlm.runs.policy import PolicyRun
from rl_vlm.types import RLVLMError, UserInputError


class Reset(PreferenceSAC):
    """The first update of the critics' reset meets learners that die `deaths` times."""

    def __init__(self, deaths: int) -> None:
        self.deaths, self.asked = deaths, []  # type: ignore[var-annotated]
        self.settings = SimpleNamespace(sac=SimpleNamespace(batch_size=2, log_std_bounds=(-5, 2)), exploration_k=1)  # type: ignore[assignment]
        rows = np.zeros((4, 1), np.float32)
        self.replay: Any = SimpleNamespace(
            sample_rows=lambda count, rng: np.zeros(count, np.int64),
            observations=rows, actions=rows, rewards=rows, next_observations=rows, continues=rows,
        )  # fmt: skip
        self._rng = np.random.default_rng(0)
        self._sums = Counter()  # type: ignore[assignment]
        self.learners: Any = SimpleNamespace(update=self._update_learners)

    def _update_learners(self, batches: Sequence[Any]) -> list[Any] | None:
        self.asked.append(batches[0].reset_critics)
        return None if len(self.asked) <= self.deaths else [({}, [])]


@dataclass
class Result:
    """As RLlib's: a failed call holds its exception and raises nothing."""

    value: Any
    actor_id: int = 0

    @property
    def ok(self) -> bool:
        return not isinstance(self.value, Exception)

    def get(self) -> Any:
        return self.value


class Group:
    """As RLlib's group of learners: it calls them, and takes one that raises, whatever it raises, for dead.

    Those in `dead` have died, and nobody has noticed yet. `update` are the first answers to an update, or what it
    raises; `asked` lists who was called.
    """

    is_local = False

    def __init__(self, count: int, dead: Sequence[int] = (), update: Any = ()) -> None:
        self.config = SimpleNamespace(num_learners=count)
        self.asked, self.known_dead, self._dead, self._update = list[int](), set[int](), dead, update
        self._learners = [SimpleNamespace(_learner_index=k) for k in range(count)]
        self._worker_manager = SimpleNamespace(
            healthy_actor_ids=lambda: [k for k in range(count) if k not in self.known_dead],
            foreach_actor_async=self._begin,
            fetch_ready_async_reqs=self._fetch,
        )
        self._ready: list[Result] = []

    def foreach_learner(
        self,
        function: Any,
        timeout_seconds: float,
        remote_actor_ids: list[int] | None = None,
        healthy_only: bool = True,
    ) -> list[Result]:
        chosen = range(len(self._learners)) if remote_actor_ids is None else remote_actor_ids
        called = [k for k in chosen if not healthy_only or k not in self.known_dead]
        self.asked += called
        return [self._noticed(self._call(function, k)) for k in called]

    def _call(self, function: Any, learner: int) -> Result:
        try:
            return Result(RuntimeError("died") if learner in self._dead else function(self._learners[learner]), learner)
        except Exception as error:
            return Result(error, learner)

    def _noticed(self, result: Result) -> Result:
        if not result.ok:
            self.known_dead.add(result.actor_id)
        return result

    def _begin(self, method: str, tag: str, kwargs: list[dict[str, Any]], remote_actor_ids: list[int]) -> None:
        assert method == "update" and len(kwargs) == len(remote_actor_ids)
        self._tag = tag
        values = [self._update] if isinstance(self._update, Exception) else self._update
        # As RLlib's, in the order of the answers; who is silent is left out.
        self._ready = [Result(value, learner) for learner, value in reversed(list(enumerate(values)))]

    def _fetch(self, tags: str, timeout_seconds: float) -> list[Result]:
        assert tags == self._tag
        return [self._noticed(self._ready.pop(0))] if self._ready else []


def unfit(learner: Any) -> Any:
    raise UnfitImagesError("t0 has 4 image tokens, and the learner makes 6 of its images.")


def on_one_learner(group: Group, function: Any, in_step: bool = False) -> Any:
    settings: Any = SimpleNamespace(in_step=in_step)
    return Learners(group, settings, lambda: None, lambda: None, Counter()).call(function)


def on_all_learners(group: Group, function: Any) -> Any:
    return on_one_learner(group, function, in_step=True)


def on_every_learner(group: Group, function: Any) -> None:
    Learners(group, None, lambda: None, lambda: None, Counter()).call_each(function)  # type: ignore[arg-type]


def test_a_dead_learners_exception_is_never_an_answer() -> None:
    assert on_one_learner(Group(2, dead=[0]), lambda _: 7) == 7
    on_every_learner(Group(2), lambda _: 0)
    for call, count, dead in ((on_one_learner, 0, ()), (on_one_learner, 1, (0,)), (on_every_learner, 2, (1,))):
        with pytest.raises(LearnerLostError):
            call(Group(count, dead), lambda _: 0)


@pytest.mark.parametrize("call", [on_one_learner, on_all_learners, on_every_learner])
def test_an_error_on_purpose_is_an_answer_and_no_death(call: Any) -> None:
    group = Group(2)
    with pytest.raises(UnfitImagesError):
        call(group, unfit)
    assert not group.known_dead
    assert call(group, lambda learner: learner._learner_index) == (None if call is on_every_learner else 0)


# --- what an error of an update means


class Supervisor(Learners):
    """Replacements are counted and not made."""

    def __init__(self, group: Group) -> None:
        super().__init__(group, LearnerSection(), lambda: None, lambda: None, Counter())
        self.replaced = 0

    def replace(self, error: Exception) -> None:
        self.replaced += 1


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learners, "ray", SimpleNamespace(put=lambda value: value))
    monkeypatch.setattr(learners, "TrainingData", lambda **fields: fields)
    monkeypatch.setattr(
        learners, "time", SimpleNamespace(monotonic=itertools.count(0, 600).__next__, perf_counter=float)
    )  # seconds


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_an_update_that_does_not_fit_is_not_a_dead_learner(no_ray: None, error: Exception) -> None:
    algorithm = Supervisor(Group(2, update=error))
    with pytest.raises(LearnerOutOfMemoryError):
        algorithm.update(["batch", "batch"])
    assert algorithm.replaced == 0


@pytest.mark.parametrize(
    ("group", "why"),
    [
        (Group(2, dead=[1], update=RuntimeError("Connection closed by peer")), "a collective broke"),
        (Group(1, update=["one result"]), "RLlib left out a dead learner"),
        (Group(2, update=["one result"]), "one is silent, though it lives"),
        (Group(1, dead=[0], update=NodeOutOfMemoryError("killed by the memory monitor")), "Ray killed it"),
    ],
)
def test_dead_learners_are_replaced(no_ray: None, group: Group, why: str) -> None:
    algorithm = Supervisor(group)
    assert algorithm.update(["batch", "batch"]) is None, why
    assert algorithm.replaced == 1


def test_a_learner_that_has_died_is_replaced_without_asking_those_that_wait_for_it(no_ray: None) -> None:
    """NCCL lets them wait for ever, and they would not answer."""
    group = Group(2, update=ActorDiedError())
    algorithm = Supervisor(group)
    assert algorithm.update(["batch", "batch"]) is None and algorithm.replaced == 1
    assert group.asked == []


def test_learners_get_ten_times_as_long_as_they_took_for_such_a_batch(
    no_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Supervisor(Group(1, update=["result"]))
    update = UpdateBatch([], [False], {}, {}, [])

    def took(batch: Any, seconds: float) -> float:
        """What such batches may take after one that took so long."""
        ticks = iter([0.0, seconds])
        monkeypatch.setattr(learners, "time", SimpleNamespace(monotonic=float, perf_counter=lambda: next(ticks)))
        assert learner.update([batch]) == ["result"]
        return learner.timeout_s(type(batch))

    assert learner.timeout_s(str) == learner.timeout_s(int) == 1800.0
    assert took("scores", 20.0) == took("other scores", 15.0) == 200.0 and learner.timeout_s(int) == 1800.0
    assert (took(1, 0.1), took(2, 1000.0)) == (120.0, 1800.0)
    assert took(update, 0.05) == 1800.0  # nothing was to be learned
    assert took(replace(update, active=[True]), 30.0) == 300.0


class Replacing(Learners):
    """Each new group fails to start with the next of `failures`."""

    def __init__(self, failures: list[Exception], max_restarts: int) -> None:
        self.failures, self.restored, self.restarts = failures, 0, Counter[str]()
        old = SimpleNamespace(_is_shut_down=True)
        settings = LearnerSection(max_restarts=max_restarts)
        super().__init__(old, settings, self._build, self._restored, self.restarts)

    def _build(self) -> Any:
        if self.failures:
            raise self.failures.pop(0)
        return SimpleNamespace(_is_shut_down=False)

    def _restored(self) -> None:
        self.restored += 1


def test_learners_that_start_on_a_dying_node_are_replaced_again() -> None:
    learners = Replacing([ActorDiedError(), ActorDiedError()], max_restarts=3)
    learners.replace(RuntimeError("the first one died"))
    assert (learners.restored, learners.restarts["learner"]) == (1, 3)
    learners = Replacing([ActorDiedError(), ActorDiedError()], max_restarts=2)
    with pytest.raises(LearnerDiedError):
        learners.replace(RuntimeError("the first one died"))


class Averaging:
    """The exchange of weights around an evaluation; `fails` is what giving the trained ones back raises."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.run_config = PolicyConfig.model_validate({"evaluation": {"weights": "ema"}, "learner": {"ema_decay": 0.9}})
        self.version, self.published, self.fails = 4, [], fails  # type: ignore[var-annotated]
        self.learners = SimpleNamespace(call=self._call)
        self.publish_restored = self.published.append

    def _call(self, function: Any) -> Any:
        policy = SimpleNamespace(payload=lambda version: f"trained {version}")
        learner = SimpleNamespace(averaged_adapter=lambda version: "average", policy=policy)
        if self.published and self.fails is not None:
            raise self.fails
        return function(learner)


def test_the_trained_weights_come_back_after_an_evaluation_that_fails() -> None:
    algorithm = Averaging()
    with evaluated_weights(algorithm):  # type: ignore[arg-type]
        assert algorithm.published == ["average"]
    assert algorithm.published == ["average", "trained 4"]
    for fails in (None, LearnerLostError("gone")):
        algorithm = Averaging(fails)
        with pytest.raises(RoundAbandonedError), evaluated_weights(algorithm):  # type: ignore[arg-type]
            raise RoundAbandonedError("Sampling was stopped.")
        assert algorithm.published == ["average", "trained 4"][: 2 - bool(fails)]
    with pytest.raises(LearnerLostError), evaluated_weights(Averaging(LearnerLostError("gone"))):  # type: ignore[arg-type]
        pass


def test_one_learner_that_refuses_among_several_is_heard() -> None:
    group = Group(3)
    with pytest.raises(UnfitImagesError):
        on_all_learners(group, lambda learner: unfit(learner) if learner._learner_index == 2 else 1)
    with pytest.raises(LearnerLostError, match="Not all learners answered: division"):
        on_all_learners(group, lambda learner: 1 / 0)
    assert group.known_dead == {0, 1, 2}


def test_answers_come_in_the_order_of_the_batches_and_an_error_of_learners_that_all_live_as_it_is(no_ray: None) -> None:
    assert Supervisor(Group(2, update=["first", "second"])).update(["batch", "batch"]) == ["first", "second"]
    algorithm = Supervisor(Group(2, update=RuntimeError("a defect")))
    with pytest.raises(RuntimeError, match="a defect"):
        algorithm.update(["batch", "batch"])
    assert algorithm.replaced == 0


def test_the_critics_are_reset_though_the_learner_died_before_it() -> None:
    algorithm = Reset(deaths=2)
    algorithm._update(3, reset=True)
    assert algorithm.asked == [True, True, True]
    algorithm = Reset(deaths=1)
    algorithm._update(3)
    assert algorithm.asked == [False]  # ordinary updates are lost with it


def test_a_resumed_run_counts_its_learners_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a learner that always dies in the first update would be replaced for ever."""
    payload = AdapterPayload(0, b"", "{}", "")
    monkeypatch.setattr(AdapterPayload, "state", lambda self: {})
    saved = Checkpoint(payload, {}, {"updates": 0, "restarts": {}, "rollouts": {}, "torch_rng": []})
    monkeypatch.setattr(policy, "read_checkpoint", lambda folder: saved)
    published: list[int] = []
    # Of a run that was resumed at its very beginning: no version is newer than the first.
    algorithm: Any = GRPO.__new__(GRPO)
    algorithm.version = algorithm.first_version = 0
    algorithm.updates, algorithm.restarts = 1, Counter(learner=2)
    algorithm._service = SimpleNamespace(newest_version=lambda: 0)
    algorithm.rollouts = SimpleNamespace(restore=lambda state, counts: None, dropped=Counter())
    algorithm.learners = SimpleNamespace(call_each=lambda function: None)
    algorithm.set_state = lambda state: None
    algorithm.publish = lambda adapter: published.append(adapter.version)
    algorithm.last_checkpoint = Path("anywhere")
    algorithm.restore_learners()
    assert algorithm.restarts == {"learner": 2} and published == [1]
    algorithm.go_on_from(saved, new_process=True)
    assert not algorithm.restarts.total() and published == [1, 0]


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
    monkeypatch.setattr(PolicyRun, "_tell_failures", lambda _: None)
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


def begin(settings: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make the folder of a run with a checkpoint; its saved configuration."""
    monkeypatch.setattr(lifecycle, "latest_checkpoint", lambda *_: folder / "checkpoints/iteration-000002")
    save_config(parse_config(settings), folder / "config.yaml")
    return (folder / "config.yaml").read_text()
