"""What a shared service is made for, and whether another run fits it. No Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rl_vlm.config import CommonConfig


@dataclass(frozen=True, slots=True)
class Terms:
    """What all runs of a shared service must agree on (`equal`, by configuration key), what a run needs, and what a service holds
    that it starts. Computed where the run is, whose model folder other nodes need not have under the same path."""

    equal: Mapping[str, str]
    max_context: int
    max_lora_rank: int | None  # None: any
    lora_rank: int  # of the run's own adapter

    @classmethod
    def of(cls, run: CommonConfig, digest: str) -> Terms:
        """Those of a service that this run starts; `digest` is its model's."""
        serving = run.serving
        engine = serving.expected_engine
        equal = {
            "model.path": f"{run.model.path} ({digest})",
            "model.dtype": run.model.dtype,
            "model.head_dtype": run.model.head_dtype,
            "model.min_pixels": str(run.model.pixels.minimum),
            "model.max_pixels": str(run.model.pixels.maximum),
            "serving.engine": engine,
            "serving.quantization": serving.quantization,
            "serving.gpus_per_replica": f"{serving.gpus_per_replica:g}",
        }
        # Merged weights have the model's own shape, whatever the rank was.
        ranks = serving.sharing.max_lora_rank or run.lora_rank
        return cls(equal, serving.max_context, ranks if engine == "vllm" else None, run.lora_rank)

    def refusal(self, wanted: Terms, name: str) -> str:
        """Why a run of these terms cannot join the service of this name; empty if it can."""
        differing = [
            f"{key} is {_short(held)} there and {_short(wanted.equal[key])} here"
            for key, held in self.equal.items()
            if _essence(held) != _essence(wanted.equal[key])
        ]
        if wanted.max_context > self.max_context:
            differing.append(f"serving.max_context is {self.max_context} there and {wanted.max_context} here")
        if self.max_lora_rank is not None and wanted.lora_rank > self.max_lora_rank:
            differing.append(
                f"adapters of rank {self.max_lora_rank} fit there and model.lora.rank is {wanted.lora_rank} here (the run that "
                "starts the service sets serving.sharing.max_lora_rank)"
            )
        if not differing:
            return ""
        return (
            f"The run does not fit the shared service {name!r}, which runs already: {'; '.join(differing)}. Change that, or give "
            "serving.shared another name."
        )


def _essence(value: str) -> str:
    """What is compared: of a model its weights, wherever they lie."""
    return value.rpartition(" (")[2]


def _short(value: str) -> str:
    return value if len(value) <= 120 else f"...{value[-117:]}"
