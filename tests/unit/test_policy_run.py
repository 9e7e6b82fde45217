"""What a policy run does where sampling ends it, and which resumes it refuses. Nothing is started."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_vlm.algorithms.learners import LearnerDiedError
from rl_vlm.config import parse_config, save_config
from rl_vlm.envs.registry import survey
from rl_vlm.evaluation.sight_faults import Fault, SightError
from rl_vlm.rollout.curriculum import make_task_source
from rl_vlm.rollout.rollouts import TooManyFailuresError
from rl_vlm.rollout.sampler import SamplingError
from rl_vlm.runs.policy import PolicyRun, _check_tasks
from rl_vlm.types import RLVLMError, UserInputError


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
    monkeypatch.setattr(PolicyRun, "_checkpoint", save)
    run = PolicyRun.__new__(PolicyRun)
    run.algorithm, run.saved_at = SimpleNamespace(updates=updates), 2
    monkeypatch.setattr(PolicyRun, "_tell_failures", lambda _: None)
    with pytest.raises(type(error), match=str(error)):
        run._to_the_end()
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


def test_a_resume_with_other_tasks_is_refused_before_anything_starts(tmp_path: Path) -> None:
    stages = [{"name": "easy", "start": 0}, {"name": "hard", "start": 100}]
    begun = parse_config({"env": {"id": "Shapes-v0"}, "curriculum": {"stages": stages}})
    source = make_task_source(begun, survey(begun.env, "train").sizes["train"])
    checkpoint = tmp_path / "checkpoints/iteration-000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"rollouts": {"tasks": {"source": source.state()}}}))
    _check_tasks(begun, checkpoint)
    other = parse_config(
        {"env": {"id": "Shapes-v0"}, "curriculum": {"stages": [stages[0], {"name": "harder", "start": 100}]}}
    )
    with pytest.raises(UserInputError, match="has the stages easy, hard"):
        _check_tasks(other, checkpoint)
    with pytest.raises(UserInputError, match="curriculum.stages"):
        _check_tasks(parse_config({"env": {"id": "Shapes-v0"}}), checkpoint)


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
    monkeypatch.setattr(PolicyRun, "_latest_checkpoint", lambda self: folder / "checkpoints/iteration-000002")
    monkeypatch.setattr(PolicyRun, "_check_fits", lambda *_: None)
    save_config(parse_config(settings), folder / "config.yaml")
    return (folder / "config.yaml").read_text()
