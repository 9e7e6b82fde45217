"""`rl-vlm eval` of a preference run: which checkpoint is played, what is reported, and what is refused. No Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from preference_loop import run_config
from safetensors.torch import save_file
from tables import table

from rl_vlm.algorithms.checkpoint import write_state
from rl_vlm.cli import run as rl_vlm
from rl_vlm.config import PreferenceSection, SACSection, parse_config, save_config
from rl_vlm.control_envs.cartpole import ContinuousCartPole
from rl_vlm.preference.collector import NumpyActor
from rl_vlm.preference.evaluation import evaluate, evaluation_seeds
from rl_vlm.preference.sac_networks import SACNetworks
from rl_vlm.preference.schedule import first_session_step, next_boundary, phase, session_size
from rl_vlm.types import UserInputError


def save_agent(checkpoint: Path, seed: int = 0, observations: int = 4) -> NumpyActor:
    """A checkpoint as far as evaluation reads it; returns its policy."""
    networks = SACNetworks(observations, 1, SACSection(hidden=16, depth=2), seed)
    checkpoint.mkdir(parents=True)
    save_file(networks.state_dict(), checkpoint / "agent.safetensors")
    write_state(checkpoint, {"step": int(checkpoint.name.removeprefix("step-"))})
    layers = [(layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in networks.actor]
    return NumpyActor(layers, (-5.0, 2.0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with two checkpoints and the beginning of a third."""
    folder = tmp_path / "run"
    save_agent(folder / "checkpoints" / "step-00000100", seed=1)
    save_agent(folder / "checkpoints" / "step-00000200", seed=2)
    (folder / "checkpoints" / "step-00000300").mkdir()
    save_config(run_config(), folder / "config.yaml")
    return folder


def test_the_latest_complete_checkpoints_agent_is_played(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    out = tmp_path / "eval.json"
    assert rl_vlm(["eval", str(folder), "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(out.read_text())
    assert found["step"] == 200 and found["env"] == "ContinuousCartPole-v0"
    actor = save_agent(tmp_path / "step-1", seed=2)
    seeds = evaluation_seeds(run_config())
    expected = evaluate(ContinuousCartPole(horizon=30, image_size=32), actor, seeds)
    returns = [episode["true_return"] for episode in found["episodes"]]
    assert returns == [result.true_return for result in expected] and len(set(returns)) == 3
    assert found["reward/success"] == pytest.approx(np.mean(returns)) and found["items/success"] == 3
    assert [episode["seed"] for episode in found["episodes"]] == seeds
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert after == before  # a run that goes on is not disturbed


BREAKING = f"{__file__}:Breaking"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["{run}/config.yaml"], 2, "with --run-dir"),
        (["{run}", "--adapter", "{run}"], 2, "no adapter"),
        (["{run}/config.yaml", "--run-dir", "{run}/checkpoints"], 2, "no complete checkpoint"),
        (["{run}", "--out", "{run}"], 2, "--out"),
        (["{run}/config.yaml", "--run-dir", "{other}"], 2, "takes 7 observations"),
        (["{run}/config.yaml", "--run-dir", "{corrupt}"], 2, "corrupt"),
        (["{run}", "env.id={breaking}", "env.kwargs={{}}"], 1, "ZeroDivisionError: the pole broke"),
    ],
)
def test_what_cannot_be_evaluated_ends_with_one_sentence(
    arguments: list[str], code: int, words: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_agent(tmp_path / "step-7", observations=7)
    save_agent(tmp_path / "step-8")
    (tmp_path / "step-8" / "agent.safetensors").write_bytes(b"not safetensors")
    places = {"run": folder, "other": tmp_path / "step-7", "corrupt": tmp_path / "step-8", "breaking": BREAKING}
    assert rl_vlm(["eval", *(argument.format(**places) for argument in arguments)]) == code
    captured = capsys.readouterr()
    error = captured.err.strip()
    lines = [line for line in error.splitlines() if "step-00000200 is taken instead" not in line]
    assert len(lines) == 1 and words in lines[0], error
    assert not captured.out


@pytest.mark.slow
def test_neither_evaluation_nor_a_dry_run_waits_for_rllib(folder: Path) -> None:
    code = (
        "import sys; from rl_vlm.cli import run; "
        f"codes = [run(['eval', {str(folder)!r}]), run(['train', {str(folder)!r}, '--dry-run'])]; "
        "print(codes, 'ray.rllib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 0] False"


class Breaking(ContinuousCartPole):
    """Breaks at its third step."""

    def step(self, action: np.ndarray) -> object:  # type: ignore[override]
        if self._steps == 2:
            raise ZeroDivisionError("the pole broke")
        return super().step(action)


# --- When what happens in the preference loop


def settings(**changes: Any) -> PreferenceSection:
    base = {"total_steps": 1000, "random_steps": 100, "exploration_steps": 50, "session_pairs": 40, "max_feedback": 100}
    return PreferenceSection(**{**base, **changes})


def test_random_steps_come_first_then_exploration_then_learning() -> None:
    assert [phase(settings(), step) for step in (0, 99, 100, 149, 150, 999)] == [
        "random", "random", "explore", "explore", "learn", "learn",
    ]  # fmt: skip
    assert first_session_step(settings()) == 150
    assert phase(settings(exploration_steps=0), 100) == "learn"


def test_collecting_stops_where_something_changes() -> None:
    assert next_boundary(settings(), 0, 150) == 100
    assert next_boundary(settings(), 100, 150) == 150
    assert next_boundary(settings(), 150, 400) == 400
    assert next_boundary(settings(), 400, None) == 1000


@pytest.mark.parametrize(
    ("changes", "asked", "sizes"),  # asked: step, and pairs that were asked about before
    [
        ({}, [(500, 0), (500, 40), (500, 80), (500, 100), (500, 130)], [40, 40, 20, 0, 0]),
        ({"feedback_schedule": 1}, [(0, 0), (500, 0), (750, 0), (1000, 0)], [40, 20, 10, 1]),
        ({"feedback_schedule": 2, "max_feedback": 10_000}, [(1, 0), (501, 0), (901, 0)], [40, 80, 400]),
    ],
)
def test_sessions_keep_to_their_schedule(
    changes: dict[str, Any], asked: list[tuple[int, int]], sizes: list[int]
) -> None:
    assert [session_size(settings(**changes), *each) for each in asked] == sizes


@pytest.mark.parametrize(("data", "words"), table("refused_settings")["preference_schedule"])
def test_settings_that_cannot_work_are_refused(data: dict[str, Any], words: str) -> None:
    with pytest.raises(UserInputError, match=words):
        parse_config({"algorithm": {"name": "preference_sac"}} | data)
