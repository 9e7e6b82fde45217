"""What the tests of the memory plan share."""

from __future__ import annotations

from typing import Any

from rl_vlm.config import RunConfig, parse_config

GPU = {"model": {"dtype": "bfloat16"}}


def gpus(replicas: int, share: float, learners: int, learner_share: float, **serving: Any) -> RunConfig:
    return parse_config(
        {
            **GPU,
            "serving": {"num_replicas": replicas, "gpus_per_replica": share, **serving},
            "learner": {"num_learners": learners, "gpus_per_learner": learner_share},
        }
    )


def sizes(plan: Any) -> dict[tuple[str, str], int]:
    return {
        (process.kind, part.name): part.bytes
        for card in plan.cards
        for process in card.processes
        for part in process.parts
    }
