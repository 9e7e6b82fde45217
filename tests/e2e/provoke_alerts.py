"""A driver whose figures go wrong in every way that alerts know: `provoke_alerts.py FOLDER`. It then waits to be killed.

The sink, Ray's metrics agent and the full disk are real; only the figures are made up, because a run that goes wrong takes hours.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import ray

from rl_vlm.config import PolicyConfig
from rl_vlm.monitoring.ray_metrics import RunMetrics

ITERATIONS_S = 0.5


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "ballast").write_bytes(b"x" * (1000 << 10))  # of a disk of 1 MiB
    ray.init(address="auto", namespace="rl_vlm", log_to_driver=False)
    run = PolicyConfig.model_validate({"name": "goes-wrong", "rollout": {"max_policy_lag": 2}})
    figures = RunMetrics(run, folder, total=1000)
    for iteration in range(1, 61):
        late = max(iteration - 20, 0)
        figures.add(
            iteration,
            {
                "reward/mean": 0.1 + 0.04 * min(iteration, 20) - 0.04 * min(late, 20),
                "mismatch/kl": 1e-2 * (1 + late),
                "rollout/lag_max": 2.0 if late else 1.0,
                "dropped/too_old": float(late),
                "restarts/env_runner": float(late // 5),
                "time/sample": 1.0,
                "time/step": 10.0,
            },
        )
        time.sleep(ITERATIONS_S)
    print("stuck", flush=True)
    time.sleep(3600)  # no progress, until the test kills it


if __name__ == "__main__":
    main()
