"""Learning with an engine whose weights are off by 0.04 nats per token, with each correction of the mismatch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from runs import QUICKSTART, ROOT
from safetensors.torch import save

from rl_vlm.config import load_config
from rl_vlm.models.weights import AdapterPayload

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(900)]

NOISE = 0.04  # nats per token, root mean square
ITERATIONS = 60
SETTINGS: dict[str, tuple[str, ...]] = {
    "none": ("algorithm.mismatch=none",),
    "truncate": ("algorithm.mismatch=truncate",),
    "mask": ("algorithm.mismatch=mask", "algorithm.mismatch_low=0.9", "algorithm.mismatch_high=1.1"),
    "sequence_mask": (
        "algorithm.mismatch=sequence_mask",
        "algorithm.mismatch_low=0.97",
        "algorithm.mismatch_high=1.03",
    ),
}


class NoisyEngine:
    """Loads every adapter with noise on its weights; `scale` is the noise's deviation."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._generator = torch.Generator().manual_seed(0)
        self.scale = 1e-3

    async def load_adapter(self, payload: AdapterPayload) -> None:
        tensors = {
            name: tensor + self.scale * torch.randn(tensor.shape, generator=self._generator)
            for name, tensor in payload.state().items()
        }
        blob = save(tensors)
        await self._engine.load_adapter(replace(payload, tensors=blob, sha256=hashlib.sha256(blob).hexdigest()))


def train(one_process: Callable[..., Any], name: str, noisy: bool, seed: int) -> dict[str, float]:
    run = load_config(QUICKSTART, [f"algorithm.iterations={ITERATIONS}", f"seed={seed}", *SETTINGS[name]])
    loop = one_process(run)
    engine, noise = loop.engine, NoisyEngine(loop.engine)
    figures = []
    for _ in range(ITERATIONS):
        loop.engine = engine
        groups = loop.sample("train", loop.draw_items(), run.rollout.group_size, run.rollout.temperature)
        reward = float(np.mean([group.rewards.mean() for group in groups]))
        figures.append({"reward": reward, **loop.learn(groups)})
        loop.engine = noise if noisy else engine
        loop.publish()
        # mismatch/kl is about half the variance of the noise in a log-probability.
        found = math.sqrt(2 * figures[-1]["mismatch/kl"])
        noise.scale *= min(max(NOISE / max(found, 1e-6), 0.7), 1.4)
    loop.engine = engine
    loop.publish()
    settled = figures[ITERATIONS // 4 :]
    return {
        "nats": float(np.sqrt(2 * np.mean([step["mismatch/kl"] for step in settled]))),
        "masked": float(np.mean([step["mismatch/masked"] for step in settled])),
        "grad_norm": float(np.mean([step["policy/grad_norm"] for step in settled])),
        "reward": float(np.mean([step["reward"] for step in figures[-10:]])),
        "accuracy": loop.accuracy(),
    }


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_correction_learns_with_a_noisy_engine(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    from one_process import OneProcess

    found = {"exact engine": train(OneProcess, "none", noisy=False, seed=seed)}
    for name in SETTINGS:
        found[name] = train(OneProcess, name, noisy=True, seed=seed)
        print(seed, name, json.dumps(found[name]), flush=True)
    print(seed, json.dumps(found, indent=1))
    assert found["exact engine"]["nats"] < 1e-3
    for name in SETTINGS:
        assert NOISE / 2 < found[name]["nats"] < NOISE * 2  # the feedback lags behind by a step
        assert (found[name]["masked"] > 0) is (name in ("mask", "sequence_mask"))
        assert found[name]["masked"] < 0.5
    # Guessing gives a quarter.
    assert min(one["accuracy"] for one in found.values()) >= 0.6
