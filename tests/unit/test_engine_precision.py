"""The transformers engine in bfloat16 computes an adapter as the learner does, however small it is, and its head as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bitsandbytes import functional as nf4
from core_support import adapted_policy, gap, picture, plain_model, request, run_config, text_side
from engine_support import language_linears
from peft import PeftModel
from torch import Tensor

from rl_vlm.config import apply_overrides, parse_config
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.engines.weights import AdapterWeights, Factors
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.models import attention, loading
from rl_vlm.models.attention import causal_attention, last_token_attention, masked_attention
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.runs.serve import plan
from rl_vlm.runs.train import inspect_run
from rl_vlm.serving.replica import build_engine
from rl_vlm.types import Completion, UserInputError

YOUNG = 0.004  # of LoRA's factors: their products are some 1/1000 of the weights


@pytest.fixture(scope="module")
def policy(tiny_folder: Path) -> PolicyModel:
    return adapted_policy(tiny_folder, scale=YOUNG, model__dtype="bfloat16")


@pytest.fixture
def engine(tiny_folder: Path) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(tiny_folder, dtype="bfloat16", max_context=512)
    yield engine
    asyncio.run(engine.close())


def test_layers_give_the_bits_of_the_learners_and_merged_ones_would_lose_the_adapter(
    engine: TransformersEngine, policy: PolicyModel
) -> None:
    version = policy.payload(1)
    beside = engine._weights.form(version)
    assert isinstance(beside, Factors)
    theirs = {
        name.replace(".base_layer", ""): layer
        for name, layer in policy.model.named_modules()
        if hasattr(layer, "lora_A")
    }
    engine._weights.use(beside)
    generator = torch.Generator().manual_seed(0)
    lost = []
    with torch.inference_mode():
        inputs = {
            name: torch.randn(5, layer.in_features, generator=generator).bfloat16()
            for name, layer in language_linears(engine.backbone.model).items()
        }
        ours = {name: language_linears(engine.backbone.model)[name](x) for name, x in inputs.items()}
        assert ours and all(torch.equal(ours[name], theirs[name](x)) for name, x in inputs.items())
        engine._weights.use(None)
        merged = AdapterWeights(engine.backbone.model)
        formed = merged.form(version)
        lost = [
            float((formed[name] == layer.weight).float().mean())
            for name, layer in language_linears(engine.backbone.model).items()
        ]
    assert min(lost) > 0.5  # of the weights, which an adapter that is added to them leaves as they were


def test_the_head_is_told(tiny_folder: Path) -> None:
    text = text_side(tiny_folder)
    asked = request(
        text, [picture(np.random.default_rng(0)), "What?"], temperature=0.0, max_new_tokens=6, top_logprobs=5
    )

    def answer(head: str) -> Completion:
        engine = TransformersEngine(tiny_folder, dtype="bfloat16", max_context=512, head_dtype=head)  # type: ignore[arg-type]
        try:
            return asyncio.run(engine.generate([asked]))[0]
        finally:
            asyncio.run(engine.close())

    rounded, wide = (
        np.array([value for place in answer(head).samples[0].top_logprobs for _, value in place]).reshape(-1, 5)
        for head in ("model", "float32")
    )

    # Differences within a position are those of logits: multiples of bfloat16's steps only where these are rounded.
    def on_grid(values: np.ndarray) -> float:
        gaps = np.abs(values[:, :1] - values) * 2**9
        return float(np.abs(gaps - np.round(gaps)).max())

    assert on_grid(rounded) < 0.02 < on_grid(wide)


# --- Attention of query heads that share key heads: on a GPU no call is left to torch's kernel that writes out all scores


def sides(length: int, queries: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 6, queries, 8), (3, 2, length, 8), (3, 2, length, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def by_hand(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Softmax of scores, head by head: query head h has the keys of head h // 3."""
    heads = []
    for head in range(query.shape[1]):
        scores = query[:, head] @ key[:, head // 3].transpose(1, 2) * scale
        heads.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value[:, head // 3])
    return torch.stack(heads, dim=1)


def assert_equal_with_gradients(ours: Tensor, expected: Tensor, given: list[Tensor]) -> None:
    assert torch.allclose(ours, expected, rtol=0, atol=1e-12)
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for one, other in zip(
        *(torch.autograd.grad((mixed * weight).sum(), given) for mixed in (ours, expected)), strict=True
    ):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("own_keys", [True, False])
@pytest.mark.parametrize("length", [1, 7])
def test_causal_attention_and_its_gradient(monkeypatch: pytest.MonkeyPatch, own_keys: bool, length: int) -> None:
    monkeypatch.setattr(attention, "needs_own_keys", lambda query: own_keys)
    given = sides(length, length)
    ours = causal_attention(*given, scale=0.3)
    expected = by_hand(*given, torch.ones(length, length, dtype=torch.bool).tril(), 0.3)
    assert_equal_with_gradients(ours, expected, given)


@pytest.mark.parametrize("queries", [1, 5, 40])
def test_masked_attention_keeps_no_repeated_keys_where_these_are_more_than_its_mask(queries: int) -> None:
    """Values, gradients, and what is kept: two key heads of 8 numbers take 32 numbers a key, a mask of three heads 3 x queries."""
    query, key, value = given = sides(9, queries)
    mask = torch.ones(queries, 9, dtype=torch.bool).tril(4)
    shapes: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: shapes.append(one.shape) or one, lambda one: one):
        ours = masked_attention(query, key, value, mask, 0.3)
    repeated = any(shape[1] == 6 and shape[2] == 9 for shape in shapes if len(shape) == 4)
    assert repeated == (queries > 2 * 2 * 8)
    expected = by_hand(query, key, value, mask, 0.3)
    assert_equal_with_gradients(ours, expected, given)


def test_one_query_per_row_sees_what_its_mask_says_and_asks_for_no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.nn.functional.scaled_dot_product_attention

    def without_groups(*given: Tensor, **options: Any) -> Tensor:
        assert "enable_gqa" not in options and given[0].shape[1] == given[1].shape[1]
        return plain(*given, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", without_groups)
    query, key, value = sides(7, 1)
    mask = torch.arange(7) < torch.tensor([7, 4, 1])[:, None]
    ours = last_token_attention(query[:, :, 0], key, value, mask[:, None, None], 0.3)
    expected = by_hand(query, key, value, mask[:, None], 0.3)
    assert torch.allclose(ours, expected[:, :, 0].flatten(1), rtol=0, atol=1e-12)


# --- NF4 in the transformers engine: equal to plain transformers on the rounded weights, with the adapter beside them


@pytest.fixture(scope="module")
def quantized(tiny_folder: Path) -> Iterator[TransformersEngine]:
    quantized = build_engine(tiny_folder, run_config(tiny_folder, serving__quantization="nf4"))
    assert isinstance(quantized, TransformersEngine)
    yield quantized
    asyncio.run(quantized.close())


@pytest.fixture(scope="module")
def payload(tiny_folder: Path) -> AdapterPayload:
    return adapted_policy(tiny_folder, seed=1).payload(1)


def rounded_model(folder: Path) -> Any:
    """The plain model with each of the language model's linear weights rounded to NF4 and back."""
    model = plain_model(folder)
    with torch.no_grad():
        for linear in language_linears(model).values():
            linear.weight.copy_(nf4.dequantize_4bit(*nf4.quantize_4bit(linear.weight.data, quant_type="nf4")))
    return model


def test_logprobs_equal_teacher_forcing_on_the_rounded_weights_base_and_adapter(
    quantized: TransformersEngine, tiny_folder: Path, payload: AdapterPayload, tmp_path: Path
) -> None:
    text, rng = text_side(tiny_folder), np.random.default_rng(0)
    images = [picture(rng, 96, 64), picture(rng)]
    requests = [
        request(text, ["Hello"], name="a", max_new_tokens=12, n=2, seeds=(1, 2)),
        request(text, [*images, "What?"], name="b", max_new_tokens=12, seeds=(3,)),
    ]
    rounded = rounded_model(tiny_folder)

    def compare(reference: Any, requests: list[Any]) -> float:
        answers = asyncio.run(quantized.generate(requests))
        return max(gap(tiny_folder, reference, *pair) for pair in zip(requests, answers, strict=True))

    assert compare(rounded, requests) < 1e-4
    assert compare(plain_model(tiny_folder), requests) > 1e-3  # the rounding is there
    asyncio.run(quantized.load_adapter(payload))
    adapted = PeftModel.from_pretrained(
        rounded_model(tiny_folder), payload.write(tmp_path / "adapter")
    ).merge_and_unload()
    assert compare(adapted, requests) < 1e-4
    base = [request(text, ["Hello"], name="base", max_new_tokens=12, seeds=(1,), min_version=-1)]
    assert compare(rounded, base) < 1e-4


def test_only_the_language_models_linear_weights_have_four_bits(
    quantized: TransformersEngine, tiny_folder: Path
) -> None:
    quantised = language_linears(quantized.backbone.model)
    full = {name: linear.weight for name, linear in language_linears(plain_model(tiny_folder)).items()}
    assert {name: 8 * linear.weight.nbytes / full[name].numel() for name, linear in quantised.items()} == dict.fromkeys(
        full, 4.0
    )
    others = [p for name, p in quantized.backbone.model.named_parameters() if name.removesuffix(".weight") not in full]
    assert len(others) > 20 and all(parameter.dtype == torch.float32 for parameter in others)


@pytest.mark.parametrize("command", ["train", "serve"])
def test_without_bitsandbytes_nothing_is_started(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserInputError, match="rl-vlm\\[nf4\\]"):
        if command == "train":
            inspect_run(run_config(tiny_folder, serving__quantization="nf4"))
        else:
            plan(str(tiny_folder), ["serving.quantization=nf4"])


@pytest.mark.parametrize(("engine_name", "quantization"), [("vllm", "nf4"), ("transformers", "fp8")])
def test_a_quantisation_that_the_engine_lacks_is_a_config_error(engine_name: str, quantization: str) -> None:
    wanted = {"serving.engine": engine_name, "serving.quantization": quantization}
    with pytest.raises(UserInputError, match="serving.engine"):
        parse_config(apply_overrides({}, wanted))
