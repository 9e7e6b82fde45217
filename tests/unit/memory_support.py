"""What the tests of the memory plan share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_vlm.config import PolicyConfig, parse_config
from rl_vlm.models.hub import FetchError
from rl_vlm.runs import memory

# The configurations of the published Qwen3-VL models, by size.
PUBLISHED = json.loads((Path(__file__).parents[1] / "fixtures/qwen3_vl.json").read_text())
GPU = {"model": {"dtype": "bfloat16"}}


def published_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the config.json of the recipes' models as the hub sends it; there is no hub here."""

    def fetch(name: str) -> Path:
        size = name.removeprefix("Qwen/Qwen3-VL-").removesuffix("-Instruct").lower()
        if size not in PUBLISHED:
            raise FetchError(f"The hub cannot be reached to fetch {name}.")
        folder = tmp_path / size
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(PUBLISHED[size]))
        return folder

    monkeypatch.setattr(memory, "fetch_config", fetch)


def gpus(replicas: int, share: float, learners: int, learner_share: float, **serving: Any) -> PolicyConfig:
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
