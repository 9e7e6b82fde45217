"""What a run writes down: checkpoints, metrics and trajectories."""

from __future__ import annotations

from pydantic import Field

from rl_vlm.config.section import Count, Natural, Section


class PlainLogging(Section):
    checkpoint_every: Count = 25  # Iterations between checkpoints.
    keep_checkpoints: Count = 3  # Older checkpoints are deleted.
    tensorboard: bool = True  # Write TensorBoard event files into the run folder.
    callbacks: list[str] = Field(
        []
    )  # Your own code after iterations and evaluations: `path/to/file.py:Name` of a Callback.
    wandb_project: str = "rl-vlm"  # Project on Weights & Biases, used where WANDB_API_KEY is set.


class TrainLogging(PlainLogging):
    # Every figure as a Ray metric `ray_rl_vlm_*` too; null: where the run joins a cluster.
    ray_metrics: bool | None = None
    traces: Natural = 0  # Iterations between traces (`traces/*.jsonl`, OpenTelemetry); 0: none.


class LoggingSection(TrainLogging):
    trajectories_every: Natural = 10  # Iterations between dumps of sampled trajectories; 0: none.
    trajectories_per_dump: Count = 64  # Trajectories that a dump holds at most.
    kept_items: Natural = 512  # Held-out items whose episodes are kept at each evaluation; 0: none.
    show_episodes: bool = True  # Print one episode of each dump: reading answers is how a gamed reward is found.
