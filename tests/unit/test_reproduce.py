"""`rl-vlm reproduce`: verdicts on finished runs, which it does not repeat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_vlm.config.recipes import recipe_names
from rl_vlm.runs.reproduce import Expected, ReproductionError, chosen_seeds, claims, reproduce
from rl_vlm.types import UserInputError


def finished(folder: Path, *accuracies: float) -> None:
    """A run folder with these evaluations."""
    folder.mkdir(parents=True)
    lines = [
        {
            "iteration": 30 * k,
            "accuracy/default": share,
            "accuracy_low/default": share - 0.1,
            "accuracy_high/default": share,
        }
        for k, share in enumerate(accuracies)
    ]
    (folder / "eval.jsonl").write_text("\n".join(map(json.dumps, reversed(lines))))
    (folder / "result.json").write_text('{"status": "done"}')


@pytest.mark.parametrize(
    ("second", "control", "kept", "said"),
    [
        (0.95, 0.25, True, "quickstart: reproduced"),
        (
            0.85,
            0.25,
            False,
            "seed 4: accuracy/default 0.250 → 0.850 (0.75 to 0.85); accuracy/default after: 0.850 is not",
        ),
        (0.95, 0.60, False, "control (algorithm.shuffle_rewards=true): accuracy/default 0.250 → 0.600"),
    ],
)
def test_a_claim_holds_if_all_seeds_learn_and_the_control_does_not(
    tmp_path: Path, second: float, control: float, kept: bool, said: str
) -> None:
    finished(tmp_path / "seed-3", 0.25, 0.7, 0.97)
    finished(tmp_path / "seed-4", 0.25, second)
    finished(tmp_path / "control", 0.25, control)
    lines: list[str] = []
    assert reproduce("quickstart", chosen_seeds("", tmp_path), tmp_path, lines.append) is kept
    assert any(said in line for line in lines)
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["reproduced"] is kept and verdict["runs"][0]["curve"] == {"0": 0.25, "30": 0.7, "60": 0.97}


def test_bounds_of_what_changes() -> None:
    expected = Expected(gain={"reward/default": (0.3, 1.0)}, after={"score": (-5.0, 0.0)})
    assert not expected.misses({"reward/default": 0.1}, {"reward/default": 0.5, "score": -4.0})
    assert len(expected.misses({"reward/default": 0.3}, {"reward/default": 0.5, "score": -6.0})) == 2


def test_seeds_are_given_or_drawn() -> None:
    assert chosen_seeds("3, 4", Path("nowhere")) == [3, 4] and len(set(chosen_seeds("", Path("nowhere")))) == 2
    with pytest.raises(UserInputError, match="--seeds"):
        chosen_seeds("three", Path("nowhere"))


def test_claims_are_about_recipes(tmp_path: Path) -> None:
    assert claims().keys() <= set(recipe_names())
    with pytest.raises(UserInputError, match="Did you mean quickstart"):
        reproduce("quickstat", [0], tmp_path, print)


def test_a_run_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(ReproductionError, match="seed-1 ended with code 1"):
        reproduce("quickstart", [1], tmp_path, print)
