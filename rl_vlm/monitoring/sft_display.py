"""Terminal output of supervised fine-tuning: steps, losses, greedy answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_vlm.monitoring.display import ProgressDisplay


class SFTDisplay(ProgressDisplay):
    """A ProgressDisplay that counts optimiser steps and shows losses in nats per token."""

    unit = "step"

    def evaluation(self, iteration: int, results: Mapping[str, Any]) -> None:
        """Show the held-out loss and, where answers were written, how many were right."""
        super().evaluation(iteration, {})
        self._held_out = f"loss {results['eval/loss']:.4f}"
        if "accuracy/default" in results:
            self._held_out += f", exact answers {results['accuracy/default']:.3f}"
        self.message(f"Step {iteration}: held-out {self._held_out}.")

    _held_out = ""

    def _facts(self) -> list[tuple[str, str]]:
        known = self._metrics.get

        def shown(form: str, name: str) -> str:
            value = known(name)
            return form.format(value) if value is not None else ""

        rows = [
            ("loss", shown("{:.4f}", "sft/loss")),
            ("held out", self._held_out),
            ("epoch", shown("{:.2f}", "sft/epoch")),
            ("speed", shown("{:,.0f} tokens/s", "sft/tokens_per_s")),
            ("policy", shown("lr {:.2e}", "sft/lr")),
        ]
        return [(name, value) for name, value in rows if value]
