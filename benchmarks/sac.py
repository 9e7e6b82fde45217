"""SAC updates per second: the system, eager and compiled, against Stable-Baselines3 and SBX (JAX), interleaved.

    python benchmarks/sac.py [--quick] [--out FILE]

Equal networks and batches on Pendulum-v1, one core for all: each contender lives in a process of its own, pinned to the
same core, and only one updates at a time. An update is: sample a batch from the replay buffer, one step of both critics,
of the actor and of alpha, and of the targets. Ours goes through RLlib's learner. Rates are per second of CPU time, so that
another process on the core does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from report import Report

from rl_vlm.models.products import Products, onednn_products, torch_products

HERE = Path(__file__).parent
SIZES = ((256, 2, 256), (256, 3, 512))
CONTENDERS = ("eager", "compiled", "sb3", "sbx")
LABELS = {"eager": "rl_vlm", "compiled": "rl_vlm, compiled", "sb3": "Stable-Baselines3", "sbx": "SBX"}


class Contender:
    """A contender's process."""

    def __init__(self, kind: str, size: tuple[int, int, int]) -> None:
        self.kind = kind
        self.rates: list[float] = []
        command = [sys.executable, str(HERE / "sac_contender.py"), kind, *map(str, size)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "RAY_USAGE_STATS_ENABLED": "0"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{LABELS[self.kind]} ended: run benchmarks/sac_contender.py {self.kind} to see why.")
        return json.loads(line)  # type: ignore[no-any-return]

    def wait_until_ready(self) -> None:
        """Wait for imports and a full replay buffer."""
        self._answer()

    def run(self, updates: int, keep: bool = True) -> None:
        """Make some updates; `keep` counts them."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"update {updates}\n")
        self._process.stdin.flush()
        spent = self._answer()
        if keep:
            self.rates.append(updates / spent["cpu"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def products_per_update(hidden: int, depth: int, observation: int, action: int) -> int:
    """Multiplications per row of the batch that an update cannot do without, counted in matrix products.

    A forward pass of an MLP costs the sum of its layers' sizes; a backward pass the same for the weights and, without the
    first layer, the same for the inputs. Actor: at s' and s forward, at s backward. Targets: two forward. Critics: two
    forward, two backward; at the actor's action two forward, and one (the minimum of each row) backward to the action.
    """

    def layers(inputs: int, outputs: int) -> tuple[int, int]:
        inner = (depth - 1) * hidden * hidden + hidden * outputs
        return inputs * hidden + inner, inner

    actor, actor_inner = layers(observation, 2 * action)
    critic, critic_inner = layers(observation + action, 1)
    forward = 2 * actor + 2 * critic + 2 * critic + 2 * critic
    backward = (actor + actor_inner) + 2 * (critic + critic_inner) + (critic_inner + action * hidden)
    return forward + backward


def product_rates() -> dict[str, float]:
    """Multiplications per second of this core by product, torch's and oneDNN's, at the benchmark's sizes."""
    torch.set_num_threads(1)
    products: dict[str, Products] = {"torch": torch_products}
    if torch.backends.mkldnn.is_available():
        products["oneDNN"] = onednn_products
    best = dict.fromkeys(products, 0.0)
    for rows in (256, 512):
        left, right, out = torch.randn(2, rows, 256), torch.randn(2, 256, 256), torch.empty(2, rows, 256)
        for _ in range(100):
            for name, product in products.items():
                started = time.thread_time()
                for _ in range(20):
                    product(left, right, None, out)
                best[name] = max(best[name], 20 * 2 * rows * 256 * 256 / (time.thread_time() - started))
    return best


def measure(quick: bool) -> Report:
    """Run everything and return the report."""
    report = Report("SAC updates per second of one core")
    kinds = ("eager", "sb3", "sbx") if quick else CONTENDERS
    rounds, updates = (3, 60) if quick else (10, 100)
    rates = product_rates()
    best = max(rates.values())
    for size in SIZES[:1] if quick else SIZES:
        hidden, depth, batch = size
        name = f"{hidden}×{depth} batch {batch}"
        contenders = [Contender(kind, size) for kind in kinds]
        try:
            for contender in contenders:
                contender.wait_until_ready()
                contender.run(updates, keep=False)  # compiles, and warms up
            for _ in range(rounds):
                for contender in contenders:
                    contender.run(updates)
        finally:
            for contender in contenders:
                contender.close()
        medians = {}
        for contender in contenders:
            report.add(f"{name} {LABELS[contender.kind]}", contender.rates, unit="/s")
            medians[contender.kind] = statistics.median(contender.rates)
        for kind in ("eager", "compiled"):
            for peer in ("sb3", "sbx"):
                if kind in medians:
                    report.ratios[f"{LABELS[kind]} / {LABELS[peer]} at {name}"] = medians[kind] / medians[peer]
        limit = best / (products_per_update(hidden, depth, 3, 1) * batch)
        report.ratios[f"rl_vlm / arithmetic limit at {name}"] = (
            max(medians["eager"], medians.get("compiled", 0)) / limit
        )
        report.notes.append(
            f"{name}: the matrix products alone take 1/{limit:.0f} s of this core "
            f"(GFLOP/s in float32: {', '.join(f'{product} {2 * rate / 1e9:.0f}' for product, rate in rates.items())})."
        )
    return report


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="end within a minute: one size, nothing compiled")
    parser.add_argument("--out", type=Path, help="write JSON here")
    args = parser.parse_args()
    measure(args.quick).finish(args.out)


if __name__ == "__main__":
    main()
