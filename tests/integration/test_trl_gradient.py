"""The gradient of a whole minibatch through the whole model equals TRL's, on TRL's own rollout."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_support import Sample, batch_of, run_config, train_sample

from rl_vlm.learning.plan import UpdateStats
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.update import PolicyUpdater
from rl_vlm.models.families.generic import ImageFeatures
from rl_vlm.models.loading import resolve_model
from rl_vlm.types import EncodedImage, StopReason, Trajectory, TrajectoryStatus, Turn


def short_name(name: str) -> str:
    return name.replace("base_model.model.", "").replace(".default", "")


def trls_minibatch(trainer: Any, loop: Any, steps: int) -> dict[str, Any]:
    """What TRL's loss gets in its last optimiser step of `steps` rollouts."""
    seen: list[dict[str, Any]] = []
    compute = trainer._compute_loss

    def watch(model: Any, inputs: dict[str, Any]) -> Any:
        seen.append({key: value.clone() if torch.is_tensor(value) else value for key, value in inputs.items()})
        return compute(model, inputs)

    trainer._compute_loss = watch
    for _ in range(steps):
        loop.step()
    trainer._compute_loss = compute
    return seen[-1]


def our_samples(inputs: dict[str, Any]) -> list[Sample]:
    rows = len(inputs["prompt_ids"])
    samples = []
    for k in range(rows):
        prompt = inputs["prompt_ids"][k][inputs["prompt_mask"][k].bool()].numpy()
        kept = inputs["completion_mask"][k].bool()
        answer = inputs["completion_ids"][k][kept].numpy()
        ids = np.concatenate([prompt, answer]).astype(np.int32)
        mask = np.arange(len(ids)) >= len(prompt)
        logprobs = np.zeros(len(ids), dtype=np.float32)
        logprobs[mask] = inputs["old_per_token_logps"][k][kept].numpy()
        turn = Turn(len(prompt), len(ids), 0, StopReason.END_OF_TURN)
        image = EncodedImage(f"row-{k}", b"", 64, 64)
        trajectory = Trajectory(str(k), ids, mask, logprobs, (turn,), TrajectoryStatus.COMPLETED, (image,))
        samples.append(train_sample(trajectory, float(inputs["advantages"][k]), 1 / (len(answer) * rows)))
    return samples


@pytest.mark.acceptance
def test_the_gradient_of_a_minibatch_is_trls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    folder = resolve_model("tiny")  # it finds right answers now and then: advantages are not zero
    settings = {
        "rollout__prompts_per_iteration": 8, "rollout__group_size": 4, "rollout__max_new_tokens_per_turn": 12,
        "algorithm__minibatches": 2, "algorithm__advantage_normalization": "none", "algorithm__clip_high": 0.2,
        "learner__lr": 5e-3, "env__kwargs": {"task": "count"},
    }  # fmt: skip
    run = run_config(folder, **settings)
    loop = importlib.import_module("trl_loop").TRLLoop(folder, run)
    trainer = loop.trainer
    inputs = trls_minibatch(trainer, loop, steps=3)
    assert inputs["advantages"].abs().sum() > 0

    theirs = {short_name(name): p for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = 1
    their_loss = trainer._compute_loss(trainer.model, dict(inputs))
    their_loss.backward()

    policy = PolicyModel(folder, run)
    ours = {short_name(name): p for name, p in policy.model.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        parameter.data.copy_(theirs[name].data)
    updater = PolicyUpdater(policy, run)
    with torch.no_grad():  # TRL hands over pixels, not images
        out = policy.model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True)
    features = {
        f"row-{k}": ImageFeatures(out.pooler_output[k].clone(), [layer[k].clone() for layer in out.deepstack_features])
        for k in range(len(inputs["prompt_ids"]))
    }
    monkeypatch.setattr(policy.backbone, "image_features", lambda images: [features[one.sha256] for one in images])
    (packed,) = updater.pack(batch_of([[sample] for sample in our_samples(inputs)]))
    for micro in packed:
        micro.old = torch.from_numpy(micro.behaviour)
    loss = sum(updater.loss(micro, UpdateStats()) for micro in packed)
    loss.backward()  # type: ignore[union-attr]

    assert loss.item() == pytest.approx(their_loss.item(), abs=1e-4)
    mine = torch.cat([ours[name].grad.flatten() for name in ours])  # type: ignore[union-attr]
    other = torch.cat([theirs[name].grad.flatten() for name in ours])
    assert other.norm() > 1e-3
    assert (mine - other).norm() < 2e-3 * other.norm()
