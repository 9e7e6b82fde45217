"""Memory of the replay buffer with pictures at the 1M-step MetaWorld settings, measured on real steps and extrapolated.

    python benchmarks/replay_memory.py [--quick] [--steps N] [--task NAME] [--out FILE]

Half of the actions come from MetaWorld's scripted policy, so that objects move, half are random; starts are random. Every step
is drawn at 300×300 and kept without loss. Reported: bytes per step of the arrays and of the compressed pictures, what the
process grew by, and what 1M rows with the newest 200,000 pictures come to. The limit is 16 GB.
"""

from __future__ import annotations

import argparse
import importlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from report import Report

from rl_vlm.control_envs.metaworld import MetaWorldEnv
from rl_vlm.preference.replay import ReplayBuffer, StepBatch

ROWS, FRAMES, IMAGE_SIZE, LIMIT = 1_000_000, 200_000, 300, 16e9


def scripted_policy(task: str) -> Any:
    """MetaWorld's own solution of a task."""
    name = "".join(part.capitalize() for part in task.split("-"))
    module = importlib.import_module(f"metaworld.policies.sawyer_{task.replace('-', '_')}_v3_policy")
    return getattr(module, f"Sawyer{name}V3Policy")()


def play(env: MetaWorldEnv, policy: Any, rng: np.random.Generator, replay: ReplayBuffer, episode: int) -> float:
    """One episode into the buffer; returns the seconds that drawing took."""
    observation, _ = env.reset(seed=episode)
    drawing = 0.0
    for number in range(env.horizon):
        scripted = np.clip(policy.get_action(observation.astype(np.float64)), -1, 1).astype(np.float32)
        action = scripted if rng.random() < 0.5 else rng.uniform(-1, 1, 4).astype(np.float32)
        following, reward, terminated, truncated, info = env.step(action)
        started = time.perf_counter()
        frame = env.frame()
        drawing += time.perf_counter() - started
        batch = StepBatch(
            observation[None], action[None], following[None], np.array([reward], np.float32),
            np.array([env.success(info)], np.float32), np.array([terminated]), np.array([truncated]),
            np.array([episode]), np.array([number], np.int32), frame[None],
        )  # fmt: skip
        replay.add(batch, batch.true_rewards)
        observation = following
    return drawing


def measure(task: str, steps: int) -> Report:
    """Fill a buffer and weigh it."""
    report = Report("Memory of the replay buffer at 1M steps with 200k pictures of 300×300")
    env, policy = MetaWorldEnv(task, image_size=IMAGE_SIZE), scripted_policy(task)
    env.reset(seed=0)
    env.frame()  # what the renderer takes is not the buffer's
    process = psutil.Process()
    before = process.memory_info().rss
    replay = ReplayBuffer(ROWS, env.observation_space.shape[0], 4, FRAMES, IMAGE_SIZE)
    assert replay.frames is not None
    arrays = replay.nbytes - replay.frames.nbytes
    rng, per_episode, drawing, started = np.random.default_rng(0), [], 0.0, time.perf_counter()
    for episode in range(-(-steps // env.horizon)):
        held = replay.frames.nbytes
        drawing += play(env, policy, rng, replay, episode)
        per_episode.append((replay.frames.nbytes - held) / env.horizon)
    total = len(replay)
    seconds = time.perf_counter() - started
    grown = process.memory_info().rss - before
    per_step = replay.frames.nbytes / total
    expected = arrays + FRAMES * per_step
    report.add(f"{task}: compressed picture", per_episode, unit="B", steps=total, raw=3 * IMAGE_SIZE**2)
    report.add("arrays, per row", [arrays / ROWS], unit="B")
    report.add(
        "measured growth of the process",
        [grown / 1e9],
        unit="GB",
        buffer_gb=(total * arrays / ROWS + replay.frames.nbytes) / 1e9,
    )
    report.add("1M rows and 200k pictures", [expected / 1e9], unit="GB")
    report.add("time per step", [1e3 * seconds / total], unit="ms", drawing_ms=1e3 * drawing / total)
    report.ratios["16 GB / extrapolated"] = LIMIT / expected
    env.close()
    return report


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="end within a minute: 1000 steps")
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--task", default="drawer-open")
    parser.add_argument("--out", type=Path, help="write JSON here")
    args = parser.parse_args()
    measure(args.task, 1000 if args.quick else args.steps).finish(args.out)


if __name__ == "__main__":
    main()
