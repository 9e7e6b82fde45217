"""A run folder belongs to one process at a time, and a resume that is refused leaves it as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_vlm.config import PolicyConfig
from rl_vlm.monitoring.display import ProgressDisplay
from rl_vlm.runs import run_folder
from rl_vlm.runs.lifecycle import BaseRun
from rl_vlm.runs.run_folder import opened_run_folder
from rl_vlm.types import UserInputError


@pytest.mark.parametrize("how", [{"resume": True, "overwrite": False}, {"resume": False, "overwrite": True}])
def test_a_run_that_is_under_way_is_not_opened_again(
    how: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "_PATIENCE_S", 0.3)
    with opened_run_folder(tmp_path / "run", resume=False, overwrite=False) as folder:
        (folder / "progress.csv").write_text("1\n")
        with pytest.raises(UserInputError, match="Another process is writing to the run folder"):
            opened_run_folder(folder, **how).__enter__()
        assert (folder / "progress.csv").exists()
    with opened_run_folder(folder, **how):
        assert (folder / "progress.csv").exists() is how["resume"]


class Refused(BaseRun):
    """A run whose start fails, or is interrupted."""

    error: BaseException = UserInputError("resume with the configuration that the run began with.")

    def _loop(self) -> None:
        raise self.error

    def _outcome(self) -> dict[str, Any]:
        return {}

    def _position(self) -> int:
        return 0

    def _new_display(self) -> ProgressDisplay:
        return ProgressDisplay(1, 0)

    def _write_checkpoint(self, folder: Path) -> None:
        raise AssertionError("nothing is saved")


@pytest.mark.parametrize(("resume", "kept"), [(True, True), (False, False)])
def test_a_refused_resume_leaves_the_configuration(resume: bool, kept: bool, tmp_path: Path) -> None:
    for name in ("config.yaml", "result.json"):
        (tmp_path / name).write_text("as it was")
    with pytest.raises(UserInputError):
        Refused(PolicyConfig(), tmp_path, resume).execute()
    assert {(tmp_path / name).read_text() == "as it was" for name in ("config.yaml", "result.json")} == {kept}


@pytest.mark.parametrize(
    ("rewards", "before", "after"),
    [
        ([], None, None),
        ([0.5], None, 0.5),
        ([0.1, 0.5, 0.9], 0.1, 0.9),
        ([0.0, 0.2, 0.4, 0.6, 0.8], 0.1, 0.7),
        ([0.0] * 5 + [1.0] * 6, 0.0, 1.0),
    ],
)
def test_rewards_before_and_after_are_of_different_rows(
    rewards: list[float], before: float | None, after: float | None, tmp_path: Path
) -> None:
    run = Refused(PolicyConfig(), tmp_path, False)
    run.rewards = rewards
    result = run._result("done")
    approximate = [value if value is None else pytest.approx(value) for value in (before, after)]
    assert [result["reward_before"], result["reward_after"]] == approximate
