"""`logging`: what is kept of a run."""

from __future__ import annotations

from pydantic import Field

from rl_vlm.config.section import Section


class PlainLogging(Section):
    """What every run keeps."""

    checkpoint_every: int = Field(25, ge=1)
    keep_checkpoints: int = Field(3, ge=1)
    tensorboard: bool = True
    wandb_project: str = "rl-vlm"


class TrainLogging(PlainLogging):
    """What a run on Ray keeps."""

    ray_metrics: bool | None = Field(
        None, description="Every figure as a Ray metric `ray_rl_vlm_*` too; null: where the run joins a cluster."
    )
    traces: int = Field(0, ge=0, description="Iterations between traces (`traces/*.jsonl`, OpenTelemetry); 0: none.")


class LoggingSection(TrainLogging):
    """What a run that trains the policy keeps."""

    trajectories_every: int = Field(10, ge=0, description="Iterations between dumps of sampled trajectories; 0: none.")
    trajectories_per_dump: int = Field(64, ge=1)
