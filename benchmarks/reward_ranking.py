"""Does the reward ensemble rank pictures of MetaWorld as the true reward does? No agent, minutes.

    python benchmarks/reward_ranking.py [--task drawer-open ...] [--pairs 300] [--size 100] [--out FILE]

MetaWorld's own scripted policies play with noise of four sizes. A scripted teacher compares frames of the training episodes; the
ensemble (RL-VLM-F's CNN) learns from them and ranks the frames of other episodes, with other starts, which it has not seen.
The arm is drawn unless --hide-arm is given: the true reward counts the way from hand to object, and a picture without the arm
does not tell it.
Spearman's rank correlation with the true reward, over all held-out frames and episode by episode.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

import numpy as np
from report import Report
from scipy.stats import spearmanr

from rl_vlm.config import RewardModelSection, TeacherSection
from rl_vlm.control_envs.metaworld import MetaWorldEnv
from rl_vlm.labelling.teachers import ScriptedTeacher
from rl_vlm.labelling.types import Segment, SegmentPair
from rl_vlm.preference.reward_model import Examples, RewardEnsemble, RewardTrainer, add_pairs

NOISE = (0.0, 0.2, 0.5, 1.0)  # standard deviations, in actions of -1 to 1
EVERY = 3  # of an episode's frames one in this many is kept
HORIZON = 120
GRADIENT_STEPS = 200


def play(task: str, size: int, hide_arm: bool, seeds: range) -> list[list[Segment]]:
    """Single frames with their true rewards, episode by episode."""
    env = MetaWorldEnv(task, horizon=HORIZON, image_size=size, hide_arm=hide_arm, observe_goal=True)
    from metaworld.policies import ENV_POLICY_MAP  # after the environment, which chooses how MuJoCo draws

    policy = ENV_POLICY_MAP[f"{task}-v3"]()
    episodes = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        observation, _ = env.reset(seed=seed)
        frames = []
        for step in range(HORIZON):
            action = policy.get_action(observation.astype(np.float64)) + rng.normal(0, NOISE[seed % len(NOISE)], 4)
            action = np.clip(action, -1, 1).astype(np.float32)
            observation, reward, *_ = env.step(action)
            if step % EVERY == 0:
                one = np.array([reward], np.float32)
                frames.append(Segment(observation[None], action[None], one, env.frame()[None]))
        episodes.append(frames)
    env.close()
    return episodes


def ranking(known: list[Segment], held_out: list[list[Segment]], pairs: int, seed: int) -> dict[str, float]:
    """Train on `pairs` labels; Spearman on held-out frames."""
    rng = np.random.default_rng(seed)
    teacher = ScriptedTeacher(TeacherSection(), seed)
    places = rng.integers(len(known), size=(pairs, 2))
    asked = [SegmentPair(known[first], known[second]) for first, second in places]
    started = time.perf_counter()
    assert known[0].frames is not None
    model = RewardEnsemble(known[0].frames.shape[1:], RewardModelSection(min_gradient_steps=GRADIENT_STEPS), seed)
    examples = Examples(2, capacity=pairs)
    add_pairs(examples, model, asked, asyncio.run(teacher.label(asked)))
    fit = RewardTrainer(model, seed).fit(examples)
    seconds = time.perf_counter() - started
    learned = [model.rewards(np.concatenate([frame.frames for frame in episode])) for episode in held_out]  # type: ignore[misc]
    true = [np.array([frame.true_rewards[0] for frame in episode]) for episode in held_out]
    by_episode = [spearmanr(one, other).statistic for one, other in zip(learned, true, strict=True)]
    return {
        "all": float(spearmanr(np.concatenate(learned), np.concatenate(true)).statistic),
        "by_episode": float(np.nanmean(by_episode)),
        "train_accuracy": fit.accuracy,
        "fit_seconds": seconds,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", action="append", help="drawer-open, sweep-into and soccer by default")
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--size", type=int, default=100, help="pixels of a picture's side")
    parser.add_argument("--episodes", type=int, default=32, help="that the pairs are drawn from")
    parser.add_argument("--hide-arm", action="store_true", help="as RL-VLM-F's drawer-open does")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write JSON here")
    args = parser.parse_args()
    report = Report(f"Spearman with the true reward on held-out frames after {args.pairs} labelled pairs")
    for task in args.task or ("drawer-open", "sweep-into", "soccer"):
        known = [frame for episode in play(task, args.size, args.hide_arm, range(args.episodes)) for frame in episode]
        held_out = play(task, args.size, args.hide_arm, range(10_000, 10_012))
        found = [ranking(known, held_out, args.pairs, seed) for seed in range(args.seeds)]
        for name in ("all", "by_episode", "train_accuracy"):
            report.add(f"{task}, {name}", [one[name] for one in found], "")
        report.add(f"{task}, fit", [one["fit_seconds"] for one in found])
        report.ratios[f"{task} Spearman"] = float(np.median([one["all"] for one in found]))
    report.finish(args.out)


if __name__ == "__main__":
    main()
