"""The vLLM engine with a recipe's arguments beside a learner on the same GPU, which take turns; or with all weights.

What the memory plan promised stands beside a figure as `..._planned`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import draw_adapter
from common import free as free_memory
from engine import GAP, Sampling
from speed import planned_learner

from rl_vlm.config import PolicyConfig, load_config
from rl_vlm.engines.base import EngineError
from rl_vlm.engines.memory import KV
from rl_vlm.engines.vllm_engine import VLLMEngine
from rl_vlm.engines.vllm_weights import AdapterVersions
from rl_vlm.learning import policy_model
from rl_vlm.models.memory.reading import read_shape
from rl_vlm.models.memory.shape import GIB
from rl_vlm.runs.memory_plan import MemoryPlan, plan_memory

RECIPES = Path(__file__).parents[2] / "configs"
_POLICIES = 5  # more than the adapters that vLLM keeps on the GPU and beside it
# What a recipe lacks for the tiny model, and for a CPU.
_TINY = ("serving.max_context=256", "rollout.max_new_tokens=64", "rollout.max_new_tokens_per_turn=64",
         "learner.micro_batch_tokens=256", "serving.vllm.max_num_seqs=16", "model.max_pixels=null")  # fmt: skip
_CPU = ("serving.gpus_per_replica=0", "learner.gpus_per_learner=0", "serving.vllm.kv_cache_gib=1")


class Bench(Sampling):
    """vLLM and a learner; the checks keep one engine, so that its start is paid for once."""

    eager = False
    whole: tuple[str, ...] = ()  # settings of a run that trains all weights

    def __init__(self, folder: Path, size: str, device: str) -> None:
        super().__init__(folder, size, device)
        self.rows = (1, 4) if self.small else (8, 64, 256)
        self.on_gpu = device == "cuda"
        self.run = self._recipe()
        self.shape = read_shape(folder)

    def _recipe(self, *more: str) -> PolicyConfig:
        name = f"geo3k_qwen3vl_{'2b' if self.small else self.size}.yaml"
        here = (*(_TINY if self.small else ()), *(() if self.on_gpu else _CPU))
        words = (f"model.path={self.folder}", "serving.engine=vllm", *here, *self.whole, *more)
        run = load_config(RECIPES / name, words)
        assert isinstance(run, PolicyConfig)
        return run

    @cached_property
    def plan(self) -> MemoryPlan:
        return plan_memory(self.run, self.shape, torch.cuda.mem_get_info()[1] if self.on_gpu else None)

    @cached_property
    def engine(self) -> VLLMEngine:
        if not any(self.folder.glob("*.safetensors")):
            self.weights()
        return VLLMEngine(self.folder, self._recipe(f"serving.vllm.enforce_eager={str(self.eager).lower()}"))

    def _free_gib(self) -> float:
        return torch.cuda.mem_get_info()[0] / GIB if self.on_gpu else 0.0

    def _planned(self, part: str) -> float:
        parts = [one for card in self.plan.cards for process in card.processes for one in process.parts]
        return next(one.bytes for one in parts if one.name == part) / GIB

    # --- the checks

    def weights(self) -> None:
        """Write random weights as a published model's, for vLLM to read; imports vLLM."""
        started = time.perf_counter()
        model = policy_model.load_model(self.folder, "bfloat16", self.device)
        drawn = time.perf_counter()
        model.save_pretrained(self.folder)
        size = sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))
        self.report.add(
            "weights", draw_s=drawn - started, write_s=time.perf_counter() - drawn, gib=size / GIB,
            gib_planned=2 * self.shape.parameters / GIB,
        )  # fmt: skip

    def start(self) -> None:
        """Start vLLM as a replica does, beside a learner, and load a first version."""
        free, started = self._free_gib(), time.perf_counter()
        cache = self.engine._llm.vllm_config.cache_config
        taken = time.perf_counter() - started
        used = free - self._free_gib()
        began = time.perf_counter()
        payload = self.publish()
        (replica,) = (one for card in self.plan.cards for one in card.processes if one.kind == "replica")
        self.report.add(
            "start", seconds=taken, eager=self.eager, used_gib=used, used_gib_planned=replica.bytes / GIB,
            kv_tokens=(cache.num_gpu_blocks or 0) * cache.block_size,
            kv_gib_planned=self._planned(KV), samples_planned=self.plan.samples, adapter_bytes=len(payload.tensors),
            adapter_bytes_planned=self.plan.adapter_bytes, first_adapter_s=time.perf_counter() - began,
        )  # fmt: skip

    def start_eager(self) -> None:
        """The same without compiling and CUDA graphs; made only where `start` fails."""
        self.eager = True
        self.start()

    def agreement(self) -> None:
        """Engine against learner, the likeliest tokens and tokens drawn at temperature 1."""
        for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
            requests = self.requests(self.most, seed=9, temperature=temperature)
            self.hold_gap(name, requests)

    def adapters(self) -> None:
        """Adapters of more policies than vLLM has room for, then the oldest again, which it must read anew."""
        seconds, payloads = [], []
        for number in range(_POLICIES):
            draw_adapter(self.policy, 10 + number, scale=0.05)
            payloads.append(replace(self.policy.payload(1), policy=f"p{number}"))
            started = time.perf_counter()
            asyncio.run(self.engine.load_adapter(payloads[-1]))
            seconds.append(time.perf_counter() - started)
        requests = self.requests(8, seed=3, min_version=1, temperature=0.0)
        for number in (*range(_POLICIES), 0):
            self.policy.load(payloads[number])
            asked = [replace(one, policy=f"p{number}", request_id=f"{one.request_id}-p{number}") for one in requests]
            started = time.perf_counter()
            self.hold_gap(f"p{number}{' again' if f'p{number}' in self.report.figures else ''}", asked)
            seconds.append(time.perf_counter() - started)
        asked = [replace(one, policy="p1") for one in requests]
        self.report.hold("p1 looks like p0", float(self.gap_of(asked)["mean_nats"] < GAP), 0.0)
        self.report.add("adapters", load_s=seconds[:_POLICIES], answer_s=seconds[_POLICIES:])
        for number in range(_POLICIES):
            asyncio.run(self.engine.drop_policy(f"p{number}"))
        self.publish()

    def turns(self) -> None:
        """Three times: the engine gives its memory away, the learner steps, the engine loads the version and wakes."""
        for number in range(3):
            free, times = self._free_gib(), [time.perf_counter()]
            asyncio.run(self.engine.sleep())
            given = self._free_gib() - free
            times.append(time.perf_counter())
            if self.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            self.learn(2)
            peak = torch.cuda.max_memory_allocated() / GIB if self.on_gpu else 0.0
            free_memory()
            times.append(time.perf_counter())
            self.publish()
            times.append(time.perf_counter())
            asyncio.run(self.engine.wake())
            times.append(time.perf_counter())
            rest, learn, load, wake = np.diff(times).tolist()
            self.report.add(
                f"turn {number}", rest_s=rest, learn_s=learn, load_s=load, wake_s=wake, given_gib=given,
                given_gib_planned=self._planned(KV) if self.on_gpu else 0.0, learner_gib=peak,
                learner_gib_planned=planned_learner(self.run, self.shape),
            )  # fmt: skip
            self.hold_gap(f"after turn {number}", self.requests(8, seed=20 + number))

    def in_flight(self) -> None:
        """New versions under running samples, between two of their tokens."""
        engine, rows = self.engine, self.most
        before = engine._versions
        engine._versions = AdapterVersions(engine._llm, "keep")  # of another run: sparing a second start
        self.version = 0
        self.publish()
        requests = self.requests(rows, seed=5, max_new_tokens=128 if self.small else 256)

        async def under_way() -> tuple[Any, list[float]]:
            running = asyncio.ensure_future(engine.generate(requests))
            seconds = []
            while not running.done() and len(seconds) < 3:
                await asyncio.sleep(0.05)
                started = time.perf_counter()
                self.version += 1
                await engine.load_adapter(self.policy.payload(self.version))
                seconds.append(time.perf_counter() - started)
            return await running, seconds

        answers, seconds = asyncio.run(under_way())
        versions = {version for answer in answers for one in answer.samples for _, version in one.pieces}
        self.report.add("in flight", rows=rows, swap_s=seconds, versions=sorted(versions))
        self.report.hold("samples of one version", float(len(versions) < 2), 0.0)
        engine._versions.close()
        engine._versions, self.version = before, before.version

    def killed(self) -> None:
        """The engine core is killed: the engine says so, and does not hang."""
        (core,) = self.engine._llm.engine_core.resources.engine_manager.processes
        os.kill(core.pid, signal.SIGKILL)
        started = time.perf_counter()
        try:
            self.generate(self.requests(8, seed=1))
        except EngineError as error:
            said = str(error)
        else:
            raise AssertionError("It answered without its engine core.")
        while not self.engine.dead:
            time.sleep(0.05)
        self.report.add("killed", noticed_s=time.perf_counter() - started, said=said)
        asyncio.run(self.engine.close())
        del self.engine
