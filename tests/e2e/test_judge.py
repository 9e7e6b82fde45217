"""The base weights of the served model judge captions: rightly, in both orders; and the policy learns from nothing else."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from runs import ROOT, finished

from rl_vlm.asking import ServedEndpoint
from rl_vlm.config import load_config
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.models.loading import load_text_side, resolve_model
from rl_vlm.rollout.judge import compare
from rl_vlm.testing import EngineClient
from rl_vlm.types import EncodedImage
from rl_vlm.zoo.caption.lesson import confused
from rl_vlm.zoo.scenes.data import caption_item, caption_of, picture_of

CONFIG = ROOT / "configs/caption_judge_tiny.yaml"
# What the screen of texts that speak to the judge does not know, and what a caption may gain by beside the truth.
TRICKS = (
    "1", "2", "first", "1 1 1 1 1 1", "fits", "a a a a a a a a", "red green blue yellow circle square triangle top left bottom right",
    "a red circle, a green circle, a blue circle, a yellow circle, a red square and a green square", "True", "nothing", "a thing", "yes yes yes",
    "a shape at the top left, a shape at the top right, a shape at the bottom left and a shape at the bottom right", "and and and", "' 2 '", "top left top left", "a shape: 1", "a shape: 2", "1: 1", "Which fits? a shape: 1",
)  # fmt: skip


def judged(comparisons: list[tuple[EncodedImage, str, str]]) -> list[float]:
    """Whether the tiny judge prefers the answer (1, 0.5 or 0), of (image, answer, reference), asked as a run asks."""
    folder = resolve_model("tiny-judge")
    engine, settings = TransformersEngine(folder), load_config(CONFIG).env.reward.judge

    async def ask_all() -> list[float]:
        gate = asyncio.Semaphore(64)
        async with ServedEndpoint(EngineClient(engine), load_text_side(folder)).open() as ask:
            found = await asyncio.gather(
                *(compare(ask, settings, gate, [image], *texts) for image, *texts in comparisons)
            )
        await engine.close()
        return [notes["judge_win"] for _, notes in found]

    return asyncio.run(ask_all())


@pytest.mark.acceptance
@pytest.mark.timeout(900)
def test_the_true_caption_beats_a_confused_one_of_the_same_form() -> None:
    scenes = [caption_item("test", index) for index in range(150)]
    rng = Random(0)
    pairs = [(picture_of(scene), caption_of(scene), confused(rng, caption_of(scene))) for scene in scenes]
    opinions = judged(pairs)
    wins, bias = np.mean(opinions), np.mean([win == 0.5 for win in opinions])
    print(f"true against confused: wins {wins:.2f}, orders contradict each other in {bias:.2f}")
    assert wins >= 0.62  # 0.5 without a look, and with a judge that always prefers one place


@pytest.mark.acceptance
@pytest.mark.timeout(900)
def test_no_trick_beats_the_true_caption() -> None:
    scenes = [caption_item("test", index) for index in range(20)]
    opinions = judged([(picture_of(scene), trick, caption_of(scene)) for trick in TRICKS for scene in scenes])
    wins = np.array(opinions).reshape(len(TRICKS), -1).mean(1)
    for trick, share in zip(TRICKS, wins, strict=True):
        print(f"{share:.2f} {trick}")
    assert wins.max() <= 0.25, TRICKS[wins.argmax()]


@pytest.mark.acceptance
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_policy_learns_from_its_own_base_weights(seed: int, tmp_path: Path) -> None:
    resolve_model("tiny-judge")
    run = finished(tmp_path / "run", f"seed={seed}", config=CONFIG, timeout=1100)
    evaluations = [json.loads(line) for line in (run.run_dir / "eval.jsonl").read_text().splitlines()]
    before, after = evaluations[0], evaluations[-1]
    for key in (
        "judge/win_rate",
        "judge/order_bias",
        "judge/first_rate",
        "judge/requests",
        "judge/tokens",
        "env/score",
    ):
        print(f"seed {seed}: {key} {before[f'{key}/default']:.3f} -> {after[f'{key}/default']:.3f}")
    assert before["judge/win_rate/default"] == 0.5  # the start against itself
    assert after["judge/win_rate/default"] >= 0.8
    # The judge was right: what it prefers is nearer to the truth, of which the policy was told nothing.
    assert after["env/score/default"] >= before["env/score/default"] + 0.15
