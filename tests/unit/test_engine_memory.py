"""The engine admits no more requests than their keys and values have memory for; the others wait."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_support import request

from rl_vlm.engines.base import RequestTooLargeError
from rl_vlm.engines.rows import RowCache, reserved_tokens
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.models.loading import TextSide
from rl_vlm.types import GenerationRequest

LIMIT = 64 * 24  # tokens


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The tokens that all caches together have memory for, after each time that one of them takes some."""
    caches: dict[int, RowCache] = {}
    sizes: list[int] = []
    reserve = RowCache._reserve

    def noted(self: RowCache, *arguments: Any) -> None:
        reserve(self, *arguments)
        caches[id(self)] = self
        keys = [cache._keys[0] for cache in caches.values() if cache._keys]
        sizes.append(sum(tensor.shape[0] * tensor.shape[2] for tensor in keys))

    monkeypatch.setattr(RowCache, "_reserve", noted)
    yield sizes


def requests(text: TextSide, count: int, policies: tuple[str, ...]) -> list[GenerationRequest]:
    """Of all sizes, the largest of which take nearly everything."""
    rng = np.random.default_rng(0)
    made = []
    for k in range(count):
        samples = int(2 ** rng.integers(0, 5))
        longest = min(LIMIT // samples // 64 * 64, 256) - 40
        asked = request(text, ["Which?"], name=f"r{k}", n=samples, max_new_tokens=int(rng.integers(1, longest)))
        made.append(dataclasses.replace(asked, policy=policies[k % len(policies)]))
    return made


@pytest.mark.parametrize("policies", [("policy",), ("a", "b", "c")])
def test_the_limit_holds_and_every_request_is_answered(
    tiny_folder: Path, text: TextSide, held: list[int], policies: tuple[str, ...]
) -> None:
    engine = TransformersEngine(tiny_folder, max_context=512, max_kv_tokens=LIMIT)
    asked = requests(text, 30, policies)

    async def live() -> None:
        answers = await asyncio.wait_for(asyncio.gather(*(engine.generate([one]) for one in asked)), 120)
        assert [len(answer.samples) for (answer,) in answers] == [one.sampling.n for one in asked]
        await engine.close()

    asyncio.run(live())
    assert LIMIT / 2 < max(held) <= LIMIT


def test_a_request_that_no_memory_can_hold_is_refused(tiny_folder: Path, text: TextSide) -> None:
    engine = TransformersEngine(tiny_folder, max_context=512, max_kv_tokens=LIMIT)

    async def live() -> None:
        with pytest.raises(RequestTooLargeError):
            await engine.generate([request(text, ["Which?"], name="r", n=64, max_new_tokens=100)])
        await engine.close()

    asyncio.run(live())


@pytest.mark.parametrize("seed", range(4))
def test_a_cache_never_reserves_more_than_is_counted_for_it(seed: int) -> None:
    """Rows come in batches of any length, and go one by one or all together."""
    rng = np.random.default_rng(seed)
    cache, allowed = RowCache(), 0
    for _ in range(400):
        if rng.random() < 0.4:
            rows, length = int(rng.integers(1, 40)), int(2 ** rng.uniform(3, 12))
            allowed = max(allowed, reserved_tokens(cache.num_rows + rows, max(cache.length, length)))
            prompt = torch.zeros(1, 1, 4, 1)
            cache.admit([(prompt, prompt)], torch.zeros(rows, dtype=torch.long), length)
        elif cache.num_rows:
            kept = np.flatnonzero(rng.random(cache.num_rows) > rng.choice([0.05, 0.5, 1.0]))
            cache.keep(torch.from_numpy(kept))
        if not cache.num_rows:
            allowed = 0
        reserved = cache._keys[0].shape[0] * cache._keys[0].shape[2] if cache._keys else 0
        assert reserved <= allowed
