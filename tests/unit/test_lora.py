"""LoRA through peft: names, files and merged weights are peft's own."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_support import adapted_policy, gap, picture, plain_model, reference_logits, request, run_config, text_side
from peft import PeftModel, get_peft_model
from policy_loop import Loop, check_agreement
from safetensors.torch import load_file

from rl_vlm.config import load_sft_config, parse_config
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.models.loading import load_model
from rl_vlm.models.lora import (
    TARGET_MODULES,
    adaptable_linears,
    linear_weights,
    load_lora_state,
    lora_config,
    lora_state,
    merge_into,
    merged_weights,
)
from rl_vlm.models.trained import target_choice
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.supervised.dataset import open_job_data
from rl_vlm.supervised.trainer import SFTTrainer
from rl_vlm.types import UserInputError


@pytest.fixture(scope="module")
def policy(tiny_folder: Path) -> PolicyModel:
    return adapted_policy(tiny_folder, model__lora__rank=4, model__lora__alpha=12)


@pytest.fixture(scope="module")
def payload(policy: PolicyModel) -> AdapterPayload:
    return policy.payload(3)


# --- names and files are peft's


def test_the_state_has_the_names_and_values_that_peft_saves(
    tiny_folder: Path, policy: PolicyModel, tmp_path: Path
) -> None:
    config = lora_config(4, 12, "all")
    theirs = get_peft_model(plain_model(tiny_folder), config)
    load_lora_state(theirs.base_model.model, lora_state(policy.model))
    theirs.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    state = lora_state(policy.model)
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], state[name]) for name in saved)


def test_peft_loads_the_folder_and_computes_the_same(
    tiny_folder: Path, policy: PolicyModel, payload: AdapterPayload, tmp_path: Path
) -> None:
    theirs = PeftModel.from_pretrained(plain_model(tiny_folder), payload.write(tmp_path / "adapter"))
    ids = np.arange(12, dtype=np.int32)
    with torch.no_grad():
        expected = reference_logits(tiny_folder, theirs.base_model.model, ids, [])
        torch.testing.assert_close(reference_logits(tiny_folder, policy.model, ids, []), expected, rtol=0, atol=1e-5)
        with policy.trained.base():
            base = reference_logits(tiny_folder, policy.model, ids, [])
        plain = reference_logits(tiny_folder, plain_model(tiny_folder), ids, [])
        torch.testing.assert_close(base, plain, rtol=0, atol=1e-5)
    assert (base - expected).abs().max() > 0.1


# --- merging


@pytest.mark.parametrize("rslora", [False, True])
def test_merged_weights_equal_those_of_peft(tiny_folder: Path, rslora: bool, tmp_path: Path) -> None:
    config = lora_config(4, 12, "all")
    config.use_rslora = rslora
    theirs = get_peft_model(plain_model(tiny_folder), config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3, generator=generator)
    payload = AdapterPayload.build(1, lora_state(theirs.base_model.model), config)
    model = plain_model(tiny_folder)
    merged = merged_weights(payload, linear_weights(model))
    expected = dict(theirs.merge_and_unload().named_parameters())
    assert len(merged) == 2 * 7
    for name, weight in merged.items():
        assert torch.allclose(weight, expected[f"{name}.weight"], rtol=0, atol=1e-6)
        assert not torch.allclose(weight, model.get_submodule(name).weight, atol=1e-2)


@pytest.mark.parametrize(
    "name", ["base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.lora_embedding_A", "bias", "up without down"]
)  # fmt: skip
def test_what_an_adapter_holds_beside_its_pairs_is_not_left_out_silently(
    tiny_folder: Path, payload: AdapterPayload, name: str
) -> None:
    state = payload.state()
    if name == "up without down":
        del state[next(one for one in state if one.endswith("lora_A.weight"))]
    else:
        first = next(iter(state)).partition(".lora_")[0]
        state[f"{first}.bias" if name == "bias" else name] = torch.zeros(4)
    whole = AdapterPayload.packed(payload.version, state, payload.config_json)
    with pytest.raises(UserInputError, match="tensors differ"):
        merged_weights(whole, linear_weights(plain_model(tiny_folder)))


def test_a_sum_with_low_precision_weights_is_rounded_once(tiny_folder: Path, payload: AdapterPayload) -> None:
    model = load_model(tiny_folder, dtype="bfloat16")
    base = linear_weights(model)
    exact = merged_weights(payload, {name: weight.float() for name, weight in base.items()})
    rounded = merged_weights(payload, base)
    assert all(rounded[name].dtype == torch.bfloat16 for name in rounded)
    assert all(torch.equal(rounded[name], exact[name].bfloat16()) for name in rounded)


# --- payloads


@pytest.mark.parametrize("protocol", [4, 5])
def test_a_payload_travels_whole_and_its_bytes_apart_where_they_can(payload: AdapterPayload, protocol: int) -> None:
    apart: list[pickle.PickleBuffer] = []
    packed = pickle.dumps(payload, protocol, buffer_callback=apart.append if protocol == 5 else None)
    received = pickle.loads(packed, buffers=apart)
    assert received == payload and received.verify() is received
    for tensors in (received.state(), received.state()):
        assert tensors.keys() == payload.state().keys()
        assert all(torch.equal(tensor, payload.state()[name]) for name, tensor in tensors.items())
    assert (len(packed) < 4096) == (protocol == 5)


def test_writing_replaces_our_files_and_keeps_those_of_others(payload: AdapterPayload, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "README.md").write_text("my model card")
    (folder / "adapter_model.safetensors").write_text("old")
    payload.write(folder)
    assert (folder / "README.md").read_text() == "my model card"
    assert AdapterPayload.read(folder, 3).sha256 == payload.sha256
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_a_full_disk_leaves_the_older_folder(
    payload: AdapterPayload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = payload.write(tmp_path / "adapter")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        dataclasses.replace(payload, version=4, tensors=bytes(payload.tensors) + b" ").write(folder)
    assert AdapterPayload.read(folder, 3) == payload
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize("what", ["missing", "surplus", "shape"])
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(policy: PolicyModel, what: str) -> None:
    before = policy.payload(0).tensors
    state = {name: tensor.clone() + 1 for name, tensor in lora_state(policy.model).items()}
    name = sorted(state)[-1]
    if what == "missing":
        del state[name]
    elif what == "surplus":
        state[name.replace("layers.1", "layers.5")] = state[name]
    else:
        state[name] = state[name][:, :-1]
    with pytest.raises(UserInputError, match="does not fit"):
        load_lora_state(policy.model, state)
    assert policy.payload(0).tensors == before


# --- LoRA on the vision tower (target_modules vision): gradients, no stale features, engine and learner agree


VISION = {"model__lora__target_modules": "vision"}


def test_every_linear_layer_of_the_tower_is_adapted_and_nothing_else_of_it(tiny_folder: Path) -> None:
    model = plain_model(tiny_folder)
    linears = {name for name, module in model.model.visual.named_modules() if isinstance(module, torch.nn.Linear)}
    assert {name.removeprefix("model.visual.") for name in adaptable_linears(model) if "visual" in name} == linears
    assert len(linears) == 2 * 4 + 2 + 2  # two blocks, the merger, one merger of the deep stack
    policy = PolicyModel(tiny_folder, run_config(tiny_folder, **VISION))
    adapted = {name.rsplit(".lora_A", 1)[0] for name, _ in policy.model.named_parameters() if "lora_A" in name}
    assert {name for name in adapted if "visual" in name} == {
        name for name in adaptable_linears(plain_model(tiny_folder)) if "visual" in name
    }
    assert len(adapted) == len(linears) + 2 * 7


@pytest.mark.slow
def test_engine_and_learner_agree_after_updates_of_the_tower(tiny_folder: Path) -> None:
    """Also on images that the learner has seen with another tower, in the pass before the first step."""
    loop = Loop(tiny_folder, 1.0, learner__lr=1e-2, **VISION)
    before = {name: tensor.clone() for name, tensor in lora_state(loop.policy.model).items()}
    check_agreement(loop, updates=6)
    moved = [name for name, tensor in lora_state(loop.policy.model).items() if not torch.equal(tensor, before[name])]
    assert sum("visual" in name for name in moved) == 2 * 12
    loop.close()


def test_a_new_version_is_not_answered_with_the_old_towers_features(tiny_folder: Path) -> None:
    """Nor a request for the base model with the adapter's."""
    policies = [adapted_policy(tiny_folder, seed=seed, scale=0.3, **VISION) for seed in (1, 2)]
    engine, text = TransformersEngine(tiny_folder, max_context=128), text_side(tiny_folder)
    shown = picture(np.random.default_rng(0))

    found = []
    for version, policy in enumerate(policies, start=1):
        asyncio.run(engine.load_adapter(policy.payload(version)))
        for min_version, model in ((version, policy.model), (-1, plain_model(tiny_folder))):
            one = request(text, [shown, "What?"], temperature=0.0, max_new_tokens=4, min_version=min_version)
            (completion,) = asyncio.run(engine.generate([one]))
            assert gap(tiny_folder, model, one, completion) < 1e-4
            found.append(completion.samples[0].logprobs[0])
    assert len({round(float(value), 3) for value in found}) == 3  # two adapters, one base model
    asyncio.run(engine.close())


