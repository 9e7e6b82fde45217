"""Distillation: what a teacher says of a policy's tokens, and the gradient that follows from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_support import (
    adapted_policy,
    first_gradient,
    gradient_vector,
    picture,
    reference_logits,
    reference_logprobs,
    text_side,
)
from distillation_support import TOP, check_scores, group_of, scored, segments_of
from pydantic import ValidationError

from rl_vlm.algorithms.distill import Distill
from rl_vlm.config import TeacherModelSection, parse_config
from rl_vlm.learning.distillation import divergence, toward_teacher
from rl_vlm.learning.experience import Estimate
from rl_vlm.rollout.env_pool import GroupFailedError
from rl_vlm.runs.policy_checks import inspect_policy_run
from rl_vlm.types import UserInputError


def kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(one || other) of probabilities [N, V], some of which may be 0."""
    return (one * (one.clamp(min=1e-30) / other.clamp(min=1e-30)).log()).sum(-1)


# --- what a teacher says


def test_scores_are_the_teachers_own_distribution_on_every_segment(tiny_folder: Path) -> None:
    check_scores(tiny_folder)


def test_a_hint_and_other_pictures_change_what_the_teacher_says(tiny_folder: Path) -> None:
    group = group_of(tiny_folder, side=96)
    for one in group.trajectories:
        one.info["truth"] = "three"
    plain = scored(tiny_folder, group)
    other = (picture(np.random.default_rng(9), 40, 40),)
    changed = [
        scored(tiny_folder, group, hint="The answer is {truth}."),
        scored(tiny_folder, group, max_pixels=64 * 64),  # it sees smaller ones than the policy
        scored(tiny_folder, group, view="blank"),
        scored(tiny_folder, group, other, view="swapped"),
    ]
    for scores in changed:
        assert [one.ids.shape for one in scores] == [(len(one.logprobs), 0) for one in plain]
        assert all(np.abs(a.logprobs - b.logprobs).max() > 1e-2 for a, b in zip(scores, plain, strict=True))
    with pytest.raises(GroupFailedError, match="teacher.hint"):
        scored(tiny_folder, group, hint="It is {answer}.")


# --- what is learned from it


def test_advantages_are_what_the_teacher_finds_likelier() -> None:
    gaps = {"a": np.array([0.5, -1.0], np.float32)}
    rewarded = Estimate({"a": np.array([2.0, 2.0], np.float32)})
    settings = TeacherModelSection(path="tiny", weight=3.0, reward_weight=0.25)
    np.testing.assert_allclose(toward_teacher(gaps, rewarded, settings).advantages["a"], [2.0, -2.5])
    forward = settings.model_copy(update={"divergence": "forward"})
    np.testing.assert_allclose(toward_teacher(gaps, rewarded, forward).advantages["a"], [0.5, 0.5])


