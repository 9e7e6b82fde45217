"""The choice of the CPU's matrix product: equal results, one choice per machine, none in a deterministic run."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_support import adapted_policy
from torch import nn

from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.models import products
from rl_vlm.models.products import FrozenLinear, choose_product, onednn_product, product_of, torch_product, use_onednn
from rl_vlm.types import GenerationRequest, SamplingParams, UserInputError


@pytest.fixture
def cache_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RL_VLM_CACHE", str(tmp_path))
    products._fastest.cache_clear()
    return tmp_path


@pytest.fixture(autouse=True)
def forget() -> Any:
    yield
    products._fastest.cache_clear()


def times(**seconds: float) -> Any:
    return lambda: seconds


@pytest.fixture
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_SMALL", 0)


def test_small_products_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Size] = []
    plain = products.functional.linear

    def seen(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append(x.shape)
        return plain(x, *rest)

    monkeypatch.setattr(products.functional, "linear", seen)
    weight = torch.randn(256, 128)
    for rows in (4, 256):  # 2**17 and 2**23 multiplications
        assert onednn_product(torch.randn(rows, 128), weight).shape == (rows, 256)
    assert calls == [(4, 128)]


@pytest.mark.usefixtures("nothing_is_small")
@pytest.mark.parametrize("shape", [(7, 5), (0, 5), (2, 3, 5), (1, 5)])
def test_both_products_agree(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(size, generator=generator) for size in (shape, (4, 5), (4,)))
    for given in (None, bias):
        assert torch.allclose(onednn_product(x, weight, given), torch_product(x, weight, given), atol=1e-5)
    transposed = torch.randn(5, 4, generator=generator).t()
    assert torch.allclose(onednn_product(x, transposed), x @ transposed.t(), atol=1e-5)


@pytest.mark.usefixtures("nothing_is_small")
def test_a_layer_that_is_frozen_gives_the_same_values_and_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3, bias=False), nn.Linear(3, 2))
    model.requires_grad_(False)
    model[3].requires_grad_(True)
    x = torch.randn(2, 4, 6, requires_grad=True)
    expected = model(x)
    (wanted,) = torch.autograd.grad(expected.sum(), x)
    assert use_onednn(model) == 2
    assert [type(model[k]) for k in (0, 2, 3)] == [FrozenLinear, FrozenLinear, nn.Linear]
    found = model(x)
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.allclose(torch.autograd.grad(found.sum(), x)[0], wanted, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(model(x), expected, atol=1e-6)
    model(x)[..., 0] = 0.0  # an output may be changed in place, as that of nn.Linear
    model[0](x)[0] = 0.0
    model[0].requires_grad_(True)  # thawed: its gradient comes back
    assert torch.autograd.grad(model(x).sum(), model[0].weight)[0].abs().max() > 0


def test_the_faster_one_is_chosen_once_and_kept(cache_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "measure_products", times(torch=1.0, onednn=0.5))
    assert choose_product("auto") == "onednn"
    products._fastest.cache_clear()  # another process, whose measurement would come out differently
    monkeypatch.setattr(products, "measure_products", times(torch=0.5, onednn=1.0))
    assert choose_product("auto") == "onednn"
    (kept,) = cache_path.glob("product-*.json")
    assert json.loads(kept.read_text())["product"] == "onednn"


def test_updates_are_measured_by_themselves(cache_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "measure_products", times(torch=1.0, onednn=0.5))
    monkeypatch.setattr(products, "measure_updates", times(torch=0.5, onednn=1.0))
    assert [choose_product("auto", use=use) for use in ("layers", "updates")] == ["onednn", "torch"]
    assert {path.name.split("-")[0] for path in cache_path.glob("*.json")} == {"product", "products"}


def test_a_draw_keeps_torchs(cache_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "measure_products", times(torch=1.0, onednn=0.97))
    assert choose_product("auto") == "torch"


def test_a_damaged_choice_is_measured_again(cache_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "measure_products", times(torch=1.0, onednn=0.5))
    for damage in ("", "[]", '{"product": "cublas"}'):
        path = cache_path / f"product-{products._machine()}.json"
        path.write_text(damage)
        products._fastest.cache_clear()
        assert choose_product("auto") == "onednn"
        assert json.loads(path.read_text())["product"] == "onednn"


def test_without_a_cache_folder_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RL_VLM_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(products, "measure_products", times(torch=1.0, onednn=0.5))
    products._fastest.cache_clear()
    assert choose_product("auto") == "torch"


def test_the_measurement_knows_both_and_leaves_the_threads(cache_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        measured = [products.measure_products(), products.measure_updates()]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    for seconds in measured:
        assert set(seconds) == {"torch", "onednn"} and min(seconds.values()) > 0


def test_a_deterministic_run_takes_torchs_unless_told(cache_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "measure_products", times(torch=1.0, onednn=0.5))
    assert choose_product("auto", deterministic=True) == "torch"
    assert choose_product("onednn", deterministic=True) == "onednn"
    assert not list(cache_path.iterdir())


def test_a_torch_without_onednn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert choose_product("auto") == "torch"
    with pytest.raises(UserInputError, match="cpu_product onednn: this build of torch has no oneDNN"):
        choose_product("onednn")


def test_other_types_keep_torchs_product() -> None:
    assert product_of("onednn", torch.zeros(1)) is onednn_product
    assert product_of("onednn", torch.zeros(1, dtype=torch.bfloat16)) is torch_product
    assert product_of("torch", torch.zeros(1)) is torch_product


def test_small_layers_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).requires_grad_(False)
    assert use_onednn(model, smallest=20) == 1
    assert [type(layer) for layer in model] == [FrozenLinear, nn.Linear]


@pytest.mark.usefixtures("nothing_is_small")
def test_the_engine_samples_the_same_by_either_product(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_vlm.engines.transformers_engine._SMALLEST_LAYER", 0)
    calls: list[int] = []

    def counted(*args: Any) -> torch.Tensor:
        calls.append(1)
        return onednn_product(*args)

    payload = adapted_policy(tiny_folder, learner__cpu_product="torch").payload(1)
    prompt = np.arange(40, dtype=np.int32)
    found = {}
    for product in ("torch", "onednn"):
        engine = TransformersEngine(tiny_folder, max_context=128, lockstep=True, product=product)
        frozen = sum(type(module) is FrozenLinear for module in engine.backbone.model.modules())
        assert (frozen > 10) == (product == "onednn")
        monkeypatch.setattr(products, "onednn_product", counted)
        asyncio.run(engine.load_adapter(payload))
        sampling = SamplingParams(n=4, max_new_tokens=12, seeds=(1, 2, 3, 4))
        request = GenerationRequest("r", prompt, sampling, min_version=1)
        (answer,) = asyncio.run(engine.generate([request]))
        found[product] = answer
        asyncio.run(engine.close())
        monkeypatch.setattr(products, "onednn_product", onednn_product)
        assert (len(calls) > 100) == (product == "onednn")  # layers times steps
    for one, other in zip(found["torch"].samples, found["onednn"].samples, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_a_policy_computes_by_the_chosen_product(tiny_folder: Path) -> None:
    chosen = adapted_policy(tiny_folder, learner__cpu_product="onednn")
    plain = adapted_policy(tiny_folder, learner__cpu_product="torch")
    assert (chosen.backbone.product, plain.backbone.product) == (onednn_product, torch_product)
    layers = [[type(m) is FrozenLinear for m in policy.model.modules()] for policy in (chosen, plain)]
    assert sum(layers[0]) > 10 and not any(layers[1])
    assert chosen.weights().keys() == plain.weights().keys()  # peft's names are as they were
    adapted_policy(tiny_folder, deterministic=True, serving__engine="transformers", learner__cpu_product="auto")


_GROWTH = """
import torch
from pathlib import Path
from rl_vlm.models.products import onednn_product

