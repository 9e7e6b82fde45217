"""Terminal output of a preference run: steps, returns by the true reward, labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_vlm.monitoring.display import ProgressDisplay


class PreferenceDisplay(ProgressDisplay):
    """A ProgressDisplay that counts environment steps and shows the evaluation's true return beside success."""

    unit = "step"

    def evaluation(self, iteration: int, results: Mapping[str, Any]) -> None:
        """Show the evaluation episodes' success rate and mean true return."""
        super().evaluation(iteration, {})
        self._success, self._return = float(results["accuracy/success"]), float(results["reward/success"])
        self.message(
            f"Step {iteration}: true return {self._return:.4g} ± {results['evaluation/reward_std']:.3g} over "
            f"{results['items/success']:.0f} episodes, success {self._success:.2f}."
        )

    _success: float | None = None
    _return: float | None = None

    def _facts(self) -> list[tuple[str, str]]:
        known = self._metrics.get

        def shown(form: str, *names: str) -> str:
            values = [known(name) for name in names]
            return form.format(*values) if None not in values else ""

        rows = [
            ("return", shown("{:.4g} true, {:.4g} learned", "reward/mean", "reward/learned")),
            ("success", shown("{:.2f} in training", "rollout/success")),
            ("evaluation", f"{self._return:.4g}, success {self._success:.2f}" if self._return is not None else ""),
            ("labels", shown("{:.0f}", "labels/total")),
            ("speed", shown("{:.0f} steps/s", "rollout/steps_per_s")),
            ("policy", shown("alpha {:.3g}, q {:.3g}", "policy/alpha", "critic/q")),
        ]
        return [(name, value) for name, value in rows if value]
