"""Ways to share an update over processes: all make the update of one process, and go on where another number stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learner_processes import LR, Learned, learn

from rl_vlm.algorithms.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.zoo.tiny import model as tiny

SHARDING = [
    pytest.param({"strategy": "fsdp2"}, id="fsdp2"),
    pytest.param({"strategy": "fsdp2", "offload_params": True}, id="fsdp2-offload"),
    pytest.param({"strategy": "fsdp2", "checkpoint": 1}, id="fsdp2-checkpoint"),
    pytest.param({"strategy": "zero1"}, id="zero1"),
    pytest.param({"strategy": "zero1", "offload_optimizer": True}, id="zero1-offload"),
    pytest.param({"strategy": "zero2"}, id="zero2"),
    pytest.param({"strategy": "zero2", "offload_optimizer": True}, id="zero2-offload"),
    pytest.param({"strategy": "zero3"}, id="zero3"),
    pytest.param({"strategy": "zero3", "offload_optimizer": True, "offload_params": True}, id="zero3-offload"),
]


def group(folder: Path, learners: int, updates: list[int], settings: dict[str, Any], **more: Any) -> Learned:
    return learn(folder, learners, updates, **{f"learner__{key}": value for key, value in settings.items()}, **more)


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> Learned:
    """Three updates by one process."""
    return learn(tiny_folder, 1, [0, 1, 2])


def check_equal(one: Learned, other: Learned) -> None:
    """Adapters, moments, norms of gradients and what the model says: as equal as sums in another order are."""
    np.testing.assert_allclose(one.norms, other.norms, rtol=1e-5)
    assert one.adapter.keys() == other.adapter.keys() and one.moments.keys() == other.moments.keys()
    for name, array in other.adapter.items():
        np.testing.assert_allclose(one.adapter[name], array, atol=1e-5, rtol=0, err_msg=name)
    for name, array in other.moments.items():
        np.testing.assert_allclose(one.moments[name], array, atol=1e-5 * np.abs(array).max(), rtol=0, err_msg=name)
    for found, expected in zip(one.scores, other.scores, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


def check_shards(found: Learned, reference: Learned, settings: dict[str, Any]) -> None:
    """The layers are divided where the strategy says so, and learners with less to do made passes that do not count."""
    learners = len(found.held)
    parts = learners if settings["strategy"] in ("fsdp2", "zero3") else 1
    assert found.held == pytest.approx([reference.held[0] / parts] * learners, rel=0.05)
    made, counted = ([[step[k] for step in one] for one in found.passes] for k in (0, 1))
    assert all(one == made[0] for one in made)
    assert learners == 2 or any(one != counted[0] for one in counted)


def test_sharded_layers_make_the_update_of_one_process(tiny_folder: Path, reference: Learned) -> None:
    moved = max(np.abs(array).max() for array in reference.adapter.values())
    assert moved > LR and len(reference.norms) == 6
    settings = {"strategy": "fsdp2"}
    found = group(tiny_folder, 2, [0, 1, 2], settings)
    check_equal(found, reference)
    check_shards(found, reference, settings)


@pytest.mark.acceptance
def test_two_learners_make_the_full_update_of_one(tiny_folder: Path) -> None:
    """All weights, with a reference; and two go on exactly where one stopped after two of three updates."""
    full = {"model__train": "full", "learner__lr": 1e-4}
    alone = learn(tiny_folder, 1, [0, 1, 2], **full)
    assert any(".visual." in name for name in alone.adapter)
    check_equal(learn(tiny_folder, 2, [0, 1, 2], **full), alone)
    half = learn(tiny_folder, 1, [0, 1], **full)
    again = learn(tiny_folder, 1, [2], start=half, **full)
    for name, array in alone.adapter.items():
        np.testing.assert_array_equal(again.adapter[name], array, err_msg=name)
    for name, array in alone.moments.items():
        np.testing.assert_array_equal(again.moments[name], array, err_msg=name)


FULL = {"model__train": "full", "learner__lr": 1e-4}


@pytest.mark.parametrize(
    ("first", "second"), [(2, 1), *(pytest.param(*both, marks=pytest.mark.acceptance) for both in [(1, 2), (4, 2)])]
)
def test_sharded_masters_make_the_full_update_of_one_process(tiny_folder: Path, first: int, second: int) -> None:
    """All weights, with a reference; what some learners saved others continue."""

    def some(learners: int, updates: list[int], **more: Any) -> Learned:
        strategy = "fsdp2" if learners > 1 else None
        return learn(tiny_folder, learners, updates, learner__strategy=strategy, **FULL, **more)

    half = some(first, [0])
    again = some(second, [1], start=half)
    check_equal(replace(again, norms=half.norms + again.norms), some(1, [0, 1]))


@pytest.mark.acceptance
@pytest.mark.parametrize("more", [{"offload_params": True}, {"checkpoint": 1}])
def test_sharded_masters_by_other_ways(tiny_folder: Path, more: dict[str, Any]) -> None:
    found = group(tiny_folder, 2, [0, 1], {"strategy": "fsdp2", "lr": 1e-4, **more}, model__train="full")
    check_equal(found, learn(tiny_folder, 1, [0, 1], **FULL))


@pytest.mark.acceptance
def test_sharded_masters_in_bfloat16(tiny_folder: Path) -> None:
    """Gradients are rounded at other places: the updates agree as far as bfloat16 does."""
    dtype = {"model__dtype": "bfloat16"}
    alone = learn(tiny_folder, 1, [0, 1], **FULL, **dtype)
    found = learn(tiny_folder, 2, [0, 1], learner__strategy="fsdp2", **FULL, **dtype)
    np.testing.assert_allclose(found.norms, alone.norms, rtol=0.02)
    start = learn(tiny_folder, 1, [], **FULL, **dtype)
    moved = np.concatenate([(alone.adapter[name] - start.adapter[name]).ravel() for name in start.adapter])
    apart = np.concatenate([(alone.adapter[name] - found.adapter[name]).ravel() for name in start.adapter])
    assert np.linalg.norm(apart) < 0.2 * np.linalg.norm(moved)


@pytest.mark.acceptance
def test_four_learners_hold_a_quarter_of_what_is_trained(tmp_path: Path) -> None:
    wide_model(tmp_path)
    few_passes = {**FULL, "learner__micro_batch_tokens": 4096, "algorithm__minibatches": 1, "algorithm__kl_coef": 0.0}
    (alone,) = learn(tmp_path, 1, [0], **few_passes).kept
    assert max(learn(tmp_path, 4, [0], learner__strategy="fsdp2", **few_passes).kept) < 0.26 * alone


def wide_model(folder: Path) -> tuple[float, float]:
    """A model with most of its weights in its layers; MiB of these, and of the rest."""
    plain = tiny.build_processor()
    model = tiny.build_model(0, plain.tokenizer, "wide")
    model.config.text_config.update({"intermediate_size": 32768, "num_hidden_layers": 8})
    model = type(model)(model.config)
    model.save_pretrained(folder)
    plain.save_pretrained(folder)
    layers = sum(parameter.numel() for parameter in model.model.language_model.layers.parameters()) * 4 / 2**20
    return layers, sum(parameter.numel() for parameter in model.parameters()) * 4 / 2**20 - layers


@pytest.mark.acceptance
def test_no_learner_takes_memory_for_the_whole_model(tmp_path: Path) -> None:
    layers, rest = wide_model(tmp_path)
    assert layers > 150 > rest
    for grown in group(tmp_path, 2, [], {"strategy": "fsdp2"}).grown:
        assert layers / 2 < grown < layers / 2 + rest + 60


@pytest.mark.acceptance
@pytest.mark.parametrize("learners", [2, 4])
@pytest.mark.parametrize("settings", SHARDING)
def test_every_strategy_makes_the_update_of_one_process(
    tiny_folder: Path, reference: Learned, settings: dict[str, Any], learners: int
) -> None:
    found = group(tiny_folder, learners, [0, 1, 2], settings)
    check_equal(found, reference)
    check_shards(found, reference, settings)


@pytest.mark.acceptance
@pytest.mark.parametrize("settings", SHARDING)
def test_saved_by_four_and_continued_by_two(
    tiny_folder: Path, tmp_path: Path, reference: Learned, settings: dict[str, Any]
) -> None:
    import torch
    from core_support import run_config

    from rl_vlm.models.lora import lora_config

    four = group(tiny_folder, 4, [0, 1], settings)
    lora = run_config(tiny_folder).model.lora
    adapter = AdapterPayload.build(
        1,
        {name: torch.from_numpy(array) for name, array in four.adapter.items()},
        lora_config(lora.rank, lora.alpha, lora.target_modules),
    )
    moments = {name: torch.from_numpy(array) for name, array in four.moments.items()}
    write_checkpoint(tmp_path, Checkpoint(adapter, moments, {}))
    saved = read_checkpoint(tmp_path)
    start = replace(
        four,
        adapter={name: tensor.numpy() for name, tensor in saved.adapter.state().items()},
        moments={name: tensor.numpy() for name, tensor in saved.moments.items()},
    )
    two = group(tiny_folder, 2, [2], settings, start=start)
    check_equal(replace(two, norms=four.norms + two.norms), reference)
    # And by one process alone, without the strategy.
    one = learn(tiny_folder, 1, [2], start=start)
    check_equal(replace(one, norms=four.norms + one.norms), reference)


@pytest.mark.parametrize("settings", [{"strategy": "fsdp2"}, *SHARDING[3:]])
@pytest.mark.acceptance
def test_a_gradient_that_is_not_finite_is_skipped_by_all(tiny_folder: Path, settings: dict[str, Any]) -> None:
    found = group(tiny_folder, 2, [0, 1], settings, poisoned=1)
    clean = group(tiny_folder, 2, [0], settings)
    assert found.skipped == 1
    assert len(found.norms) == len(clean.norms) + 1
    for name in found.adapter:
        assert np.isfinite(found.adapter[name]).all()
