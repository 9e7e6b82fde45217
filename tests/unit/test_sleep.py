"""Replica and learner take turns on a GPU (`serving.vllm.rest_while_learning`): registry, follower, state machine, configuration and
memory plan, without Ray and without a GPU."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_support import until
from loops import in_loop
from memory_support import PUBLISHED, gpus, sizes
from registry_support import Direct, own_registry, publish
from tables import table

from rl_vlm.config import PolicyConfig, load_config, parse_config
from rl_vlm.engines.base import EngineStats
from rl_vlm.engines.memory import KV, kv_cache_bytes, replica_parts
from rl_vlm.learning.learner import VLMLearner
from rl_vlm.models.memory.placement import learner_fraction
from rl_vlm.models.memory.reading import shape_of_config
from rl_vlm.models.memory.shape import gib
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.runs.memory import describe
from rl_vlm.runs.memory_plan import plan_memory
from rl_vlm.serving import registry as module
from rl_vlm.serving.counters import ReplicaTally
from rl_vlm.serving.follower import Follower
from rl_vlm.serving.health import Lifecycle
from rl_vlm.serving.registry import VersionRegistry
from rl_vlm.types import POLICY, UserInputError

TABLES = table("settings")

CONFIGS = Path(__file__).parents[2] / "configs"


class Engine:
    """What a follower needs of an engine, with a record of what it did."""

    def __init__(self, *failures: Exception) -> None:
        self.version, self.did, self.failures = 0, list[str](), list(failures)

    async def sleep(self) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.did.append("sleep")

    async def wake(self) -> None:
        self.did.append("wake")

    async def load_adapter(self, payload: AdapterPayload) -> None:
        self.did.append(f"load {payload.version}")
        self.version = payload.version

    def stats(self) -> EngineStats:
        return EngineStats()


class Replica:
    """A follower at work."""

    def __init__(self, registry: VersionRegistry, name: str, *failures: Exception) -> None:
        self.engine, self.life = Engine(*failures), Lifecycle(probe_after_s=10.0)
        self.follower = Follower(
            name,
            self.engine,  # type: ignore[arg-type]
            self.life,
            ReplicaTally(),
            find_registry=lambda: Direct(registry),
            abandoned=lambda: None,
            load_timeout_s=20.0,
            changed=asyncio.Condition(),
            eager=True,
        )
        self.task = asyncio.create_task(self.follower.run())


@in_loop
async def test_replicas_rest_until_the_next_version() -> None:
    async def turn(registry: VersionRegistry, replicas: list[Replica], version: int) -> None:
        assert await registry.let_sleep(True, 10.0) == []
        for one in replicas:
            assert one.life.asleep and not one.life.ready and not one.life.rejects
        await publish(registry, version)
        await until(lambda: all(one.follower.serves(POLICY, version) for one in replicas))
        assert all(one.life.ready for one in replicas)

    registry = await own_registry()
    replicas = [Replica(registry, name) for name in ("one", "two")]
    await until(lambda: len(registry._seen) == 2)
    for version in (1, 2):
        await turn(registry, replicas, version)
    for one in replicas:
        assert one.engine.did == ["sleep", "wake", "load 1", "sleep", "wake", "load 2"]
        one.task.cancel()


@in_loop
async def test_replicas_that_do_not_rest_in_time_are_named_and_dead_ones_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.05)
    registry = await own_registry()
    await publish(registry, 1)
    for name in ("slow", "dead"):
        await registry.watch(name, None)
    assert await registry.let_sleep(True, 0.05) == ["dead", "slow"]
    monkeypatch.setattr(module, "LIVE_WINDOW_S", 0.2)
    assert await registry.let_sleep(True, 10.0) == []


@in_loop
async def test_a_replica_that_a_version_has_woken_does_not_pass_for_asleep() -> None:
    registry = await own_registry()
    resting = asyncio.create_task(registry.watch("one", None, asleep=True))
    await until(lambda: registry._asleep == {"one"})
    await publish(registry, 1)
    await registry.ack("one", POLICY, 1, "hash 1")
    assert await registry.let_sleep(True, 0.05) == ["one"]
    await resting


@pytest.mark.parametrize(("config", "reason"), TABLES["runs_that_do_not_take_turns_are_refused"])
def test_runs_that_do_not_take_turns_are_refused(config: dict[str, dict[str, Any]], reason: str) -> None:
    base: dict[str, dict[str, Any]] = {
        "model": {"dtype": "bfloat16"},
        "serving": {"gpus_per_replica": 0.5, "num_replicas": 1, "vllm": {"rest_while_learning": True}},
        "learner": {"gpus_per_learner": 0.5, "num_learners": 1},
    }
    parse_config(base)
    with pytest.raises(UserInputError, match=reason):
        parse_config({name: base.get(name, {}) | config.get(name, {}) for name in base | config})


def test_a_run_takes_turns_where_it_can_and_no_share_is_set() -> None:
    assert gpus(1, 0.5, 1, 0.5).takes_turns
    assert not gpus(1, 0.5, 1, 0.5, vllm={"rest_while_learning": False}).takes_turns
    assert not gpus(1, 0.5, 1, 0.5, vllm={"gpu_memory_utilization": 0.4}).takes_turns
    assert not gpus(1, 0.5, 1, 0.5, engine="transformers").takes_turns
    assert not gpus(1, 1, 1, 1).takes_turns and not gpus(2, 0.3, 1, 0.3).takes_turns and not PolicyConfig().takes_turns
    lagging = load_config(CONFIGS / "geo3k_qwen3vl_2b.yaml", ["rollout.max_policy_lag=1"])
    assert not lagging.takes_turns


@pytest.mark.parametrize(("size", "reported"), [("2b", 23.6), ("4b", 47.4), ("8b", 79.15)])
def test_turns_leave_more_for_keys_and_values(size: str, reported: float) -> None:
    shape, card = shape_of_config(PUBLISHED[size]), gib(reported)
    plain, turns = (
        load_config(CONFIGS / f"geo3k_qwen3vl_{size}.yaml", [f"serving.vllm.rest_while_learning={rests}"])
        for rests in ("false", "true")
    )
    plan = plan_memory(turns, shape, card)
    learner = {name: size for (kind, name), size in sizes(plan).items() if kind == "learner"}
    update = sum(learner.pop(name) for name in ("activations", "attention mask", "logits"))
    kept = sum(learner.values())
    fixed = sum(part.bytes for part in replica_parts(turns, shape, card) if part.name != KV)
    keys = kv_cache_bytes(turns, shape, card)
    assert keys is not None and keys == int(card * 0.94) - kept - fixed
    before = kv_cache_bytes(plain, shape, card)
    assert before is not None and keys > 2 * before
    (one,) = plan.cards
    assert one.turns and one.used == fixed + kept + max(keys, update)
    assert one.left == int(card * 0.98) - one.used >= 0 and plan.fits
    assert any("keys and values take turns with the update" in line for line in describe(turns, plan))
    # The replica allocates nothing meanwhile, so torch's own limit is the card.
    assert learner_fraction(turns, card) is None and learner_fraction(plain, card) is not None


def test_a_learner_gives_back_memory_after_the_proof_of_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks while its replica rests, as it learns."""
    freed: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(1))
    for run in (gpus(1, 1, 1, 1), gpus(1, 0.5, 1, 0.5)):
        learner = object.__new__(VLMLearner)
        learner.config = SimpleNamespace(run_config=run)
        learner.policy = SimpleNamespace(  # type: ignore[assignment]
            backbone=SimpleNamespace(device=torch.device("cuda")), text=SimpleNamespace(images=None)
        )
        learner.updater = SimpleNamespace(recompute=lambda trajectories: [])  # type: ignore[assignment]
        assert learner.sight_logprobs([], counterfactuals=False) == {"true": [], "blank": [], "shown": []}
        assert len(freed) == run.takes_turns


def test_weights_that_leave_no_room_for_a_sample_are_told() -> None:
    run = gpus(1, 0.5, 1, 0.5, max_context=4096, vllm={"rest_while_learning": True})
    plan = plan_memory(run, shape_of_config(PUBLISHED["8b"]), gib(23.6))
    assert not plan.fits and "one sample of serving.max_context" in plan.starved


@in_loop
async def test_replicas_wake_without_a_version_when_they_are_told() -> None:
    registry = await own_registry()
    one = Replica(registry, "one")
    await until(lambda: one.life.started)
    await until(lambda: "one" in registry._seen)
    assert await registry.let_sleep(True, 10.0) == []
    assert await registry.let_sleep(False, 10.0) == []
    assert not one.life.asleep and one.engine.did == ["sleep", "wake"]
    one.task.cancel()


def test_a_resting_replica_is_not_probed() -> None:
    life = Lifecycle(probe_after_s=10.0)
    life.started = True
    life.asleep = True
    assert not life.probe_due(1e9) and not (life.ready or life.rejects)
    life.asleep = False
    assert life.probe_due(1e9) and life.ready
    life.asleep = True
    life.die("its engine has died")
    assert life.rejects
