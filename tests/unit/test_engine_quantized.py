"""NF4 in the transformers engine: equal to plain transformers on the rounded weights, with the adapter beside them."""

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
from peft import PeftModel

from rl_vlm.config import apply_overrides, parse_config
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.models import loading
from rl_vlm.models.lora import language_linears
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.runs.serve import plan
from rl_vlm.runs.train import inspect_run
from rl_vlm.serving.replica import build_engine
from rl_vlm.types import UserInputError


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(tiny_folder, max_context=512, quantization="nf4")
    yield engine
    asyncio.run(engine.close())


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
    engine: TransformersEngine, tiny_folder: Path, payload: AdapterPayload, tmp_path: Path
) -> None:
    text, rng = text_side(tiny_folder), np.random.default_rng(0)
    images = [picture(rng, 96, 64), picture(rng)]
    requests = [
        request(text, ["Hello"], name="a", max_new_tokens=12, n=2, seeds=(1, 2)),
        request(text, [*images, "What?"], name="b", max_new_tokens=12, seeds=(3,)),
    ]
    rounded = rounded_model(tiny_folder)

    def compare(reference: Any, requests: list[Any]) -> float:
        answers = asyncio.run(engine.generate(requests))
        return max(gap(tiny_folder, reference, *pair) for pair in zip(requests, answers, strict=True))

    assert compare(rounded, requests) < 1e-4
    assert compare(plain_model(tiny_folder), requests) > 1e-3  # the rounding is there
    asyncio.run(engine.load_adapter(payload))
    adapted = PeftModel.from_pretrained(
        rounded_model(tiny_folder), payload.write(tmp_path / "adapter")
    ).merge_and_unload()
    assert compare(adapted, requests) < 1e-4
    base = [request(text, ["Hello"], name="base", max_new_tokens=12, seeds=(1,), min_version=-1)]
    assert compare(rounded, base) < 1e-4


def test_only_the_language_models_linear_weights_have_four_bits(engine: TransformersEngine, tiny_folder: Path) -> None:
    quantised = language_linears(engine.backbone.model)
    full = {name: linear.weight for name, linear in language_linears(plain_model(tiny_folder)).items()}
    assert {name: 8 * linear.weight.nbytes / full[name].numel() for name, linear in quantised.items()} == dict.fromkeys(
        full, 4.0
    )
    others = [p for name, p in engine.backbone.model.named_parameters() if name.removesuffix(".weight") not in full]
    assert len(others) > 20 and all(parameter.dtype == torch.float32 for parameter in others)


def test_an_unfit_adapter_is_refused(engine: TransformersEngine, payload: AdapterPayload) -> None:
    broken = AdapterPayload(7, payload.tensors, payload.config_json.replace('"r": ', '"r": 1'), payload.sha256)
    with pytest.raises(UserInputError, match="does not fit"):
        asyncio.run(engine.load_adapter(broken))


def test_the_setting_reaches_the_engine_that_a_replica_builds(tiny_folder: Path) -> None:
    run = run_config(tiny_folder, serving__quantization="nf4", serving__max_context=256)
    built = build_engine(tiny_folder, run)
    try:
        assert isinstance(built, TransformersEngine)
        weights = [linear.weight for linear in language_linears(built.backbone.model).values()]
        assert {weight.dtype for weight in weights} == {torch.uint8}
        assert {type(weight).__name__ for weight in weights} == {"Params4bit"}
    finally:
        asyncio.run(built.close())


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
