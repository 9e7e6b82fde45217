"""Settings of GPUs that would fail later, and less clearly, are refused; cards count as what they are sold as."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from core_support import (
    adapted_policy,
    batch_of,
    builder_of,
    conversation,
    gradient_vector,
    run_config,
    text_side,
    train_sample,
)
from tables import table
from torch._utils import _get_device_index

from rl_vlm.algorithms.grpo import GRPO
from rl_vlm.algorithms.preference_sac import PreferenceSAC
from rl_vlm.config import PolicyConfig, load_config, parse_config
from rl_vlm.engines import transformers_engine
from rl_vlm.learning import policy_model
from rl_vlm.learning.batching import padding_batch
from rl_vlm.learning.optimizer import make_optimizer
from rl_vlm.learning.plan import UpdateBatch, UpdateStats
from rl_vlm.learning.strategies import AllReduce, Strategy
from rl_vlm.learning.update import PolicyUpdater
from rl_vlm.models import devices
from rl_vlm.models.devices import choose_order
from rl_vlm.models.memory.placement import place
from rl_vlm.runs import ray_session
from rl_vlm.types import UserInputError

CONFIGS = Path(__file__).parents[2] / "configs"
GIB = 1 << 30


def run(serving: dict[str, Any] | None = None, learner: dict[str, Any] | None = None, **other: Any) -> PolicyConfig:
    return parse_config({"serving": serving or {}, "learner": learner or {}, **other})


@pytest.mark.parametrize(("serving", "learner", "message"), table("refused_settings")["gpu_settings"])
def test_settings_that_contradict_each_other(serving: dict[str, Any], learner: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        run(serving, learner)


def test_pairs_have_a_gpu_each() -> None:
    pairs = {"resources": {"placement": "pairs"}}
    eight = run({"num_replicas": 8, "gpus_per_replica": 0.5}, {"num_learners": 8, "gpus_per_learner": 0.5}, **pairs)
    assert place(eight) == [["replica", "learner"]] * 8 and eight.needed_gpus == 8 and eight.takes_turns
    assert run({"num_replicas": 2}, {"num_learners": 2}, **pairs).takes_turns  # without GPUs
    for serving, learner, other in (
        ({"num_replicas": 2}, {"num_learners": 1}, {}),
        ({"num_replicas": 2}, {"num_learners": 2}, {"rollout": {"max_policy_lag": 1}}),
        ({"num_replicas": 2, "gpus_per_replica": 1}, {"num_learners": 2, "gpus_per_learner": 1}, {}),
    ):
        with pytest.raises(UserInputError, match="as many learners as replicas"):
            run(serving, learner, **pairs, **other)


@pytest.mark.parametrize(("temperature", "fits"), [(0.005, False), (0.01, True), (2.0, True), (2.5, False)])
def test_vllm_samples_at_some_temperatures(temperature: float, fits: bool) -> None:
    rollout = {"temperature": temperature}
    run(rollout=rollout)  # the transformers engine at any
    if fits:
        run({"gpus_per_replica": 1}, rollout=rollout)
    else:
        with pytest.raises(UserInputError, match=rf"rollout.temperature {temperature:g}: vLLM samples at 0.01 to 2"):
            run({"gpus_per_replica": 1}, rollout=rollout)


# --- the machine


def a_machine(monkeypatch: pytest.MonkeyPatch, gib: float, count: int = 1) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=int(gib * GIB)))
    for name in ("RAY_ADDRESS", "RAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("size", "reported", "smaller"), [("2b", 23.6, 22.0), ("4b", 47.4, 44.4), ("8b", 79.15, 47.4)])
def test_a_card_counts_as_what_it_is_sold_as(
    size: str, reported: float, smaller: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_config(CONFIGS / f"geo3k_qwen3vl_{size}.yaml", ["resources.num_cpus=64"])
    a_machine(monkeypatch, reported)
    ray_session.check_resources(recipe)
    a_machine(monkeypatch, smaller)
    with pytest.raises(UserInputError, match=rf"made for a GPU of \d+ GiB and the smallest here has {smaller:.1f} GiB"):
        ray_session.check_resources(recipe)


# --- the learner's GPU


def test_a_learner_in_the_driver_takes_a_gpu_that_no_replica_has(monkeypatch: pytest.MonkeyPatch) -> None:
    a_machine(monkeypatch, 80, count=2)
    two = load_config(CONFIGS / "rl_vlm_f" / "sweep_into.yaml")
    assert devices.learner_device(two) == devices.driver_device(two) == "cuda:1"
    config = PreferenceSAC.from_run_config(two)
    assert (config.num_gpus_per_learner, config.local_gpu_idx) == (1.0, 1)
    a_machine(monkeypatch, 80, count=1)
    one = load_config(
        CONFIGS / "rl_vlm_f" / "sweep_into.yaml", ["serving.gpus_per_replica=0.7", "learner.gpus_per_learner=0.3"]
    )
    assert devices.learner_device(one) == "cuda:0" and PreferenceSAC.from_run_config(one).local_gpu_idx == 0
    # An actor sees its own GPU alone; what is beside it in the driver goes to the learner's GPU.
    a_machine(monkeypatch, 80, count=2)
    actor = run({"num_replicas": 1, "gpus_per_replica": 1}, {"num_learners": 1, "gpus_per_learner": 1})
    assert (devices.learner_device(actor), devices.driver_device(actor)) == ("cuda", "cuda:1")
    assert devices.learner_device(run()) == "cpu" and GRPO.from_run_config(run()).local_gpu_idx == 0


def test_on_a_cluster_that_was_joined_ray_places_the_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ray_session._check_driver_gpu(run({"gpus_per_replica": 1}, {"num_learners": 1, "gpus_per_learner": 1}))
    ray_session._check_driver_gpu(run())
    with pytest.raises(UserInputError, match="learner.num_learners"):
        ray_session._check_driver_gpu(load_config(CONFIGS / "rl_vlm_f" / "sweep_into.yaml"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # a job has been given a GPU of its own
    ray_session._check_driver_gpu(load_config(CONFIGS / "rl_vlm_f" / "sweep_into.yaml"))


def test_a_learner_that_shares_a_gpu_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[float, int]] = []
    a_machine(monkeypatch, 47.4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def limited(fraction: float, at: Any) -> None:
        limits.append((fraction, _get_device_index(at)))  # torch's own, which refuses a GPU without a number

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limited)
    devices.limit_memory(run({"gpus_per_replica": 1}, {"num_learners": 1, "gpus_per_learner": 1}), "cuda")
    devices.limit_memory(run(), "cpu")
    assert not limits
    devices.limit_memory(load_config(CONFIGS / "geo3k_qwen3vl_4b.yaml"), "cuda")  # takes turns with its replica
    assert not limits
    shared = load_config(CONFIGS / "geo3k_qwen3vl_4b.yaml", ["serving.vllm.gpu_memory_utilization=0.42"])
    devices.limit_memory(shared, "cuda")
    devices.limit_memory(shared, "cuda:1")
    assert limits == [(pytest.approx(0.58 - 0.6 / 47.4, abs=1e-6), number) for number in (0, 1)]


@pytest.mark.parametrize(("deterministic", "asked"), [(True, ["cpu"]), (False, [])], ids=["deterministic", "not"])
def test_a_deterministic_learner_asks_for_one_order_of_sums(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, deterministic: bool, asked: list[str]
) -> None:
    found: list[str] = []
    monkeypatch.setattr(policy_model, "choose_order", found.append)
    policy_model.PolicyModel(tiny_folder, run(deterministic=deterministic))
    assert found == asked


def test_engine_and_learner_ask_for_the_same_precision(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> None:
    asked: list[tuple[str, str]] = []
    for module in (policy_model, transformers_engine):
        monkeypatch.setattr(module, "choose_precision", lambda *given: asked.append(given))
    engine = transformers_engine.TransformersEngine(tiny_folder, dtype="bfloat16", max_context=64)
    asyncio.run(engine.close())
    policy_model.PolicyModel(tiny_folder, run(model={"dtype": "bfloat16"}))
    assert asked == [("bfloat16", "cpu")] * 2


# --- what is published


@pytest.mark.parametrize(
    ("serving", "dtype", "published"),
    [
        ({"gpus_per_replica": 1}, "bfloat16", "bfloat16"),
        ({"gpus_per_replica": 1, "engine": "transformers"}, "bfloat16", "float32"),  # which merges in float32
        ({}, "float32", "float32"),
    ],
)
def test_adapters_are_published_as_the_engine_serves_them(serving: dict[str, Any], dtype: str, published: str) -> None:
    assert run(serving, model={"dtype": dtype}).published_dtype == published


# --- drivers


def test_one_order_of_sums_is_torchs_deterministic_kernels_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", found.append)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # what was there comes back after the test
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    choose_order("cpu")
    assert not found and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    choose_order("cuda")
    assert found == [True] and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


# --- Settings of the learners' strategies, and micro-batches that count for nothing


TABLES = table("settings")


@pytest.mark.parametrize(("settings", "message"), TABLES["settings_that_contradict_each_other"])
def test_strategies_that_do_not_fit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        parse_config({"learner": settings})


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_what_deepspeed_cannot_learn_is_refused(strategy: str) -> None:
    learner = {"strategy": strategy, "num_learners": 2}
    with pytest.raises(UserInputError, match="neither a critic.*use fsdp2 or all_reduce"):
        parse_config({"learner": learner, "algorithm": {"name": "ppo"}})
    with pytest.raises(UserInputError, match="nor the vision tower"):
        parse_config(
            {"learner": learner, "model": {"lora": {"target_modules": "vision"}}, "serving": {"engine": "transformers"}}
        )
    parse_config({"learner": {**learner, "strategy": "fsdp2"}, "algorithm": {"name": "ppo"}})


def test_padding_changes_neither_gradient_nor_figures(tiny_folder: Path) -> None:
    run = run_config(tiny_folder, algorithm__kl_coef=0.1, algorithm__entropy_coef=0.01)
    policy, text = adapted_policy(tiny_folder), text_side(tiny_folder)
    updater = PolicyUpdater(policy, run)
    rng = np.random.default_rng(0)
    sample = train_sample(conversation(text, rng, ["What now?"], [5]), 0.7, 0.2)

    def learned(padding: int) -> tuple[torch.Tensor, UpdateStats]:
        policy.model.zero_grad(set_to_none=True)
        (packed,) = updater.pack(batch_of([[sample]]))
        packed += [padding_batch(builder_of(text), text.codec.end_of_turn_id) for _ in range(padding)]
        stats = UpdateStats()
        for micro in packed:
            if not micro.counts:
                micro.reference = updater.logprobs(micro)[0].detach()
            updater.loss(micro, stats if micro.counts else UpdateStats()).backward()
        return gradient_vector(policy.parameters), stats

    (plain, figures), (padded, same) = learned(0), learned(2)
    assert plain.abs().max() > 0 and torch.equal(plain, padded)
    assert figures.metrics() == same.metrics()


def test_scores_and_targets_leave_padding_out(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_vlm.learning import update

    run = run_config(tiny_folder, algorithm__name="ppo", learner__strategy="fsdp2", learner__num_learners=2)
    policy, text = adapted_policy(tiny_folder, algorithm__name="ppo"), text_side(tiny_folder)
    updater = PolicyUpdater(policy, run)
    monkeypatch.setattr(update, "missing_passes", lambda counts, device: [2 for _ in counts])
    trajectory = conversation(text, np.random.default_rng(0), ["What now?"], [5])
    scores = updater.score(batch_of([[train_sample(trajectory, 0.0, 0.2)]]).minibatches)
    assert set(scores.values) == {trajectory.trajectory_id}
    ones = {trajectory.trajectory_id: np.ones(5, dtype=np.float32)}
    (packed,) = updater.pack(UpdateBatch([], [True], ones, ones, [0.2]))
    assert len(packed) == 3
    strategy, stats = Strategy(policy, make_optimizer(policy, run)), UpdateStats()
    assert updater.step(strategy, packed, 1.0, stats) and stats["tokens"] == 5


def test_what_has_a_gradient_in_no_learner_stays_as_in_one_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vision tower in a step without images: neither momentum nor decay may move it, whatever the number of learners."""
    together, shared = threading.Barrier(2, timeout=300), [torch.zeros(0)] * 2

    def all_reduce(tensor: torch.Tensor) -> None:
        rank = int(threading.current_thread().name)
        shared[rank] = tensor.clone()
        together.wait()
        tensor.copy_(shared[0] + shared[1])
        together.wait()

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)

    def trained(kind: type[Strategy], ranks: list[int]) -> dict[str, torch.Tensor]:
        """Three steps; the first learner has the decoder's gradient, the last one the tower's, which the second step lacks."""
        tower, decoder, unused = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
        optimizer = torch.optim.AdamW([tower, decoder, unused], lr=0.1, weight_decay=0.1)
        strategy = kind(None, optimizer)  # type: ignore[arg-type]
        for step in range(3):
            if 0 in ranks:
                strategy.backward((decoder * torch.arange(1.0, 4.0)).sum())
            if 1 in ranks and step != 1:
                strategy.backward((tower * torch.arange(2.0, 5.0)).sum())
            before = tower.detach().clone()
            assert strategy.step(1.0) is not None
            assert torch.equal(tower, before) == (step == 1)
        assert torch.equal(unused, torch.ones(3))
        return {"tower": tower.detach(), "decoder": decoder.detach(), **strategy.state()}

    alone = trained(Strategy, [0, 1])
    found: list[dict[str, torch.Tensor]] = [{}, {}]

    def learner(rank: int) -> None:
        found[rank] = trained(AllReduce, [rank])

    threads = [threading.Thread(target=learner, args=(rank,), name=str(rank), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for several in found:
        assert several.keys() == alone.keys()
        assert all(torch.equal(several[name], tensor) for name, tensor in alone.items())
