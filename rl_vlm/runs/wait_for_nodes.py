"""Waits until all nodes of a Ray cluster have joined: `python -m rl_vlm.runs.wait_for_nodes COUNT SECONDS`."""

from __future__ import annotations

import logging
import sys
import time

import ray

from rl_vlm.runs.surroundings import ClusterError
from rl_vlm.safe_text import one_line


def wait_for_nodes(count: int, timeout_s: float) -> None:
    """Return once the cluster of RAY_ADDRESS has `count` nodes. Raises ClusterError."""
    deadline = time.monotonic() + timeout_s
    while not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False, logging_level=logging.CRITICAL)
        except (ConnectionError, RuntimeError) as error:  # the head is still starting
            if time.monotonic() > deadline:
                raise ClusterError(f"The head did not answer within {timeout_s:g} s: {one_line(error)}") from error
            time.sleep(1.0)
    try:
        while (alive := sum(bool(node["Alive"]) for node in ray.nodes())) < count:
            if time.monotonic() > deadline:
                raise ClusterError(f"{alive} of {count} nodes joined within {timeout_s:g} s.")
            time.sleep(1.0)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    try:
        wait_for_nodes(int(sys.argv[1]), float(sys.argv[2]))
    except ClusterError as error:
        sys.exit(str(error))