def test_features_of_a_trained_tower_have_a_gradient_and_are_never_kept(tiny_folder: Path) -> None:
    policy = adapted_policy(tiny_folder, **VISION)
    image = picture(np.random.default_rng(0))
    (first,) = policy.backbone.image_features([image])
    assert first.merged.requires_grad and all(layer.requires_grad for layer in first.deepstack)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.mul_(1.5)
        (second,) = policy.backbone.image_features([image])
    assert not torch.equal(first.merged, second.merged)
    assert policy.backbone.cache_hits == 0
    frozen = adapted_policy(tiny_folder).backbone
    kept = [frozen.image_features([image])[0] for _ in range(2)]
    assert kept[0] is kept[1] and not kept[0].merged.requires_grad


def test_supervised_training_reaches_the_tower(tiny_folder: Path) -> None:
    """Its gradients are those of the model as transformers computes it."""
    settings = load_sft_config(
        None,
        [f"model.path={tiny_folder}", "model.lora.target_modules=vision", "sft.batch_size=4", "sft.data=shapes@[:4]"],
    )
    policy = PolicyModel(tiny_folder, settings)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.normal_(0.0, 0.1, generator=generator)
    batch = open_job_data(settings, policy.text).batch(0)
    targets = sum(int(one.loss_mask.sum()) for one in batch)
    for one in batch:
        logits = reference_logits(tiny_folder, policy.model, one.token_ids, one.images)
        labels = torch.from_numpy(np.where(one.loss_mask, one.token_ids, -100).astype(np.int64))
        (
            torch.nn.functional.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum") / targets
        ).backward()
    expected = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    trainer, found = SFTTrainer(policy, settings), {}
    step = trainer._strategy.step

    def keep_gradients(max_norm: float) -> float | None:
        found.update({name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None})
        return step(max_norm)

    trainer._strategy.step = keep_gradients  # type: ignore[method-assign]
    trainer.step(batch, 1e-3)
    assert found.keys() == expected.keys() and sum("visual" in name for name in found) == 2 * 12
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-3)
    assert max(float(gradient.abs().max()) for name, gradient in found.items() if "visual" in name) > 1e-3


