"""Waits until all nodes of a Ray cluster have joined: `python -m rl_vlm.runs.wait_for_nodes COUNT SECONDS`."""

from __future__ import annotations

import logging
import sys
import time

import ray

from rl_vlm.runs.ray_session import ClusterError

_PAUSE_S = 1.0


def wait_for_nodes(count: int, timeout_s: float) -> None:
    """Return once the cluster of RAY_ADDRESS has `count` nodes. Raises ClusterError."""
    deadline = time.monotonic() + timeout_s
    alive, reason = 0, ""
    while True:
        try:
            ray.init(address="auto", log_to_driver=False, logging_level=logging.CRITICAL)
            break
        except (ConnectionError, RuntimeError) as error:  # the head is still starting
            reason = str(error).strip().splitlines()[0]
        if time.monotonic() > deadline:
            raise ClusterError(f"The head did not answer within {timeout_s:g} s: {reason}")
        time.sleep(_PAUSE_S)
    try:
        while alive < count:
            alive = sum(bool(node["Alive"]) for node in ray.nodes())
            if alive < count and time.monotonic() > deadline:
                raise ClusterError(f"{alive} of {count} nodes joined within {timeout_s:g} s.")
            time.sleep(0 if alive >= count else _PAUSE_S)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    try:
        wait_for_nodes(int(sys.argv[1]), float(sys.argv[2]))
    except ClusterError as error:
        sys.exit(str(error))