def own():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss_Anon")).split()[1]) / 1024

weight = torch.randn(512, 256)
with torch.inference_mode():
    for rows in range(600, 800):
        onednn_product(torch.randn(rows, 256), weight)
        before = own() if rows == 640 else (before if rows > 640 else 0)
print(own() - before)
"""


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_shapes_that_do_not_come_again_take_no_memory() -> None:
    grown = []
    for kept in ("16", "1024"):  # ours, and the libraries' own
        limits = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": kept, "LRU_CACHE_CAPACITY": kept} if kept == "1024" else {}
        environment = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name} | limits
        command = [sys.executable, "-c", _GROWTH]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
        grown.append(float(done.stdout))
    assert grown[0] < 15 < 40 < grown[1], grown  # MiB


@pytest.mark.parametrize(
    ("users", "default"),
    [
        ({}, ["LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"]),
        ({"LRU_CACHE_CAPACITY": "9"}, ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]),
    ],
)
def test_a_child_gets_the_libraries_own_capacities_again(users: dict[str, str], default: list[str]) -> None:
    """Through any number of processes that inherit ours."""
    program = (
        "import json, os, subprocess, sys\n"
        "from rl_vlm.models.products import default_capacities\n"
        "if len(sys.argv) > 1: sys.exit(subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode)\n"
        "print(json.dumps([default_capacities(), os.environ['LRU_CACHE_CAPACITY']]))\n"
    )
    environment = {name: value for name, value in os.environ.items() if "CAPACIT" not in name} | users
    command = [sys.executable, "-c", program, program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    found, kept = json.loads(done.stdout)
    assert found == dict.fromkeys(default, "1024")
    assert kept == users.get("LRU_CACHE_CAPACITY", "16")