def test_the_adapter_of_a_tower_loads_in_peft_and_merges(tiny_folder: Path, tmp_path: Path) -> None:
    policy = adapted_policy(tiny_folder, **VISION)  # peft's, bit for bit
    payload = policy.payload(1)
    image = picture(np.random.default_rng(0))
    span = request(text_side(tiny_folder), [image, "What?"])
    ids = np.repeat(span.prompt_ids, 1)
    count = text_side(tiny_folder).images.count_tokens(image.width, image.height)
    assert count == 1  # so that ids need no expansion
    theirs = PeftModel.from_pretrained(plain_model(tiny_folder), payload.write(tmp_path / "adapter"))
    with torch.no_grad():
        ours = reference_logits(tiny_folder, policy.model, ids, [image])
        assert torch.equal(ours, reference_logits(tiny_folder, theirs.base_model.model, ids, [image]))
        merge_into(model := plain_model(tiny_folder), payload)
        merged = reference_logits(tiny_folder, model, ids, [image])
    torch.testing.assert_close(ours, merged, atol=1e-3, rtol=1e-3)


# --- choices


@pytest.mark.parametrize("choice", [name for name in TARGET_MODULES if name != "none"])
def test_a_choice_is_recognised_by_its_layers(choice: str, tiny_folder: Path) -> None:
    policy = PolicyModel(tiny_folder, run_config(tiny_folder, model__lora__target_modules=choice))
    modules = [name.rsplit(".lora_A", 1)[0] for name, _ in policy.model.named_parameters() if "lora_A" in name]
    assert target_choice(modules, choice) == choice
    assert target_choice(modules) == ("all" if choice == "mlp_attn" else choice)
    assert target_choice([*modules, "lm_head"]) is None


def test_an_engine_that_would_ignore_the_tower_is_refused() -> None:
    with pytest.raises(UserInputError, match=r"serving\.engine"):
        parse_config({"model": {"lora": {"target_modules": "vision"}}, "serving": {"engine": "vllm"}})
    parse_config({"model": {"lora": {"target_modules": "vision"}}, "serving": {"engine": "transformers"}})


def test_qwen2_5s_tower_has_the_same_choice() -> None:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32}
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
            "intermediate_size": 32, "vocab_size": 64}  # fmt: skip
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(vision_config=vision, text_config=text))
    linears = {name for name, module in model.model.visual.named_modules() if isinstance(module, torch.nn.Linear)}
    assert {name.removeprefix("model.visual.") for name in adaptable_linears(model) if "visual" in name} == linears
    assert {"blocks.0.attn.qkv", "blocks.0.mlp.gate_proj", "merger.mlp.0", "merger.mlp.2"} <= linears
