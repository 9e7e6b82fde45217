"""LoRA on the vision tower (target_modules vision): gradients, no stale features, engine and learner agree."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_support import adapted_policy, picture, plain_model, reference_logits, request, run_config, text_side
from peft import PeftModel
from policy_loop import Loop, check_agreement

from rl_vlm.config import load_sft_config, parse_config
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.models.lora import TARGET_MODULES, lora_state, merge_into, target_choice, tower_linears
from rl_vlm.supervised.dataset import open_job_data
from rl_vlm.supervised.trainer import SFTTrainer
from rl_vlm.types import UserInputError

VISION = {"model__lora__target_modules": "vision"}


def test_every_linear_layer_of_the_tower_is_adapted_and_nothing_else_of_it(tiny_folder: Path) -> None:
    model = plain_model(tiny_folder)
    linears = {name for name, module in model.model.visual.named_modules() if isinstance(module, torch.nn.Linear)}
    assert {name.removeprefix("model.visual.") for name in tower_linears(model)} == linears
    assert len(linears) == 2 * 4 + 2 + 2  # two blocks, the merger, one merger of the deep stack
    policy = PolicyModel(tiny_folder, run_config(tiny_folder, **VISION))
    adapted = {name.rsplit(".lora_A", 1)[0] for name, _ in policy.model.named_parameters() if "lora_A" in name}
    assert {name for name in adapted if "visual" in name} == set(tower_linears(plain_model(tiny_folder)))
    assert len(adapted) == len(linears) + 2 * 7


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
    asked = request(text, [shown, "What?"], temperature=0.0, max_new_tokens=4)

    def expected(model: Any, ids: np.ndarray, count: int) -> np.ndarray:
        with torch.no_grad():
            logits = reference_logits(tiny_folder, model, ids, [shown])[:-1]
        logits[:, torch.from_numpy(text.codec.suppressed_token_ids(text.vocab_size))] = float("-inf")
        targets = torch.from_numpy(ids[1:].astype(np.int64))
        return torch.log_softmax(logits, -1).gather(1, targets[:, None])[-count:, 0].numpy()

    found = []
    for version, policy in enumerate(policies, start=1):
        asyncio.run(engine.load_adapter(policy.payload(version)))
        for min_version, model in ((version, policy.model), (-1, plain_model(tiny_folder))):
            one = request(text, [shown, "What?"], temperature=0.0, max_new_tokens=4, min_version=min_version)
            (completion,) = asyncio.run(engine.generate([one]))
            sample = completion.samples[0]
            ids = np.concatenate([completion.prompt_ids, sample.token_ids])
            wanted = expected(model, ids, len(sample.token_ids))
            assert np.abs(sample.logprobs - wanted).max() < 1e-4
            found.append(wanted[0])
    assert asked.images and len({round(float(value), 3) for value in found}) == 3  # two adapters, one base model
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
    policy = PolicyModel(tiny_folder, settings, suppress=False, cache_bytes=0)
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
    assert {name.removeprefix("model.visual.") for name in tower_linears(model)} == linears
    assert {"blocks.0.attn.qkv", "blocks.0.mlp.gate_proj", "merger.mlp.0", "merger.mlp.2"} <= linears
