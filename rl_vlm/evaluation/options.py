"""EvaluationOptions: what a command may ask of an evaluation beside the configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields

from rl_vlm.types import Split, UserInputError


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """Options of `rl-vlm eval`; each is named as its flag.

    `blind`: also with blank images, and with those of other items. `against`: `base`, a run or an adapter that the policy is compared with.
    `split`: in place of evaluation.split. `benchmark_runs`: repetitions of the throughput measurement, 0 for none. `endpoint`: base URL of an
    OpenAI-compatible server that is measured in place of a served model.
    """

    blind: bool = False
    resume: bool = False
    against: str | None = None
    split: tuple[Split, ...] = ()
    benchmark_runs: int = 0
    compare_hf: bool = False
    endpoint: str | None = None
    endpoint_model: str = "default"
    endpoint_token_env: str = "RL_VLM_ENDPOINT_TOKEN"
    endpoint_timeout_s: float = 120.0

    def refuse_any(self, why: str) -> None:
        """Raise UserInputError for the first option that is set."""
        for option in fields(self):
            if getattr(self, option.name) != option.default:
                raise UserInputError(f"--{option.name.replace('_', '-')}: {why}")
