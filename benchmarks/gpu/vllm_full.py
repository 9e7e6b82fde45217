"""vLLM with weights that a learner trains as a whole, replaced in place."""

from __future__ import annotations

import time
from pathlib import Path

import vllm_engine


class Bench(vllm_engine.Bench):
    """An engine and a learner of a run that trains all weights; without CUDA graphs, whose start takes long."""

    eager = True

    def __init__(self, folder: Path, size: str, device: str) -> None:
        super().__init__(folder, size, device)
        self.whole = ("model.train=full", "model.gpu_memory_gib=80", "algorithm.kl_coef=0")
        self.run = self._recipe()

    def reload(self) -> None:
        """Learn, and let the engine take all weights: it agrees with the learner before and after, and not between."""
        asked = self.requests(8, seed=4)
        self._hold_gap("as read", asked)
        self.learn(2, lr=1e-4)
        moved = self.gap_of(asked)["mean_nats"]
        started = time.perf_counter()
        payload = self.publish()
        self.report.add(
            "reload", seconds=time.perf_counter() - started, bytes=len(payload.tensors),
            bytes_planned=self.plan.adapter_bytes, gap_before_nats=moved,
        )  # fmt: skip
        self._hold_gap("reloaded", self.requests(8, seed=4))
        self.report.hold("moved by less than the threshold", float(moved < vllm_engine.GAP), 0.0)