def test_divergences_equal_sums_over_the_vocabulary() -> None:
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 9, generator=rng)
    policy, teacher = torch.log_softmax(logits, -1), torch.randn(4, 3, generator=rng).log_softmax(-1)
    ids = torch.tensor([[0, 3, 8]]).expand(4, 3)
    full = torch.zeros(4, 9).scatter(1, ids, teacher.exp())
    mean = (full + policy.exp()) / 2

    likely = policy.gather(1, ids)
    torch.testing.assert_close(divergence(likely, teacher - 0.7, "forward"), kl(full, policy.exp()))
    torch.testing.assert_close(divergence(likely, teacher - 0.7, "jsd"), (kl(full, mean) + kl(policy.exp(), mean)) / 2)
    fewer = torch.cat([teacher, torch.full((4, 1), -torch.inf)], 1)
    padded = torch.cat([likely, torch.full((4, 1), -1.0)], 1)
    torch.testing.assert_close(divergence(padded, fewer, "jsd"), divergence(likely, teacher, "jsd"))


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
def test_the_gradient_equals_that_of_a_plain_loop(tiny_folder: Path, kind: str) -> None:
    group = group_of(tiny_folder)
    for one, scores in zip(group.trajectories, scored(tiny_folder, group, divergence=kind), strict=True):
        one.teacher = scores
    teacher = {"path": str(tiny_folder), "divergence": kind, "weight": 0.7}
    teacher |= {"top_k": TOP} if kind != "reverse" else {}
    run = parse_config(
        {"model": {"path": str(tiny_folder)}, "algorithm": {"name": "distill", "mismatch": "none"},
         "rollout": {"temperature": 1.0, "group_size": 1}, "learner": {"micro_batch_tokens": 300}, "teacher": teacher}
    )  # fmt: skip
    policy = adapted_policy(tiny_folder, learner__micro_batch_tokens=300)
    members = group.trajectories
    gaps = {one.trajectory_id: one.teacher.logprobs - one.logprobs[one.loss_mask] for one in members if one.teacher}
    estimate = toward_teacher(gaps, None, run.teacher)
    found = first_gradient(policy, run, group, estimate)

    policy.model.zero_grad(set_to_none=True)
    loss = torch.zeros(())
    for one in members:
        assert one.teacher is not None
        if kind == "reverse":
            parts = [reference_logprobs(tiny_folder, policy.model, i, shown)[m[1:]] for i, m, shown in segments_of(one)]
            distance = -0.7 * torch.from_numpy(gaps[one.trajectory_id]) * torch.cat(parts)
        else:
            text = text_side(tiny_folder)
            rows = [reference_logits(tiny_folder, policy.model, i, s)[:-1][m[1:]] for i, m, s in segments_of(one)]
            logits = torch.cat(rows)
            logits[:, torch.from_numpy(text.codec.suppressed_token_ids(text.vocab_size))] = -torch.inf
            q = logits.softmax(-1)
            ids, top = torch.from_numpy(one.teacher.ids).long(), torch.from_numpy(one.teacher.top)
            top = torch.where(q.gather(1, ids) > 0, top, -torch.inf).softmax(-1)
            p = torch.zeros_like(q).scatter(1, ids, top)
            mean = q if kind == "forward" else (p + q) / 2
            distance = kl(p, mean) if kind == "forward" else (kl(p, mean) + kl(q, mean)) / 2
            distance = 0.7 * distance
        loss = loss + distance.sum() / (one.num_sampled * len(members))
    loss.backward()
    expected = gradient_vector(policy.parameters)
    assert expected.abs().max() > 1e-3
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


# --- what is rejected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"teacher": None}, "belong together"),
        ({"algorithm": {"name": "grpo"}}, "belong together"),
        ({"teacher": {}}, "teacher is the model"),
        ({"rollout": {"temperature": 0.7}}, "rollout.temperature"),
        ({"algorithm": {"name": "distill", "estimator": "gae"}}, "gae needs a critic"),
    ],
)
def test_settings_that_contradict_each_other(changes: dict[str, Any], named: str) -> None:
    data = {"algorithm": {"name": "distill"}, "teacher": {"path": "tiny"}, "rollout": {"group_size": 1}, **changes}
    with pytest.raises((UserInputError, ValidationError), match=named):
        parse_config(data)


def test_a_teacher_with_other_words(tiny_folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(tiny_folder, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    first = next(iter(tokenizer["model"]["vocab"]))
    tokenizer["model"]["vocab"]["@@"] = tokenizer["model"]["vocab"].pop(first)
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    run = parse_config(
        {"model": {"path": str(tiny_folder)}, "algorithm": {"name": "distill"}, "teacher": {"path": str(other)}}
    )
    with pytest.raises(UserInputError, match="another tokenizer"):
        inspect_policy_run(run)  # type: ignore[arg-type]


def test_a_teacher_counts_among_the_actors_of_a_run() -> None:
    run = parse_config(
        {"algorithm": {"name": "distill"}, "teacher": {"path": "tiny", "num_replicas": 2, "gpus_per_replica": 1}}
    )
    assert [(one.kind, one.count, one.gpus) for one in run.actors][1] == ("teachers", 2, 1.0)
    assert Distill.get_default_config().run_config.algorithm.name == "distill"
