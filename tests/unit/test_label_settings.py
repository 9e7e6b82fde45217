"""The configuration of labels and reward model: defaults, mistakes, and what is built from it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from label_support import pair
from pydantic import ValidationError

from rl_vlm.config import LabelsSection, parse_config
from rl_vlm.labelling.labeller import VLMLabeller
from rl_vlm.labelling.teachers import ScriptedTeacher, build_labeller
from rl_vlm.preference.feedback import build_feedback
from rl_vlm.types import UserInputError


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 3}, "steps"),
        ({"source": "endpoint"}, "endpoint.url is needed"),
        ({"source": "cache"}, "must name a label store"),
        ({"source": "cache", "cache": "None"}, "must name a label store"),
        ({"source": "cache", "cache": "store", "coin_flips": True}, "replayed as they were labelled: leave out one"),
        ({"source": "vlm", "cache": "store", "flip": True}, "replayed as they were labelled: leave out one"),
        ({"teacher": {"eps_mistake": 2}}, "eps_mistake"),
        ({"teacher": {"gamma": 0.0}}, "gamma"),
        ({"orders": 1}, "orders"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LabelsSection(**wrong)


def test_labellers_are_built_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = build_labeller(LabelsSection(source="scripted", teacher={"eps_mistake": 1.0}))  # type: ignore[arg-type]
    assert isinstance(teacher, ScriptedTeacher)
    assert asyncio.run(teacher.label([pair(3, 20)]))[0].value == 1  # always mistaken
    generate = build_labeller(LabelsSection(source="generate"), env_id="CartPole-v1")
    assert isinstance(generate, VLMLabeller)
    endpoint = {"url": "http://h/v1", "token_env": "TOKEN_OF_TEST"}
    monkeypatch.setenv("TOKEN_OF_TEST", "t")
    assert isinstance(build_labeller(LabelsSection(source="endpoint", endpoint=endpoint), env_id="soccer"), VLMLabeller)  # type: ignore[arg-type]
    with pytest.raises(UserInputError, match="served model"):
        build_labeller(LabelsSection(), env_id="soccer")


@pytest.mark.parametrize(("source", "name"), [("clip", "ClipSimilarity"), ("itm", "MatchingSimilarity")])
def test_models_of_picture_and_text_compute_where_the_run_says(
    source: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    monkeypatch.setattr(f"rl_vlm.labelling.teachers.{name}", lambda model, text, device: found.append(device))
    build_labeller(LabelsSection(source=source), env_id="soccer", device="cuda:1")  # type: ignore[arg-type]
    assert found == ["cuda:1"]


def test_a_run_gives_the_labeller_the_device_of_its_learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    monkeypatch.setattr("rl_vlm.preference.feedback.driver_device", lambda run: "meta")
    monkeypatch.setattr("rl_vlm.preference.feedback.RewardEnsemble", lambda *given: found.append(given[-1]))
    monkeypatch.setattr("rl_vlm.preference.feedback.Feedback", lambda *_: None)
    monkeypatch.setattr("rl_vlm.labelling.teachers.build_labeller", lambda *given: found.append(given[-1]))
    preference = {"reward": "learn_from_preference", "labels": {"source": "clip"}}
    run = parse_config(
        {"algorithm": {"name": "preference_sac"}, "env": {"id": "ContinuousCartPole-v0"}, "preference": preference}
    )
    build_feedback(run, tmp_path, (None, None), (4, 1))  # type: ignore[arg-type]
    assert found == ["meta"] * 2
