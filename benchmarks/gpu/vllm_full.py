"""vLLM with weights that a learner trains as a whole, replaced in place."""

from __future__ import annotations

import time

import vllm_engine
from engine import GAP


class Bench(vllm_engine.Bench):
    """An engine and a learner of a run that trains all weights; without CUDA graphs, whose start takes long."""

    eager = True
    whole = ("model.train=full", "model.gpu_memory_gib=80")

    def reload(self) -> None:
        """Learn, and let the engine take all weights: it agrees with the learner before and after, and not between."""
        asked = self.requests(8, seed=4)
        self.hold_gap("as read", asked)
        self.learn(2, lr=1e-3)
        moved = self.gap_of(asked)["mean_nats"]
        started = time.perf_counter()
        payload = self.publish()
        self.report.add(
            "reload", seconds=time.perf_counter() - started, bytes=len(payload.tensors),
            bytes_planned=self.plan.adapter_bytes, gap_before_nats=moved,
        )  # fmt: skip
        self.hold_gap("reloaded", self.requests(8, seed=4))
        self.report.hold("moved by less than the threshold", float(moved < GAP), 0.0)
