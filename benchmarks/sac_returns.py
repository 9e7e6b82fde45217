"""What SAC learns: the system's SAC and Stable-Baselines3's on the same environment, budget and hyperparameters, several seeds.

    python benchmarks/sac_returns.py [--quick] [--env pendulum|reach] [--steps N] [--seeds N] [--out FILE]

Both get the true reward, Stable-Baselines3's default hyperparameters (its automatic temperature starts at 1), one update per
step, and are judged by the mean return of the same 20 evaluation episodes with the mode of the policy. The ratio says how far
our mean is above theirs in units of the standard deviation over their seeds: -1 and more is a tie or better.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from report import Report

ENVIRONMENTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "pendulum": ("Pendulum-v1", {}, 10_000),
    "reach": ("metaworld/reach-v3", {"observe_goal": True}, 20_000),
}
_EVALUATION_SEEDS = [100_000 + number for number in range(20)]
_RANDOM_STEPS = 100


def ours(env_id: str, kwargs: dict[str, Any], steps: int, seed: int) -> tuple[float, float]:
    """Mean return and success of the evaluation episodes."""
    from rl_vlm.algorithms.preference_sac import PreferenceSACConfig
    from rl_vlm.config import parse_config

    run = parse_config(
        {
            "name": "sac",
            "seed": seed,
            "algorithm": {"name": "preference_sac"},
            "env": {"id": env_id, "kwargs": kwargs},
            "preference": {
                "reward": "gt_task_reward",
                "total_steps": steps,
                "random_steps": _RANDOM_STEPS,
                "exploration_steps": 0,
                "sac": {
                    "hidden": 256, "depth": 2, "batch_size": 256, "init_alpha": 1.0, "alpha_lr": 3e-4,
                    "target_update_every": 1, "compile": "off",
                },
            },
        }
    )  # fmt: skip
    algorithm: Any = PreferenceSACConfig.from_run_config(run, Path(tempfile.mkdtemp())).build_algo()
    while algorithm.env_steps < steps:
        algorithm.train()
    results = algorithm.sampler.evaluate(algorithm._actor, _EVALUATION_SEEDS, 0, 600.0)
    algorithm.stop()
    return statistics.mean(r.true_return for r in results), statistics.mean(r.success_best for r in results)


def theirs(env_id: str, kwargs: dict[str, Any], steps: int, seed: int) -> tuple[float, float]:
    """The same by Stable-Baselines3."""
    from stable_baselines3 import SAC

    from rl_vlm.control_envs.registry import make_control_env

    model = SAC("MlpPolicy", make_control_env(env_id, **kwargs), learning_starts=_RANDOM_STEPS, seed=seed, device="cpu")
    model.learn(steps)
    env = make_control_env(env_id, **kwargs)
    returns, successes = [], []
    for evaluation_seed in _EVALUATION_SEEDS:
        observation, _ = env.reset(seed=evaluation_seed)
        total, best, over = 0.0, 0.0, False
        while not over:
            action, _ = model.predict(observation, deterministic=True)
            observation, reward, terminated, truncated, info = env.step(action)
            total, best, over = total + reward, max(best, env.success(info)), terminated or truncated
        returns.append(total)
        successes.append(best)
    return statistics.mean(returns), statistics.mean(successes)


def measure(names: list[str], steps: int | None, seeds: int) -> Report:
    """Train both on every seed, in turn."""
    from rl_vlm.config import RunConfig
    from rl_vlm.runs.ray_session import ray_cluster

    report = Report("Return of the learned policy, true reward")
    with ray_cluster(RunConfig(algorithm={"name": "preference_sac"}, preference={"reward": "gt_task_reward"})):  # type: ignore[arg-type]
        for name in names:
            env_id, kwargs, budget = ENVIRONMENTS[name]
            budget = steps or budget
            found: dict[str, list[tuple[float, float]]] = {"rl_vlm": [], "Stable-Baselines3": []}
            seconds: dict[str, list[float]] = {"rl_vlm": [], "Stable-Baselines3": []}
            for seed in range(seeds):
                for label, learn in (("rl_vlm", ours), ("Stable-Baselines3", theirs)):
                    started = time.process_time()
                    found[label].append(learn(env_id, kwargs, budget, seed))
                    seconds[label].append(time.process_time() - started)
            for label, results in found.items():
                returns = [mean for mean, _ in results]
                report.add(
                    f"{name}, {budget} steps, {label}", returns, unit="",
                    mean=statistics.mean(returns), std=statistics.stdev(returns) if seeds > 1 else 0.0,
                    success=statistics.mean(success for _, success in results),
                    cpu_s=statistics.median(seconds[label]),
                )  # fmt: skip
            if seeds > 1:
                mean, other = (statistics.mean(value for value, _ in found[label]) for label in found)
                spread = statistics.stdev(value for value, _ in found["Stable-Baselines3"])
                report.ratios[f"{name}: (ours - theirs) / their standard deviation"] = (mean - other) / spread
    return report


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="end within a minute: Pendulum, 500 steps, one seed")
    parser.add_argument("--env", choices=tuple(ENVIRONMENTS), action="append", help="default: both")
    parser.add_argument("--steps", type=int, help="environment steps of each run")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write JSON here")
    args = parser.parse_args()
    names = ["pendulum"] if args.quick else args.env or list(ENVIRONMENTS)
    measure(names, 500 if args.quick else args.steps, 1 if args.quick else args.seeds).finish(args.out)


if __name__ == "__main__":
    main()
