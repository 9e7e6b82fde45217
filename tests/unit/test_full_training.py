"""Full fine-tuning without Ray: gradients, masters, versions as bytes and folders, and what cannot be combined with it."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_support import (
    batch_of,
    conversation,
    gap,
    picture,
    plain_model,
    reference_logprobs,
    request,
    run_config,
    text_side,
    train_sample,
)
from full_support import FullWeightsOf, agreements
from policy_loop import MAX_CONTEXT, Loop
from tables import table

from rl_vlm.algorithms.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from rl_vlm.config import PolicyConfig, load_config
from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.learning.optimizer import make_optimizer
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.strategies import Strategy
from rl_vlm.learning.update import PolicyUpdater
from rl_vlm.models.export import export_model
from rl_vlm.models.loading import load_model
from rl_vlm.models.trained import find_trained, read_payload
from rl_vlm.models.weights import FullPayload
from rl_vlm.types import Trajectory, UserInputError

TABLES = table("settings")


def full_policy(folder: Path, **dotted: Any) -> tuple[PolicyModel, PolicyConfig]:
    run = run_config(folder, model__train="full", **dotted)
    return PolicyModel(folder, run), run


def trajectory(folder: Path) -> Trajectory:
    rng = np.random.default_rng(3)
    return conversation(text_side(folder), rng, [picture(rng, 64, 32), picture(rng), "What is it?"], [6])


@pytest.mark.parametrize("checkpoint", ["none", 1, "all"])
def test_the_gradient_of_every_parameter_is_that_of_plain_transformers(tiny_folder: Path, checkpoint: Any) -> None:
    policy, run = full_policy(tiny_folder, learner__checkpoint=checkpoint)
    assert policy.model.model.visual.is_gradient_checkpointing == (checkpoint != "none")
    one = trajectory(tiny_folder)
    updater = PolicyUpdater(policy, run)
    (packed,) = updater.pack(batch_of([[train_sample(one, 1.0, 1.0)]]))
    logprobs = updater.logprobs(packed[0])[0]
    logprobs.sum().backward()
    plain = plain_model(tiny_folder)
    theirs = reference_logprobs(tiny_folder, plain, one.token_ids, one.images)[torch.from_numpy(one.loss_mask[1:])]
    theirs.sum().backward()
    torch.testing.assert_close(logprobs.sort().values, theirs.sort().values, rtol=1e-4, atol=1e-5)
    own = dict(policy.model.named_parameters())
    assert any(".visual." in name for name in own)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None and own[name].grad is not None, name
        torch.testing.assert_close(own[name].grad, parameter.grad, rtol=2e-3, atol=2e-4, msg=name)


def test_steps_too_small_for_bfloat16_add_up_in_the_masters(tiny_folder: Path) -> None:
    policy, run = full_policy(tiny_folder, model__dtype="bfloat16", learner__lr=1e-6)
    optimizer = make_optimizer(policy, run)
    strategy = Strategy(policy, optimizer)
    updater = PolicyUpdater(policy, run)
    own = dict(policy.model.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in own.items()}
    masters = {name: tensor.clone() for name, tensor in policy.trained.weights().items()}
    for _ in range(2):
        for packed in updater.pack(batch_of([[train_sample(trajectory(tiny_folder), 1.0, 1.0)]])):
            strategy.backward(updater.logprobs(packed[0])[0].sum())
        assert all(parameter.grad is None for parameter in own.values())  # freed as soon as they are added
        assert strategy.step(1.0) is not None
    after = policy.trained.weights()
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    assert own[name].dtype == torch.bfloat16 and after[name].dtype == torch.float32
    assert 0 < (after[name] - masters[name]).abs().max() < 1e-5
    large = before[name].abs() > 0.01
    assert torch.equal(own[name][large], before[name][large])  # nothing to be seen in bfloat16 yet
    for key, tensor in after.items():
        assert torch.equal(own[key], tensor.to(torch.bfloat16)), key
    assert policy.payload(3).rounded("bfloat16").state()[name].equal(own[name].detach())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kept", [True, False])
def test_the_reference_is_the_model_as_it_came(tiny_folder: Path, dtype: str, kept: bool) -> None:
    policy, run = full_policy(tiny_folder, algorithm__kl_coef=0.1 if kept else 0.0, model__dtype=dtype)
    updater, one = PolicyUpdater(policy, run), trajectory(tiny_folder)
    base = updater.recompute([one])[0]
    policy.load(FullWeightsOf(tiny_folder).payload(1))
    assert np.abs(updater.recompute([one])[0] - base).max() > 0.1
    assert np.array_equal(updater.recompute([one], adapter=False)[0], base)
    assert np.abs(updater.recompute([one])[0] - base).max() > 0.1  # and it is gone again


def test_engine_and_learner_agree_after_each_update(tiny_folder: Path) -> None:
    engine = TransformersEngine(tiny_folder, max_context=MAX_CONTEXT, full=True)
    loop = Loop(tiny_folder, 0.8, engine, model__train="full", learner__lr=1e-3)
    try:
        assert max(agreements(loop, 3)) < 1e-4
    finally:
        loop.close()


def test_an_engine_answers_with_all_weights_of_the_version_that_it_names(tiny_folder: Path) -> None:
    weights, text, rng = FullWeightsOf(tiny_folder), text_side(tiny_folder), np.random.default_rng(0)
    engine = TransformersEngine(tiny_folder, max_context=MAX_CONTEXT, full=True)
    asked = request(text, [picture(rng), "What is it?"], n=2, max_new_tokens=12, ignore_eos=True)
    asked_base = request(text, asked_parts := [picture(rng), "And this?"], min_version=BASE_MODEL)

    async def run() -> list[Any]:
        answers = [(await engine.generate([asked]))[0]]
        for version in (1, 2):
            running = asyncio.create_task(engine.generate([asked]))
            await asyncio.sleep(0.01)
            await engine.load_adapter(weights.payload(version))
            answers += [*(await running), *(await engine.generate([asked]))]
        base = (await engine.generate([asked_base]))[0]
        again = (await engine.generate([asked]))[0]
        await engine.close()
        return [answers, base, again]

    answers, base, again = asyncio.run(run())
    assert asked_parts and {answer.policy_version for answer in answers} == {0, 1, 2}
    plain = plain_model(tiny_folder)
    for answer in [*answers, again]:
        right = plain if answer.policy_version == 0 else weights.under(answer.policy_version)
        assert gap(tiny_folder, right, asked, answer) < 1e-4
        assert gap(tiny_folder, weights.under(3 - max(answer.policy_version, 1)), asked, answer) > 0.01
    assert gap(tiny_folder, plain, asked_base, base) < 1e-4


def test_a_version_survives_transport_folders_and_checkpoints(tiny_folder: Path, tmp_path: Path) -> None:
    payload = FullWeightsOf(tiny_folder).payload(7)
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(payload, protocol=5, buffer_callback=buffers.append)
    assert len(data) < 1000  # the bytes go beside it, and are read where they lie
    there = pickle.loads(data, buffers=[buffer.raw().toreadonly() for buffer in buffers])
    assert type(there) is FullPayload and there.verify().sha256 == payload.sha256
    folder = payload.write(tmp_path / "run" / payload.FOLDER)
    assert read_payload(folder, 7) == payload
    assert find_trained(None, tmp_path / "run") == find_trained(folder, None) == folder
    saved = tmp_path / "checkpoint"
    saved.mkdir()
    write_checkpoint(saved, Checkpoint(payload, {}, {"updates": 3}))
    assert read_checkpoint(saved).adapter == payload
    (saved / "weights" / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(UserInputError, match="corrupt"):
        read_checkpoint(saved)


def test_the_export_of_full_weights_is_an_ordinary_model_folder(tiny_folder: Path, tmp_path: Path) -> None:
    payload = FullWeightsOf(tiny_folder).payload(1)
    payload.write(tmp_path / "run" / "weights")
    (tmp_path / "run" / "config.yaml").write_text(f"model: {{path: {tiny_folder}, train: full}}")
    exported = load_model(export_model(tmp_path / "run", tmp_path / "out"))
    own = dict(exported.named_parameters())
    for name, tensor in payload.state().items():
        assert torch.equal(own[name], tensor), name


@pytest.mark.parametrize(
    ("changes", "words"),
    TABLES["what_lora_alone_can_do_is_refused_in_one_sentence"],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_lora_alone_can_do_is_refused_in_one_sentence(changes: dict[str, Any], words: str) -> None:
    given = [f"{key}={value}" for key, value in changes.items()]
    load_config(None, given)  # without full fine-tuning it is allowed
    with pytest.raises(UserInputError, match=words) as error:
        load_config(None, ["model.train=full", *given])
    assert len(str(error.value).strip().splitlines()) <= 2


def test_every_learner_draws_the_same_hidden_layer_of_a_critic(tiny_folder: Path) -> None:
    """Learners add their gradients up, each to its own weights."""
    heads = []
    for process in (1, 2):
        torch.manual_seed(process)
        policy, _ = full_policy(tiny_folder, algorithm__name="ppo", critic__hidden=8)
        assert policy.critic is not None
        heads.append(policy.critic.state())
    assert heads[0]["head.0.weight"].any()
    assert all(torch.equal(tensor, heads[1][name]) for name, tensor in heads[0].items())


# --- Layers that will be sharded never come to the device whole


def test_layers_stay_in_host_memory_until_they_are_sharded(tiny_folder: Path) -> None:
    model = load_model(tiny_folder, "float32", "meta", layers_on_host=True)  # a device where nothing is allocated
    inside = {name for name, _ in model.named_parameters() if ".language_model.layers." in name}
    assert inside and len(inside) < len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert parameter.device.type == ("cpu" if name in inside else "meta"), name
    assert all(parameter.is_meta for parameter in load_model(tiny_folder, "float32", "meta").parameters())
