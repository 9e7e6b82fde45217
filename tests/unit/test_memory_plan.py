"""The memory plan: its parts against counts on the meta device and hand values, who shares a GPU, and what the command prints."""

from __future__ import annotations

import copy
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_support import PUBLISHED, gpus, published_configs, sizes
from transformers import (
    AttentionInterface,
    AutoModelForImageTextToText,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
)

from rl_vlm import cli
from rl_vlm.config import ModelSection, PolicyConfig, load_config, parse_config
from rl_vlm.engines.memory import KV, kv_cache_bytes, max_kv_tokens, replica_parts, sample_bytes
from rl_vlm.engines.vllm_limits import CPU_HEADS, check_kernels
from rl_vlm.learning.memory import layer_bytes_per_token, recomputed_layers
from rl_vlm.models.families import generic
from rl_vlm.models.lora import TARGET_MODULES, inject_lora, lora_config
from rl_vlm.models.memory.parts import CUDA_CONTEXT, held_by_learner
from rl_vlm.models.memory.placement import driver_gpu, learner_fraction, place, shares_gpu
from rl_vlm.models.memory.reading import read_shape, shape_of_config
from rl_vlm.models.memory.shape import ELEMENT, GIB, gib
from rl_vlm.runs.memory import describe, make_plan, memory_needs, object_store_mib, shape_of
from rl_vlm.runs.memory_plan import MemoryPlan, plan_memory
from rl_vlm.types import UserInputError

CONFIGS = Path(__file__).parents[2] / "configs"
OTHERS = json.loads((Path(__file__).parents[1] / "fixtures/other_shapes.json").read_text())


@pytest.fixture(autouse=True)
def hub_configs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    published_configs(tmp_path_factory.mktemp("hub"), monkeypatch)


CARDS = {24: 23.6, 48: 47.4, 80: 79.15}  # GiB: as sold, as reported


class Flash(torch.autograd.Function):
    """Keeps what a flash kernel keeps, except one number per query and head."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(inputs[0])
        ctx.save_for_backward(*inputs, out)
        return out


class Norm(torch.autograd.Function):
    """What the kernel behind `functional.rms_norm` keeps on a GPU: its input, and a number of each vector."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, torch.empty(x.shape[:-1]))
        return torch.empty_like(x)


