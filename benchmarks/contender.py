"""One contender of `loop.py` or `never_wait.py` in a process of its own: reads `step N PROMPTS` and `quit`, answers with JSON lines."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

import psutil

from rl_vlm.config import RunConfig, load_config
from rl_vlm.models.loading import resolve_model


class Loop(Protocol):
    """Whatever can do a GRPO step."""

    def step(self, prompts: int) -> dict[str, float]:
        """One step with that many prompts: seconds by activity, `total` among them."""
        ...


class Bare:
    """The single-process loop without Ray."""

    def __init__(self, run: RunConfig, folder: Path, threads: int) -> None:
        from bare import BareLoop

        self._loop = BareLoop(folder, run, threads)

    def step(self, prompts: int) -> dict[str, float]:
        self._loop.run = _with_prompts(self._loop.run, prompts)
        return self._loop.step()


class Ours:
    """The system: Ray Serve, env runners, learner group. `rounds` collects rollouts in whole rounds."""

    def __init__(self, run: RunConfig, rounds: bool = False) -> None:
        from rl_vlm.runs.ray_session import ray_cluster
        from rl_vlm.runs.train import kind_of

        self._cluster = ray_cluster(run)
        self._cluster.__enter__()
        scratch = Path(tempfile.mkdtemp(prefix="rl-vlm-bench-"))
        self._algorithm: Any = kind_of(run).rllib_config(run).from_run_config(run, scratch).build_algo()
        if rounds:
            from whole_rounds import WholeRounds

            rollouts = self._algorithm.rollouts
            self._algorithm.rollouts = WholeRounds(rollouts._sampler, rollouts._stream, run)
        self._replicas = [
            process
            for process in psutil.Process().children(recursive=True)
            if process.cmdline() and process.cmdline()[0].startswith("ray::ServeReplica")
        ]

    def step(self, prompts: int) -> dict[str, float]:
        if prompts != self._algorithm.run.rollout.prompts_per_iteration:
            self._change_prompts(prompts)
        started, cpu_s = time.perf_counter(), self._engine_s()
        self._algorithm.train()
        total = time.perf_counter() - started
        metrics = self._algorithm.last_metrics
        seconds = {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
        return {
            **seconds,
            "total": total,
            "reward": metrics.get("reward/mean", 0.0),
            "engine": self._engine_s() - cpu_s,
            "trajectories": metrics.get("rollout/groups", 0.0) * self._algorithm.run.rollout.group_size,
            "lag_max": metrics.get("rollout/lag_max", 0.0),
            "utilisation": metrics.get("rollout/utilisation", 0.0),
            "too_old": metrics.get("dropped/too_old", 0.0),
        }

    def _engine_s(self) -> float:
        times = [process.cpu_times() for process in self._replicas]
        return float(sum(each.user + each.system for each in times))

    def _change_prompts(self, prompts: int) -> None:
        """Begin anew with other rollouts; the weights and their version stay."""
        algorithm = self._algorithm
        version, updates = algorithm.version, algorithm.updates
        algorithm.run = _with_prompts(algorithm.run, prompts)
        algorithm.make_state()
        algorithm.version, algorithm.updates = version, updates

    def close(self) -> None:
        self._algorithm.stop()
        self._cluster.__exit__(None, None, None)


class TRL:
    """TRL's GRPOTrainer."""

    def __init__(self, run: RunConfig, folder: Path, threads: int) -> None:
        from trl_loop import TRLLoop

        self._loop = TRLLoop(folder, run, threads)

    def step(self, prompts: int) -> dict[str, float]:
        return self._loop.step()


def _with_prompts(run: RunConfig, prompts: int) -> RunConfig:
    rollout = run.rollout.model_copy(update={"prompts_per_iteration": prompts})
    return run.model_copy(update={"rollout": rollout})


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("bare", "ours", "rounds", "trl"))
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    # Libraries print to stdout as they like; answers go to the real one.
    answers, sys.stdout = sys.stdout, sys.stderr
    run = load_config(args.config, args.overrides)
    folder = resolve_model(run.model.path)
    loops = {"bare": lambda: Bare(run, folder, args.threads), "ours": lambda: Ours(run)}
    loops["rounds"] = lambda: Ours(run, rounds=True)
    loops["trl"] = lambda: TRL(run, folder, args.threads)
    loop: Any = loops[args.kind]()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command, *numbers = line.split()
        if command == "quit":
            break
        count, prompts = map(int, numbers)
        print(json.dumps({"steps": [loop.step(prompts) for _ in range(count)]}), file=answers, flush=True)
    if hasattr(loop, "close"):
        loop.close()


if __name__ == "__main__":
    main()
