"""One contender of `loop.py` or `never_wait.py`: a line holds the numbers of steps and of prompts."""

from __future__ import annotations

import argparse
import atexit
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from turns import HERE, serve

from rl_vlm.config import PolicyConfig, load_config
from rl_vlm.models.loading import resolve_model
from rl_vlm.monitoring.recorder import RunRecorder


class OneProcess:
    """The loop in one process, without Ray: `examples/one_process.py`."""

    def __init__(self, run: PolicyConfig, threads: int) -> None:
        sys.path.append(str(HERE.parent / "examples"))
        from one_process import OneProcess

        self._loop = OneProcess(run, threads)

    def step(self, prompts: int) -> dict[str, float]:
        """One step with that many prompts: seconds by activity, `total` among them."""
        loop = self._loop
        loop.run = _with_prompts(loop.run, prompts)
        rollout = loop.run.rollout
        started = time.perf_counter()
        groups = loop.sample("train", loop.draw_items(), rollout.group_size, rollout.temperature)
        sampled = time.perf_counter()
        loop.learn(groups)
        learned = time.perf_counter()
        loop.publish()
        ended = time.perf_counter()
        seconds = (sampled - started, learned - sampled, ended - learned, ended - started)
        return dict(zip(("sample", "learn", "publish", "total"), seconds, strict=True))


class Ours:
    """The system: Ray Serve, env runners, learner group."""

    def __init__(self, run: PolicyConfig) -> None:
        from rl_vlm.runs.ray_session import ray_cluster
        from rl_vlm.runs.train import kind_of

        cluster = ray_cluster(run)
        cluster.__enter__()
        atexit.register(cluster.__exit__, None, None, None)
        scratch = Path(tempfile.mkdtemp(prefix="rl-vlm-bench-"))
        self._algorithm: Any = kind_of(run).algorithm_class(run).from_run_config(run, scratch).build_algo()
        atexit.register(self._algorithm.stop)
        self._recorder = RunRecorder(scratch, run)
        self._replicas = [
            process
            for process in psutil.Process().children(recursive=True)
            if process.cmdline() and process.cmdline()[0].startswith("ray::ServeReplica")
        ]

    def step(self, prompts: int) -> dict[str, float]:
        if prompts != self._algorithm.run_config.rollout.prompts_per_iteration:
            self._change_prompts(prompts)
        started, cpu_s = time.perf_counter(), self._engine_s()
        self._algorithm.train()
        if recorded := [group for group in self._algorithm.last_groups if group.recorded]:
            tokens, text = self._algorithm.last_tokens, self._algorithm.text
            self._recorder.dump_trajectories(self._algorithm.updates, recorded, tokens, text)
        total = time.perf_counter() - started
        metrics = self._algorithm.last_metrics
        seconds = {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
        return {
            **seconds, "total": total, "engine": self._engine_s() - cpu_s,
            "trajectories": metrics.get("rollout/groups", 0.0) * self._algorithm.run_config.rollout.group_size,
            "lag_max": metrics.get("rollout/lag_max", 0.0), "utilisation": metrics.get("rollout/utilisation", 0.0),
            "too_old": metrics.get("dropped/too_old", 0.0),
        }  # fmt: skip

    def _engine_s(self) -> float:
        times = [process.cpu_times() for process in self._replicas]
        return float(sum(each.user + each.system for each in times))

    def _change_prompts(self, prompts: int) -> None:
        """Begin anew with other rollouts; the weights and their version stay."""
        algorithm = self._algorithm
        version, updates = algorithm.version, algorithm.updates
        algorithm.run_config = _with_prompts(algorithm.run_config, prompts)
        algorithm.make_state()
        algorithm.version, algorithm.updates = version, updates


class TRL:
    """TRL's GRPOTrainer, which has the configuration's number of prompts."""

    def __init__(self, run: PolicyConfig, threads: int) -> None:
        from trl_loop import TRLLoop

        self._loop = TRLLoop(resolve_model(run.model.path), run, threads)

    def step(self, prompts: int) -> dict[str, float]:
        assert prompts == self._loop.prompts
        return self._loop.step()


def _with_prompts(run: PolicyConfig, prompts: int) -> PolicyConfig:
    rollout = run.rollout.model_copy(update={"prompts_per_iteration": prompts})
    return run.model_copy(update={"rollout": rollout})


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("one", "ours", "trl"))
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    def prepare() -> Callable[[str, str], list[dict[str, float]]]:
        run = load_config(args.config, args.overrides)
        assert isinstance(run, PolicyConfig)
        loop = Ours(run) if args.kind == "ours" else {"one": OneProcess, "trl": TRL}[args.kind](run, args.threads)
        return lambda steps, prompts: [loop.step(int(prompts)) for _ in range(int(steps))]

    serve(prepare)


if __name__ == "__main__":
    main()