def flash(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> tuple[torch.Tensor, None]:
    return Flash.apply(query, key, value).transpose(1, 2), None


AttentionInterface.register("counted", flash)


def kept_bytes(size: str, layers: int, dtype: torch.dtype, target: str, tokens: int, recomputed: int = 0) -> int:
    """What autograd keeps of a forward pass of the real language model, on the meta device."""
    data = copy.deepcopy(PUBLISHED[size])
    data["text_config"]["num_hidden_layers"], data["vision_config"]["depth"] = layers, 1
    data["vision_config"]["deepstack_visual_indexes"] = [0]
    kept: dict[int, tuple[int, Any]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in frozen:
            kept[storage._cdata] = (storage.nbytes(), storage)  # the storage stays, so that its address is its own
        return tensor

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(
            Qwen3VLConfig(**data), attn_implementation="counted", dtype=dtype
        )
        inject_lora(model, lora_config(32, 64, target))
        for module in model.model.language_model.modules():
            if hasattr(module, "variance_epsilon"):
                module.forward = Norm.apply
        model.model.language_model.train().gradient_checkpointing_enable(
            {"use_reentrant": False, "preserve_rng_state": False}
        )
        for layer in model.model.language_model.layers[recomputed:]:
            layer.gradient_checkpointing = False
        frozen = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.model.language_model(
                inputs_embeds=torch.empty(1, tokens, data["text_config"]["hidden_size"], dtype=dtype).requires_grad_(),
                position_ids=torch.empty(3, 1, tokens, dtype=torch.long),
                attention_mask=torch.empty(1, 1, tokens, tokens, dtype=torch.bool),
                use_cache=False,
            )
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize(
    ("size", "dtype", "target"),
    [("2b", "bfloat16", "all"), ("8b", "bfloat16", "all"), ("2b", "float32", "all"), ("4b", "bfloat16", "attn")],
)
def test_a_layer_keeps_what_autograd_keeps(size: str, dtype: str, target: str) -> None:
    tokens, torch_dtype = 64, getattr(torch, dtype)
    counted = kept_bytes(size, 3, torch_dtype, target, tokens) - kept_bytes(size, 2, torch_dtype, target, tokens)
    shape = shape_of_config(PUBLISHED[size])
    assert layer_bytes_per_token(shape, ELEMENT[dtype], 32, target) * tokens == counted


def test_the_cache_of_image_features_is_counted_where_it_is_allocated() -> None:
    assert ModelSection().image_cache_bytes == generic.CACHE_BYTES
    wide, narrow = PolicyConfig(), parse_config({"model": {"image_cache_mib": 16}})
    shape = shape_of_config(PUBLISHED["2b"])
    for parts in (held_by_learner, lambda run, shape: replica_parts(run, shape, None)):
        sizes = [next(part.bytes for part in parts(run, shape) if part.name == "images") for run in (wide, narrow)]
        assert sizes[0] - sizes[1] == 240 << 20


def recipe(name: str, *overrides: str) -> PolicyConfig:
    return load_config(CONFIGS / f"{name}.yaml", overrides)


def test_the_parts_of_a_recipe_by_hand() -> None:
    run = recipe("geo3k_qwen3vl_4b")
    card = gib(47.4)
    plan = plan_memory(run, shape_of_config(PUBLISHED["4b"]), card)
    found = sizes(plan)
    assert found["learner", "weights"] == found["replica", "weights"] == 4_437_815_808 * 2
    assert found["learner", "LoRA and optimiser"] == 66_060_288 * 16  # weight, gradient, two moments in float32
    # One token: 36 layers, 8 heads of 128, keys and values, two bytes.
    assert shape_of_config(PUBLISHED["4b"]).kv_bytes_per_token(2) == 147_456
    # Keys and values take turns with what an update needs, and fill the card with the rest of both.
    of_updates = sum(found["learner", name] for name in ("activations", "attention mask", "logits"))
    assert sum(found.values()) - of_updates == int(0.94 * card)
    assert found["replica", "adapters"] == 2 * 66_060_288 * 2
    assert plan.adapter_bytes == 66_060_288 * 4


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*_qwen3vl_*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_fits_the_card_that_it_names(path: Path) -> None:
    run = load_config(path)
    reported = CARDS[int(run.model.gpu_memory_gib or 0)]
    assert run.model.least_gpu_gib is not None and run.model.least_gpu_gib <= reported
    plan = make_plan(run, reported)
    assert plan.fits and plan.gpus == 1 + (run.teacher is not None)
    assert all(card.size and card.left is not None and card.left <= 0.05 * card.size for card in plan.cards)
    mean = run.serving.max_context / 4 * shape_of(run.model.path).kv_bytes_per_token(2)
    assert sizes(plan)["replica", KV] >= 64 * mean  # samples at once


def test_the_table_of_the_docs_is_what_the_plan_says() -> None:
    script = runpy.run_path(str(CONFIGS.parent / "docs/memory_table.py"))
    assert script["PAGE"].read_text() == script["page"]()  # python docs/memory_table.py writes it
    rows = [line.strip("| ").split(" | ") for line in script["table"]().splitlines()]
    # 2 × 2.13 * 10^9 bytes of weights, and 14.4 GiB at 112 KiB a token are 131 samples of 1,024.
    assert rows[2][:3] == ["agent_2b, geo3k_2b, qa_2b, zoom_2b", "24 GB", "4.0"] and rows[2][11:13] == [
        "14.4",
        "131, 393, 786",
    ]


def test_a_plan_places_a_recipe_on_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(CONFIGS / "geo3k_qwen3vl_8b.yaml")
    assert cli.run(["plan", config, "--gpu-gib", "79.15", "--gpus", "8"]) == 0
    settings, *_ = capsys.readouterr().out.splitlines()
    assert load_config(config, settings.split()).needed_gpus == 8
    for more, counts in (
        (["--gpus", "8"], [8]),
        (["--gpus", "8", "rollout.max_policy_lag=1"], [6, 2]),
        (["--gpus", "1"], [1]),
    ):
        assert cli.run(["plan", config, "--gpu-gib", "79.15", "--json", *more]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert [card["count"] for card in plan["cards"]] == counts
        assert plan["samples"] == (256 * 6 if counts == [6, 2] else 239 * counts[0])
    own = ["resources.placement=split", "serving.num_replicas=2"]  # changes come after the placement
    assert cli.run(["plan", config, "--gpu-gib", "79.15", "--json", "--gpus", "8", *own]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"] == 4


def test_a_large_model_needs_several_cards() -> None:
    run = recipe("geo3k_qwen3vl_8b")
    plan = plan_memory(run, shape_of_config(PUBLISHED["32b"]), gib(79.15))
    weights = sizes(plan)["learner", "weights"] / GIB
    assert 57 < weights < 63 and not plan.fits
    alone = recipe("geo3k_qwen3vl_8b", "serving.gpus_per_replica=4", "serving.vllm.tensor_parallel_size=4",
                   "learner.gpus_per_learner=1")  # fmt: skip
    plan = plan_memory(alone, shape_of_config(PUBLISHED["32b"]), gib(139.0))
    assert plan.fits and plan.gpus == 5
    assert [(card.count, [process.kind for process in card.processes]) for card in plan.cards] == [
        (4, ["replica"]),
        (1, ["learner"]),
    ]
    assert sizes(plan)["replica", "weights"] == pytest.approx(weights * GIB / 4)


@pytest.mark.parametrize(("strategy", "offload"), [("fsdp2", False), ("zero3", False), ("fsdp2", True)])
def test_sharded_layers_let_several_cards_hold_what_one_does_not(strategy: str, offload: bool) -> None:
    shape = shape_of_config(PUBLISHED["32b"])
    run = recipe("geo3k_qwen3vl_8b", "serving.gpus_per_replica=4", "serving.vllm.tensor_parallel_size=4",
                 "learner.gpus_per_learner=1", "learner.num_learners=4",
                 f"learner.strategy={strategy}", f"learner.offload_params={str(offload).lower()}")  # fmt: skip
    plan = plan_memory(run, shape, gib(79.15))
    assert plan.fits and plan.gpus == 8
    layers = shape.text.parameters * 2  # bytes, of which a learner holds a quarter, and two layers of 64 whole
    rest = shape.parameters * 2 - layers
    assert sizes(plan)["learner", "weights"] == pytest.approx(layers * (2 / 64 + (0 if offload else 1 / 4)) + rest)
    whole = run.model_copy(
        update={"learner": run.learner.model_copy(update={"strategy": "all_reduce", "offload_params": False})}
    )
    assert sizes(plan_memory(whole, shape, gib(79.15)))["learner", "weights"] == layers + rest


@pytest.mark.parametrize(("size", "cards"), [("8b", 8), ("8b", 4)])
def test_all_weights_of_a_large_model_are_trained_on_cards_of_80_gb(size: str, cards: int) -> None:
    """A learner on each, which holds a part of the layers with its masters, gradients and moments."""
    shape = shape_of_config(PUBLISHED[size])
    run = recipe("geo3k_qwen3vl_8b", "model.train=full", "learner.lr=1e-6", "learner.strategy=fsdp2",
                 f"learner.num_learners={cards}", "learner.gpus_per_learner=1", "serving.gpus_per_replica=1",
                 "serving.vllm.gpu_memory_utilization=0.85")  # fmt: skip
    plan = plan_memory(run, shape, gib(79.15))
    assert plan.fits
    layers, rest = shape.text.parameters, shape.parameters - shape.text.parameters
    held = sizes(plan)["learner", "masters and optimiser"]
    assert held == pytest.approx(16 * (rest + layers // cards) + 2 * shape.text.embedding)
    assert sizes(plan)["learner", "weights"] == pytest.approx(2 * (rest + 2 * layers // shape.text.layers))


def test_layers_that_are_computed_again_keep_what_autograd_keeps_of_them() -> None:
    shape = shape_of_config(PUBLISHED["2b"])
    planned, counted = (
        [count(recomputed) for recomputed in (0, 1, 3)]
        for count in (
            lambda recomputed: sizes(
                plan_memory(recipe("geo3k_qwen3vl_2b", f"learner.checkpoint={recomputed}"), shape, None)
            )["learner", "activations"],
            lambda recomputed: 128 * kept_bytes("2b", 4, torch.bfloat16, "all", 64, recomputed),
        )
    )
    assert [planned[0] - one for one in planned] == [counted[0] - one for one in counted]
    assert planned[0] > planned[1] > planned[2]


def activations(*overrides: str, card: float | None = 79.15) -> tuple[int, MemoryPlan]:
    """How many of 8B's 36 layers the plan has computed again, and the plan."""
    run, shape = recipe("geo3k_qwen3vl_8b", *overrides), shape_of_config(PUBLISHED["8b"])
    size = None if card is None else gib(card)
    return recomputed_layers(run, shape, size), plan_memory(run, shape, size)


OWN = ("serving.gpus_per_replica=1", "learner.gpus_per_learner=1")  # a GPU each


@pytest.mark.parametrize("overrides", [(), OWN, ("serving.vllm.rest_while_learning=false",),
                                       (*OWN, "model.train=full", "learner.strategy=fsdp2", "learner.num_learners=4")])  # fmt: skip
@pytest.mark.parametrize("card", [47.4, 79.15, 139.0])
def test_as_many_layers_are_kept_as_fit(overrides: tuple[str, ...], card: float) -> None:
    chosen, plan = activations(*overrides, card=card)
    used = [one.used for one in plan.cards if "learner" in (process.kind for process in one.processes)]
    _, all_again = activations(*overrides, "learner.checkpoint=all", card=card)
    assert plan.fits == all_again.fits
    if chosen:
        _, one_more = activations(*overrides, f"learner.checkpoint={chosen - 1}", card=card)
        assert not plan.fits or one_more.cards[-1].used > 0.94 * gib(card)
    assert chosen == 35 or used[0] <= 0.97 * gib(card)


def test_how_many_layers_are_computed_again() -> None:
    assert [activations(f"learner.checkpoint={value}")[0] for value in ("none", "0", "7", "99", "all")] == [
        0, 0, 7, 36, 36,
    ]  # fmt: skip
    assert activations("learner.checkpoint=auto", card=None)[0] == 35  # the size is not known
    assert activations("learner.gpus_per_learner=0", "serving.gpus_per_replica=0", "learner.num_learners=0")[0] == 0
    assert 0 < activations()[0] < activations(card=47.4)[0] == 35 and activations(card=139.0)[0] == 0
    details = [part.detail for process in activations()[1].cards[0].processes for part in process.parts]
    assert any("16 are computed again" in detail for detail in details)


@pytest.mark.parametrize(
    ("run", "placed"),
    [
        (gpus(1, 0.5, 1, 0.5), [["replica", "learner"]]),
        (gpus(1, 1, 0, 1), [["replica"], ["learner"]]),
        (gpus(2, 0.5, 1, 1), [["replica", "replica"], ["learner"]]),
        (gpus(3, 1, 2, 1), [["replica"], ["replica"], ["replica"], ["learner"], ["learner"]]),
        (gpus(2, 0.7, 1, 0.3), [["replica", "learner"], ["replica"]]),
        (gpus(1, 2, 1, 1, vllm={"tensor_parallel_size": 2}), [["replica"], ["replica"], ["learner"]]),
        (PolicyConfig(), []),
    ],
)
def test_actors_are_placed_as_ray_places_them(run: PolicyConfig, placed: list[list[str]]) -> None:
    assert place(run) == placed
    assert shares_gpu(run) == any(len(set(kinds)) == 2 for kinds in placed)
    assert driver_gpu(run) == next((k for k, kinds in enumerate(placed) if "learner" in kinds), 0)


def test_a_learner_beside_vllm_gets_what_vllm_leaves() -> None:
    card = gib(47.4)
    context = CUDA_CONTEXT / card
    shared = recipe("geo3k_qwen3vl_4b", "serving.vllm.gpu_memory_utilization=0.42")
    assert learner_fraction(shared, card) == pytest.approx(0.58 - context)
    # By default vLLM takes 0.94 of its share.
    plain = gpus(1, 0.5, 1, 0.5, vllm={"rest_while_learning": False})
    assert learner_fraction(plain, card) == pytest.approx(1 - 0.47 - context)
    assert learner_fraction(gpus(1, 0.5, 1, 0.5, engine="transformers"), card) == pytest.approx(0.5 - context)
    assert learner_fraction(gpus(1, 1, 1, 1), card) is None


def test_keys_and_values_are_sized_where_the_gpu_is_shared() -> None:
    shape, card = shape_of_config(PUBLISHED["4b"]), gib(47.4)
    run = recipe("geo3k_qwen3vl_4b")
    planned = sizes(plan_memory(run, shape, card))["replica", KV]
    assert kv_cache_bytes(run, shape, card) == planned > 5 * GIB
    assert kv_cache_bytes(gpus(1, 1, 1, 1), shape, card) is None  # vLLM measures a GPU of its own
    own = recipe("geo3k_qwen3vl_4b", "serving.vllm.gpu_kv_cache_gib=3")
    assert kv_cache_bytes(own, shape, card) == 3 * GIB
    # Where nothing is left vLLM is given one token, which it refuses with a sentence.
    assert kv_cache_bytes(run, shape, gib(16)) == shape.kv_bytes_per_token(2)


def test_a_replica_is_counted_as_vllm_starts_it() -> None:
    """A patch of 2B's tower takes 33,792 bytes, and a token is 4 of them with features of 4 times 2,048 numbers."""
    shape, kept = shape_of_config(PUBLISHED["2b"]), 4 * 2048 * 2

    def part(name: str, *overrides: str) -> int:
        parts = replica_parts(recipe("geo3k_qwen3vl_2b", *overrides), shape, None)
        return sum(part.bytes for part in parts if part.name == name)

    buffers = 8192 * 3 * 2048 * 2  # of a step's deep stack
    # The processor allows images of 4096² pixels, 32² a token: more than a step's 8,192 tokens.
    assert part("images", "model.max_pixels=null") == 16_384 * (4 * 33_792 + kept) + buffers
    assert part("images", "model.max_pixels=1048576") == 8192 * (4 * 33_792 + kept) + buffers
    # 1, 2, 4, 8, 16 to 256 samples: 35 sizes, each for decoding and for mixed steps, with adapters and without.
    assert part("CUDA graphs") == 35 * 4 * 28 * 200 * 1024
    assert part("CUDA graphs", "serving.vllm.max_num_seqs=100") == 16 * 4 * 28 * 200 * 1024
    assert part("CUDA graphs", "model.train=full") == 35 * 2 * 28 * 200 * 1024
    assert part("CUDA graphs", "serving.vllm.enforce_eager=true") == 0


def test_the_transformers_engine_holds_adapters_beside_16_bit_weights() -> None:
    """Two versions in float32; in float32 they are merged, and the layers counted again."""
    run = gpus(1, 1, 1, 1, engine="transformers")
    found = sizes(plan_memory(run, shape_of_config(PUBLISHED["4b"]), gib(79.15)))
    rank_16 = 66_060_288 // 2
    assert found["replica", "adapters"] == 2 * 4 * rank_16
    merged = parse_config({"serving": {"gpus_per_replica": 1, "engine": "transformers"}})
    names = sizes(plan_memory(merged, shape_of_config(PUBLISHED["4b"]), gib(79.15)))
    assert ("replica", "merged adapters") in names and ("replica", "adapters") not in names


@pytest.mark.parametrize(("parallel", "heads"), [(1, 8), (8, 1), (16, 1)])
def test_a_key_head_is_not_cut_over_gpus(parallel: int, heads: int) -> None:
    """8B has eight: sixteen GPUs hold each twice. 36 layers, 128 numbers of two bytes, keys and values."""
    run = gpus(1, parallel, 1, 1, vllm={"tensor_parallel_size": parallel, "gpu_kv_cache_gib": 1})
    shape = shape_of_config(PUBLISHED["8b"])
    (part,) = [part for part in replica_parts(run, shape, gib(79.15)) if part.name == KV]
    assert f"{GIB // (2 * 36 * heads * 128 * 2)} tokens" in part.detail


def test_the_object_store_holds_the_versions_of_an_adapter() -> None:
    assert object_store_mib(recipe("geo3k_qwen3vl_8b")) == 999 + 128  # three times 349 * 10^6 bytes, and room
    assert object_store_mib(recipe("geo3k_qwen3vl_8b", "resources.object_store_mib=300")) == 300
    assert object_store_mib(PolicyConfig()) == 256
    assert object_store_mib(load_config(CONFIGS / "rl_vlm_f" / "sweep_into.yaml")) == 256


def test_a_preference_run_is_planned() -> None:
    plan = make_plan(load_config(CONFIGS / "rl_vlm_f" / "sweep_into.yaml"), 23.6)
    assert plan.fits and [[process.kind for process in card.processes] for card in plan.cards] == [
        ["replica"],
        ["learner"],
    ]


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_of_another_family_fits_the_card_that_the_docs_name(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OTHERS[name]["config"]))
    config = str(CONFIGS / f"{OTHERS[name]['recipe']}.yaml")
    assert cli.run(["plan", config, f"model.path={tmp_path}", "--gpu-gib", OTHERS[name]["gpu_gib"], "--json"]) == 0
    assert round(json.loads(capsys.readouterr().out)["parameters"] / 1e9, 2) == OTHERS[name]["billions"]


def test_linear_attention_keeps_a_state_of_each_sample_and_more_for_its_gradient() -> None:
    """Qwen3.5-4B: 24 of 32 layers have 32 heads of 128 × 128 and a convolution of 8,192 channels over 4 tokens."""
    run, shape = recipe("geo3k_qwen35_4b"), shape_of_config(OTHERS["Qwen3.5-4B"]["config"])
    state, keys = 24 * 4 * (32 * 128 * 128 + 8192 * 3), 8 * 2 * 4 * 256 * 2
    assert sample_bytes(run, shape) == 4096 * keys + state and shape.kv_bytes_per_token(2) == keys
    assert sample_bytes(run, shape, 0.25) == 1024 * keys + state
    with_states = layer_bytes_per_token(shape, 2, 32, "all")
    shape.text.state_inputs = 0
    # The convolution's inputs and outputs, queries, keys, values, the products of 64 tokens, and the norm's.
    numbers = 2 * 8192 + 3 * 32 * 128 + 32 * 64 + 6 * 32 * 128
    assert with_states - layer_bytes_per_token(shape, 2, 32, "all") == 2 * 24 * numbers // 32


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["serving.gpus_per_replica=1", "serving.vllm.gpu_memory_utilization=0.42"], "gpu_memory_utilization=null"),
        (["serving.gpus_per_replica=1", "serving.vllm.gpu_memory_utilization=0.8"], ""),
        (["serving.gpus_per_replica=1"], ""),
        (["serving.vllm.gpu_memory_utilization=0.42"], ""),  # the learner has the rest
        (["model.lora.alpha=48"], r"1\.5.*alpha to 64"),
        (["model.lora.rank=24"], r"2\.67.*alpha to 48"),
        (["model.lora.alpha=8"], ""),
        (["model.lora.alpha=48", "model.dtype=float32"], ""),
        (["model.lora.alpha=48", "model.train=full"], ""),
        (["model.lora.alpha=48", "serving.engine=transformers"], ""),
    ],
)
def test_settings_that_waste_a_gpu_or_digits_are_named(
    overrides: list[str], says: str, tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = recipe("geo3k_qwen3vl_4b", *overrides)
    memory_needs(run, tiny_folder)  # of a start, and of `--dry-run`
    said = [*describe(run, make_plan(run, gpu_gib=47.4)), *caplog.messages]
    found = [line for line in said if "GPU to itself" in line or "once more" in line]
    assert len(found) == (2 if says else 0) and all(re.search(says, line) for line in found)


def test_what_does_not_fit_ends_with_code_1_and_advice(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(CONFIGS / "geo3k_qwen3vl_8b.yaml")
    assert cli.run(["plan", config, "learner.checkpoint=none", "--gpu-gib", "47.4"]) == 1
    printed = capsys.readouterr().out
    assert "learner.checkpoint=auto" in printed
    assert cli.run(["plan", config, "model.path=other/unknown"]) == 1
    assert "other/unknown" in capsys.readouterr().err
    assert cli.run(["plan", config, "model.path=./nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


# --- Counts from config.json equal what transformers' classes and peft allocate, on the meta device


# Billions in the index files of the published weights.
PUBLISHED_PARAMETERS = {"2b": 2_127_532_032, "4b": 4_437_815_808, "8b": 8_767_123_696, "32b": 33_357_390_064}


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config)


def count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("size", PUBLISHED)
def test_parameters_equal_those_of_the_real_class(size: str) -> None:
    data = PUBLISHED[size]
    model = on_meta(Qwen3VLConfig(**copy.deepcopy(data)))
    shape = shape_of_config(data)
    assert shape.parameters == count(model) == PUBLISHED_PARAMETERS[size]
    assert shape.tower.parameters == count(model.model.visual)
    assert shape.text.parameters + shape.text.embedding == count(model.model.language_model)


@pytest.mark.parametrize("target", [name for name in TARGET_MODULES if name != "none"])
def test_an_adapter_has_the_size_that_peft_gives_it(target: str) -> None:
    data = copy.deepcopy(PUBLISHED["2b"])
    data["text_config"]["num_hidden_layers"] = data["vision_config"]["depth"] = 2
    data["vision_config"]["deepstack_visual_indexes"] = [0]
    model = inject_lora(on_meta(Qwen3VLConfig(**copy.deepcopy(data))), lora_config(32, 64, target))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert shape_of_config(data).lora_parameters(32, target) == trained


def test_qwen_2_5_is_counted_too(tmp_path: Path) -> None:
    config = Qwen2_5_VLConfig(
        text_config={"num_hidden_layers": 3, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
                     "intermediate_size": 512, "vocab_size": 1000, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}},
        vision_config={"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96, "out_hidden_size": 256},
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(config)
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    assert read_shape(tmp_path).parameters == count(model)


# --- What replicas have memory for, and how many `rl-vlm serve` waits for at its start


def test_keys_and_values_get_what_a_replica_has_memory_for(tiny_folder: Path) -> None:
    shape = read_shape(tiny_folder)

    def limit(*settings: str, card: int = 0, free: int = 0) -> int:
        return max_kv_tokens(load_config(None, [f"model.path={tiny_folder}", *settings]), shape, card, free)

    each = shape.kv_bytes_per_token(4)
    assert limit(free=10 * GIB) == 8 * GIB // each
    assert limit("serving.max_kv_gib=3", card=GIB, free=10 * GIB) == 3 * GIB // each
    whole, half = (
        limit("serving.engine=transformers", f"serving.gpus_per_replica={gpus}", card=8 * GIB) for gpus in (1, 0.5)
    )
    assert whole < 0.85 * 8 * GIB // each and whole - half == pytest.approx(0.85 * 4 * GIB / each, rel=1e-6)
    assert limit(free=1) == 4096  # one sample


def test_a_model_that_vllm_has_no_kernels_for_is_rejected(tiny_folder: Path, wide_folder: Path) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(CPU_HEADS) == CPUAttentionBackend.get_supported_head_sizes()
    narrow, wide = (
        load_config(None, [f"model.path={folder}", "serving.engine=vllm"]) for folder in (tiny_folder, wide_folder)
    )
    with pytest.raises(UserInputError, match="16 dimensions"):
        check_kernels(narrow, tiny_folder)
    check_kernels(wide, wide_folder)
    check_kernels(load_config(None, [f"model.path={tiny_folder}"]), tiny_folder)
