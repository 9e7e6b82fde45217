"""The tiny labeller on states of runs that it was not trained on: how often it is right, and how biased by position."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from rl_vlm.asking import ServedEndpoint
from rl_vlm.config import LabelsSection
from rl_vlm.control_envs.cartpole import ContinuousCartPole
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.labelling.labeller import VLMLabeller
from rl_vlm.labelling.labels import Segment, SegmentPair
from rl_vlm.labelling.prompts import task_prompts
from rl_vlm.models.loading import load_text_side, resolve_model
from rl_vlm.testing import EngineClient

TIE_DEGREES = 3.0
Policy = Callable[[np.ndarray, np.random.Generator], float]


def random_policy(observation: np.ndarray, rng: np.random.Generator) -> float:
    return float(rng.uniform(-1, 1))


def half_learned(observation: np.ndarray, rng: np.random.Generator) -> float:
    """Pushes under the falling pole, weakly and with noise: angles of all sizes."""
    return float(np.clip(2 * observation[2] + 0.5 * observation[3] + rng.normal(), -1, 1))


def learned(observation: np.ndarray, rng: np.random.Generator) -> float:
    return float(np.clip(10 * observation[2] + 2 * observation[3] + 0.3 * rng.normal(), -1, 1))


def frames_of(policy: Policy, episodes: int, seed: int) -> list[Segment]:
    """Every third step of some episodes."""
    rng = np.random.default_rng(seed)
    env = ContinuousCartPole(image_size=64)
    found: list[Segment] = []
    for episode in range(episodes):
        observation, _ = env.reset(seed=1000 * seed + episode)
        for step in range(100):
            action = np.array([policy(observation, rng)], np.float32)
            observation, reward, _, _, _ = env.step(action)
            if step % 3 == 0:
                found.append(
                    Segment(observation[None], action[None], np.array([reward], np.float32), env.frame()[None])
                )
    env.close()
    return found


@pytest.mark.acceptance
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_tiny_labeller_is_right_on_states_of_runs(seed: int) -> None:
    model = resolve_model("tiny-labeller", seed=seed)
    engine = TransformersEngine(model)
    backend = ServedEndpoint(EngineClient(engine), load_text_side(model))
    rng = np.random.default_rng(7 + seed)
    for name, policy in (("random", random_policy), ("half learned", half_learned), ("learned", learned)):
        frames = frames_of(policy, episodes=12, seed=seed)
        places = rng.integers(len(frames), size=(200, 2))
        pairs = [SegmentPair(frames[a], frames[b]) for a, b in places]
        labeller = VLMLabeller(backend, task_prompts("cartpole-tiny"), LabelsSection(steps=1))
        labels = asyncio.run(labeller.label(pairs))
        difference = np.array([p.first.true_rewards[0] - p.second.true_rewards[0] for p in pairs])
        clear = np.abs(difference) >= TIE_DEGREES
        values = np.array([label.value for label in labels])
        right = (values[clear] == (difference[clear] < 0)).mean() if clear.any() else float("nan")
        print(f"{name}: {clear.sum()} clear pairs of 200, right on {right:.3f}; {labeller.stats}")
        assert not any(label.error for label in labels)
        assert clear.sum() < 10 or right >= 0.8
        assert abs(labeller.stats.position_bias) < 0.2
    asyncio.run(engine.close())
