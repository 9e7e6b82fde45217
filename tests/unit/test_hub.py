"""Downloads from a stand-in for the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hub_server import Hub

PLANNED = "import sys; from rl_vlm.runs.memory import shape_of; print(shape_of(sys.argv[1]).parameters)"
CONFIGS = json.loads((Path(__file__).parents[1] / "fixtures/qwen3_vl.json").read_text())


def test_a_plan_fetches_the_configuration_alone(tmp_path: Path) -> None:
    hub = Hub()
    hub.files["owner/model"] = {"config.json": json.dumps(CONFIGS["2b"]).encode(), "model.safetensors": b"weights"}
    with hub.running() as url:
        environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        environment.pop("HF_HUB_OFFLINE", None)
        done = subprocess.run(
            [sys.executable, "-c", PLANNED, "owner/model"], env=environment, capture_output=True, text=True, timeout=300
        )
    assert (done.stdout.strip(), set(hub.sent)) == ("2127532032", {"config.json"}), done.stderr
