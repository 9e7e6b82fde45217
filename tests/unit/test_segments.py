"""Episodes whose prompts are rewritten: what turns show, the segments of a trajectory, and what the learner makes of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from core_support import (
    adapted_policy,
    builder_of,
    first_gradient,
    gradient_vector,
    reference_logprobs,
    run_config,
    segmented_episode,
)
from pydantic import ValidationError
from segment_support import PICTURES, TASK, Walk, check_segments

from rl_vlm.config import HistorySection, RolloutSection, parse_config
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.envs.base import EpisodeEnv
from rl_vlm.envs.isolation import ProcessEnv
from rl_vlm.learning.batching import gathered
from rl_vlm.learning.plan import estimate_advantages, make_experience
from rl_vlm.models.images import TextSide
from rl_vlm.rollout.env_pool import EnvPool
from rl_vlm.rollout.episodes import run_group
from rl_vlm.rollout.history import History
from rl_vlm.testing import EngineClient, ScriptedEngine
from rl_vlm.types import (
    Message,
    Trajectory,
    TrajectoryError,
    TrajectoryGroup,
)


class Newest(Walk):
    """Shows the newest observation alone from turn 3 on."""

    def context(self, messages: Sequence[Message]) -> Sequence[Message]:
        return [Message.of("user", f"{len(messages)} messages."), messages[-1]] if self.turn >= 3 else messages


def play(
    text: TextSide, env: Callable[[], EpisodeEnv], rollout: RolloutSection, room: int = 4000, view: str = "true"
) -> tuple[Trajectory, ScriptedEngine]:
    engine = ScriptedEngine(text, lambda request, k: f"reply {len(engine.requests)}")
    task = replace(TASK, record=True, view=view)
    group = asyncio.run(run_group(task, EnvPool(env, 20.0), EngineClient(engine), text, rollout, room))
    return group.trajectories[0], engine


def rollout_of(**history: object) -> RolloutSection:
    return RolloutSection(max_turns=9, max_new_tokens_per_turn=16, history=HistorySection(**history))


def shown(text: TextSide, engine: ScriptedEngine) -> list[str]:
    """What each request showed, in short: numbers of pictures, `go 1`, `reply 1`."""
    prompts = []
    for request in engine.requests:
        whole = text.codec.text_of(request.prompt_ids)
        for image in request.images:
            whole = whole.replace("<|image_pad|>", f"[{PICTURES.index(image)}]", 1)
        for word in ("<|vision_start|>", "<|vision_end|>", "<|im_end|>", "<|im_start|>", "user", "assistant", "\n"):
            whole = whole.replace(word, " ")
        prompts.append(re.sub(r" ?([\[(][a-z0-9]+[\])]) ?", r"\1", " ".join(whole.split())))
    return prompts


def test_the_newest_pictures_stay_and_older_ones_become_words(text: TextSide) -> None:
    trajectory, engine = play(text, Walk, rollout_of(images=2, omitted="(gone)"))
    assert shown(text, engine) == [
        "[0]go 0",
        "[0]go 0 reply 1 go 1[1]",
        "(gone)go 0 reply 1 go 1(gone)reply 2 go 2[2]",
        "(gone)go 0 reply 1 go 1(gone)reply 2 go 2[2]reply 3 go 3[3]",
        "(gone)go 0 reply 1 go 1(gone)reply 2 go 2(gone)reply 3 go 3(gone)reply 4 go 4[4]",
        "(gone)go 0 reply 1 go 1(gone)reply 2 go 2(gone)reply 3 go 3(gone)reply 4 go 4[4]reply 5 go 5[5]",
    ]
    assert [segment.images for segment in trajectory.segments] == [(0, 1), (2, 3), (4, 5)]
    assert trajectory.images == tuple(PICTURES[:6]) == trajectory.placed_images
    for part, last in zip(trajectory.parts, engine.requests[1::2], strict=True):
        prompt = text.expand(last.prompt_ids, last.images)
        assert part.token_ids[: len(prompt)].tolist() == prompt.tolist() and len(part.turns) == 2
        assert part.token_ids[part.loss_mask].tolist() == [
            token for turn in part.turns for token in part.token_ids[turn.start : turn.stop]
        ]
    assert [text.codec.decode(trajectory.token_ids[turn.start : turn.stop]) for turn in trajectory.turns] == [
        f"reply {k}" for k in range(1, 7)
    ]
    assert [turn.reward for turn in trajectory.turns] == [1, 2, 3, 4, 5, 6]
    assert [message.role for message in trajectory.messages] == ["user", "assistant"] * 6


def test_the_first_observation_and_the_newest_turns_stay(text: TextSide) -> None:
    trajectory, engine = play(text, Walk, rollout_of(turns=3, keep=2))
    assert shown(text, engine)[3:] == [
        "[0]go 0 reply 1 go 1[1]reply 2 go 2[2]reply 3 go 3[3]",
        "[0]go 0 go 3[3]reply 4 go 4[4]",
        "[0]go 0 go 3[3]reply 4 go 4[4]reply 5 go 5[5]",
    ]
    assert [segment.images for segment in trajectory.segments] == [(0, 1, 2, 3), (0, 3, 4, 5)]


def test_pictures_and_turns_are_limited_together() -> None:
    history = History(HistorySection(images=2, turns=2, keep=1, omitted="-"), [Message.of("user", PICTURES[0])])
    rewritten = [history.add([Message.of("tool", PICTURES[k], PICTURES[k])]) for k in (1, 2, 3)]
    assert rewritten == [True, True, True]  # two pictures each, which an observation keeps
    assert history.messages == [
        [Message.of("user", "-"), Message.of("tool", PICTURES[3], PICTURES[3])],
    ]


def test_an_environment_may_write_the_prompt_itself(text: TextSide) -> None:
    trajectory, engine = play(text, Newest, rollout_of())
    assert shown(text, engine)[2:4] == [
        "[0]go 0 reply 1 go 1[1]reply 2 go 2[2]",
        "7 messages. go 3[3]",
    ]
    assert [segment.images for segment in trajectory.segments] == [(0, 1, 2), (3,), (4,), (5,)]


def test_what_an_environment_in_a_process_of_its_own_writes(tmp_path: Path, text: TextSide) -> None:
    """With pictures of its own among the old ones, which blank views hide as well."""
    (tmp_path / "own.py").write_text(
        "from PIL import Image\n"
        "from rl_vlm.types import Message, Observation\n"
        "from rl_vlm.envs.base import EpisodeEnv, Reply\n"
        "class Own(EpisodeEnv):\n"
        "    def open(self, item):\n"
        "        return Observation.user(Image.new('RGB', (32, 32), 'red'), 'go')\n"
        "    def reply(self, text):\n"
        "        return Reply(1.0, Observation.user('on') if self.turn < 3 else None)\n"
        "    def context(self, messages):\n"
        "        return [messages[0], Message.of('user', Image.new('RGB', (64, 32), 'blue'), str(len(messages)))]\n"
    )
    env = ProcessEnv(str(tmp_path / "own.py"))
    try:
        for view in ("true", "blank"):
            trajectory, _ = play(text, lambda: env, rollout_of(), view=view)
            assert [segment.images for segment in trajectory.segments] == [(0,), (0, 1), (0, 1)]
            colours = [image.to_pil().getpixel((0, 0)) for image in trajectory.images]
            assert (colours == [(255, 0, 0), (0, 0, 255)]) == (view == "true")
    finally:
        env.close()


def test_a_prompt_that_is_rewritten_has_the_whole_context_again(text: TextSide) -> None:
    whole, _ = play(text, Walk, rollout_of())
    parts, _ = play(text, Walk, rollout_of(images=2, turns=2), room=len(whole) - 20)
    cut, _ = play(text, Walk, rollout_of(), room=len(whole) - 20)
    assert (len(parts.turns), parts.status, cut.status) == (6, "completed", "truncated")
    assert max(map(len, parts.parts)) < 0.7 * len(whole)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"keep": 1}, "keep"),
        ({"images": 2, "keep": 3}, "keep"),
        ({"omitted": "x"}, "omitted"),
        ({"images": 0}, "images"),
    ],
)
def test_contradictions_are_told(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=f"{said}"):
        HistorySection(**given)
    assert parse_config({"rollout": {"history": "all"}}).rollout.history.is_all


def test_broken_segments_are_found(text: TextSide) -> None:
    trajectory, _ = play(text, Walk, rollout_of(images=2))
    first, second, *others = trajectory.segments
    moved = replace(first, stop=first.stop - 1), replace(second, start=second.start + 1)
    for broken in ((first, second), (moved[0], second, *others), (first, moved[1], *others), (second, *others)):
        with pytest.raises(TrajectoryError):
            replace(trajectory, segments=broken).check()


# --- the learner


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "constant"])
@pytest.mark.parametrize("share_prompts", [True, False])
def test_advantages_weights_and_gradients_equal_a_plain_loop(
    tiny_folder: Path, text: TextSide, aggregation: str, share_prompts: bool
) -> None:
    """Of a group of episodes of three, three, two and one segments, the longest of which begin alike."""
    rng = np.random.default_rng(0)
    members = [segmented_episode(text, rng, PICTURES, f"t{k}", count) for k, count in enumerate((3, 3, 2, 1))]
    group = TrajectoryGroup("g", 0, members)
    policy = adapted_policy(tiny_folder, learner__micro_batch_tokens=300, learner__share_prompts=share_prompts)
    run = run_config(
        tiny_folder, algorithm__aggregation=aggregation, algorithm__mismatch="none", learner__micro_batch_tokens=300,
        learner__share_prompts=share_prompts, rollout__temperature=0.7, rollout__max_new_tokens=64,
    )  # fmt: skip
    experience = make_experience([group], run, rng)
    estimate = estimate_advantages(experience, run.algorithm)
    found = first_gradient(policy, run, group, estimate)

    rewards = np.array([sum(turn.reward for turn in one.turns) for one in members])
    policy.model.zero_grad(set_to_none=True)
    loss, tokens = torch.zeros(()), sum(one.num_sampled for one in members)
    for number, one in enumerate(members):
        np.testing.assert_allclose(
            estimate.advantages[one.trajectory_id], np.full(one.num_sampled, estimate.advantages[one.trajectory_id][0])
        )
        weight = {
            "sequence_mean": 1 / (one.num_sampled * 4),
            "token_mean": 1 / tokens,
            "constant": 1 / (run.rollout.max_new_tokens * 4),
        }[aggregation]
        advantage = float(estimate.advantages[one.trajectory_id][0])
        assert np.sign(advantage) == np.sign(rewards[number] - rewards.mean())
        for segment in one.segments:
            ids, mask = (array[segment.start : segment.stop] for array in (one.token_ids, one.loss_mask))
            images = [one.images[k] for k in segment.images]
            logprobs = reference_logprobs(tiny_folder, policy.model, ids, images, 0.7)[mask[1:]]
            # At the first step the ratio is 1, and its gradient that of the log-probability.
            loss = loss - weight * advantage * logprobs.sum()
    loss.backward()
    expected = gradient_vector(policy.parameters)
    assert expected.abs().max() > 1e-3
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_tokens_go_to_micro_batches_and_back(text: TextSide) -> None:
    rng = np.random.default_rng(1)
    members = [segmented_episode(text, rng, PICTURES, f"t{k}", count) for k, count in enumerate((3, 1, 2))]
    values = {one.trajectory_id: rng.normal(size=one.num_sampled) for one in members}
    micros = builder_of(text, 120).build([members])
    back = gathered((micro, micro.join(values)) for micro in micros)
    assert len(micros) > 2 and back.keys() == values.keys()
    for name, own in values.items():
        np.testing.assert_array_equal(back[name], own)


@pytest.mark.parametrize("history", [{"images": 2}, {"turns": 2}])
def test_engine_and_learner_agree_on_every_segment(tiny_folder: Path, history: dict[str, int]) -> None:
    engine = TransformersEngine(tiny_folder, max_context=1024)
    check_segments(engine, tiny_folder, history)
    asyncio.run(engine.close())
