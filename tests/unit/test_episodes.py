"""Episodes with a scripted policy and scripted environments: budgets, ends, failures, and what a trajectory records."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import expand, picture, processor, text_side
from http_support import wait_until
from PIL import Image

from rl_vlm.config import RolloutSection
from rl_vlm.engines.base import EngineError
from rl_vlm.envs.base import VisionEnv
from rl_vlm.envs.errors import EnvError
from rl_vlm.envs.images import blank, resized
from rl_vlm.models.images import TextSide
from rl_vlm.rollout.env_pool import EnvPool, GroupFailedError
from rl_vlm.rollout.episodes import run_group
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.seeding import derive_seed
from rl_vlm.testing import EngineClient, ScriptedEngine
from rl_vlm.types import (
    Completion,
    EncodedImage,
    GenerationRequest,
    Message,
    Observation,
    StopReason,
    TrajectoryGroup,
    TrajectoryStatus,
)

ROLLOUT = RolloutSection(max_turns=4, max_new_tokens_per_turn=32, max_new_tokens=100)
TASK = RolloutTask("g7", 7, "train", seed=70, sampling_seed=700, size=3, temperature=0.9, min_version=5)
FIRST, LATER = picture(np.random.default_rng(0), 64, 64), picture(np.random.default_rng(1), 32, 96)

Step = tuple[Any, ...]
END = (Observation(), 1.0, True, False, {})


def on(text: str, *parts: Any, reward: float = 0.0) -> Step:
    """A step that goes on with a message."""
    return Observation.user(text, *parts), reward, False, False, {}


class Scripted(VisionEnv):
    """Shows a picture; its steps are results, exceptions, or functions that are called."""

    def __init__(self, *steps: Any, opening: Any = None) -> None:
        super().__init__()
        self.script, self.opening = steps, opening
        self.heard: list[str] = []
        self.resets: list[tuple[Any, Any]] = []
        self.closed = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.resets.append((seed, options))
        self.heard = []
        if callable(self.opening):
            return self.opening()
        return self.opening or (Observation.user(FIRST, "What?"), {"opened": True})

    def step(self, action: str) -> Any:
        self.heard.append(action)
        result = self.script[min(len(self.heard), len(self.script)) - 1]
        if isinstance(result, BaseException):
            raise result
        return result() if callable(result) else result

    def close(self) -> None:
        self.closed = True


class Speaker(EngineClient):
    """A policy of version 5 that says what `answer(request, sample)` gives; each request has a replica of its own."""

    def __init__(self, folder: Path) -> None:
        self.text, self.tokenizer = text_side(folder), processor(folder).tokenizer
        self.answer: Callable[[GenerationRequest, int], Any] = lambda request, k: "ok"
        self.change: Callable[[Completion], Completion] = lambda completion: completion
        super().__init__(ScriptedEngine(self.text, lambda request, k: self.answer(request, k)))
        self.engine.version = 5

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    async def generate(self, request: GenerationRequest) -> Completion:
        self.replica_id = f"replica-{len(self.requests) + 1}"
        return self.change(await super().generate(request))


@pytest.fixture
def speaker(tiny_folder: Path) -> Speaker:
    return Speaker(tiny_folder)


class RememberingPool(EnvPool):
    """Remembers its environments in the order in which it hands them out: they are built in threads, in any order."""

    made: list[Scripted]

    async def borrow(self, count: int) -> list[Any]:
        envs = await super().borrow(count)
        self.made += [env for env in envs if env not in self.made]
        return envs


def pool_of(*steps: Any, timeout_s: float = 20.0, **more: Any) -> RememberingPool:
    """A pool of scripted environments."""
    opening = more.pop("opening", None)
    pool = RememberingPool(lambda: Scripted(*steps, opening=opening), timeout_s, **more)
    pool.made = []
    return pool


def pool_with(*envs: Scripted) -> RememberingPool:
    """A pool that hands out these."""
    pool = pool_of()
    pool.made += envs
    pool.give_back(pool.made)
    return pool


def play(
    pool: EnvPool, speaker: Speaker, rollout: RolloutSection = ROLLOUT, max_context: int = 600, **changes: Any
) -> TrajectoryGroup:
    task = dataclasses.replace(TASK, **changes)
    return asyncio.run(run_group(task, pool, speaker, speaker.text, rollout, max_context))


def limited(**changes: Any) -> RolloutSection:
    return ROLLOUT.model_copy(update=changes)


def failure(pool: EnvPool, speaker: Speaker, **changes: Any) -> GroupFailedError:
    with pytest.raises(GroupFailedError) as error:
        play(pool, speaker, **changes)
    return error.value


# --- what is asked and what is recorded


def test_the_first_turn_is_one_request_for_all_samples(speaker: Speaker, text: TextSide) -> None:
    pool = pool_of(END)
    group = play(pool, speaker)
    (asked,) = speaker.requests
    assert (asked.sampling.n, asked.sampling.temperature, asked.min_version, asked.preferred_replica) == (3, 0.9, 5, "")
    assert asked.sampling.max_new_tokens == ROLLOUT.max_new_tokens_per_turn
    assert asked.sampling.seeds == tuple(derive_seed(700, sample, 0) for sample in range(3))
    assert asked.images == (FIRST,)
    assert (asked.prompt_ids == text.codec.image_token_id).sum() == 1
    assert (group.group_id, group.index, len(group)) == ("g7", 7, 3)
    assert all(env.resets == [(70, {"index": 7, "split": "train"})] for env in pool.made)


def test_a_trajectory_holds_exactly_what_was_shown_and_said(speaker: Speaker, text: TextSide) -> None:
    speaker.answer = lambda request, k: f"answer {k}"
    last = Observation.user("Bye.", LATER)  # which no turn follows
    pool = pool_of((last, 0.75, True, False, {"correct": True}))
    group = play(pool, speaker)
    prompt = expand(text, text.codec.encode_prompt([Message.of("user", FIRST, "What?")]).token_ids, [FIRST])
    for k, trajectory in enumerate(group.trajectories):
        said = [*speaker.ids(f"answer {k}"), text.codec.end_of_turn_id]
        assert trajectory.token_ids.tolist() == [*prompt.tolist(), *said]
        assert trajectory.loss_mask.tolist() == [False] * len(prompt) + [True] * len(said)
        assert trajectory.logprobs[: len(prompt)].tolist() == [0.0] * len(prompt)
        assert trajectory.logprobs[len(prompt) :].tolist() == pytest.approx([-0.5 - j / 100 for j in range(len(said))])
        (turn,) = trajectory.turns
        assert (turn.start, turn.stop, turn.policy_version, turn.reward) == (len(prompt), len(trajectory), 5, 0.75)
        assert (trajectory.trajectory_id, trajectory.status) == (f"g7:{k}", TrajectoryStatus.COMPLETED)
        assert (trajectory.images, trajectory.replica_ids) == ((FIRST,), ("replica-1",))
        assert trajectory.info == {"opened": True, "correct": True}
        assert pool.made[k].heard == [f"answer {k}"]
        assert trajectory.messages == ()


def test_later_turns_follow_their_episode(speaker: Speaker, text: TextSide) -> None:
    """Session, seeds, unexpanded ids, all images so far, and the version of each turn."""

    def answer(request: GenerationRequest, k: int) -> str:
        speaker.engine.version = 5 + len(speaker.requests)
        return "x" * len(speaker.requests)

    speaker.answer = answer
    pool = pool_of(on("Closer:", LATER, reward=0.5), on("And?"), END)
    (trajectory,) = play(pool, speaker, size=1, record=True).trajectories
    first, second, third = speaker.requests
    assert [asked.preferred_replica for asked in speaker.requests] == ["", "replica-1", "replica-2"]
    assert [asked.request_id for asked in speaker.requests] == ["g7:0", "g7:0:1", "g7:0:2"]
    for turn, asked in enumerate((second, third), start=1):
        assert asked.sampling.seeds == (derive_seed(700, 0, turn),)
        assert (asked.sampling.n, asked.min_version, asked.sampling.temperature) == (1, 5, 0.9)
        assert asked.images == (FIRST, LATER)
        assert (asked.prompt_ids == text.codec.image_token_id).sum() == 2
        assert asked.prompt_ids[: len(first.prompt_ids)].tolist() == first.prompt_ids.tolist()
    whole = expand(text, third.prompt_ids, third.images)
    assert trajectory.token_ids[: len(whole)].tolist() == whole.tolist()
    assert [turn.policy_version for turn in trajectory.turns] == [6, 7, 8]
    assert [turn.reward for turn in trajectory.turns] == [0.5, 0.0, 1.0]
    assert (trajectory.reward, trajectory.oldest_version) == (1.5, 6)
    assert trajectory.replica_ids == ("replica-1", "replica-2", "replica-3")
    chat = [
        Message.of("user", FIRST, "What?"), Message.of("assistant", "x"), Message.of("user", "Closer:", LATER),
        Message.of("assistant", "xx"), Message.of("user", "And?"),
    ]  # fmt: skip
    content = [
        {
            "role": m.role,
            "content": [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in m.parts],
        }
        for m in chat
    ]
    assert trajectory.messages == (*chat, Message.of("assistant", "xxx"))
    rendered = speaker.tokenizer.apply_chat_template(content, tokenize=False, add_generation_prompt=True)
    assert third.prompt_ids.tolist() == speaker.ids(rendered)


def test_turns_that_were_shown_the_same_have_the_same_state(speaker: Speaker) -> None:
    """Whoever answered before, and however that turn ended."""
    opening = (Observation.user(FIRST, "What?"), {})
    left, right = on("Left.", LATER), on("Right.", LATER)
    speaker.answer = lambda request, k: (
        "ok",
        StopReason.STOP if len(speaker.requests) == 1 else StopReason.END_OF_TURN,
    )
    back = (*opening[:1], 0.0, False, False, {})
    scripts = [[left, right, END], [right, left, back, END], [on("Left.", FIRST), END]]
    group = play(pool_with(*(Scripted(*steps, opening=opening) for steps in scripts)), speaker)
    one, two, three = ([turn.state_id for turn in trajectory.turns] for trajectory in group.trajectories)
    start, at_left, at_right = one
    assert two == [start, at_right, at_left, start]
    assert three[0] == start
    assert len({start, at_left, at_right, three[1]}) == 4  # the same words with another picture are another state
    assert all(re.fullmatch("[0-9a-f]{16}", name) for name in (*one, *three))


def test_plain_values_of_info_are_kept_also_as_numpy_scalars(speaker: Speaker) -> None:
    info = {
        "correct": np.bool_(True), "count": np.int64(3), "score": np.float32(0.5), "text": "x", "plain": 2,
        "array": np.zeros(3), "odd": object(), "nothing": None,
    }  # fmt: skip
    (trajectory,) = play(
        pool_of((Observation(), np.float64(1), np.bool_(True), False, info)), speaker, size=1
    ).trajectories
    assert trajectory.info == {"opened": True, "correct": True, "count": 3, "score": 0.5, "text": "x", "plain": 2}
    assert all(type(value) in (bool, int, float, str) for value in trajectory.info.values())


# --- budgets


def test_turns_are_limited(speaker: Speaker) -> None:
    pool = pool_of(on("go on", reward=0.1))
    (trajectory,) = play(pool, speaker, limited(max_turns=3), size=1).trajectories
    assert (len(trajectory.turns), trajectory.status) == (3, TrajectoryStatus.TRUNCATED)
    assert len(pool.made[0].heard) == 3  # the last answer is rewarded too
    assert trajectory.reward == pytest.approx(0.3)
    assert trajectory.turns[-1].stop == len(trajectory)


def test_the_budget_of_new_tokens_shrinks_with_each_turn(speaker: Speaker, text: TextSide) -> None:
    length = len(speaker.ids("word")) + 1
    limits = limited(max_turns=99, max_new_tokens_per_turn=8, max_new_tokens=2 * length + 3)
    speaker.answer = lambda request, k: (
        "word" if request.sampling.max_new_tokens >= length else ("a", StopReason.LENGTH)
    )
    (trajectory,) = play(pool_of(on("go on")), speaker, limits, size=1).trajectories
    assert [asked.sampling.max_new_tokens for asked in speaker.requests] == [8, min(8, length + 3), 3]
    assert trajectory.status is TrajectoryStatus.TRUNCATED
    assert trajectory.num_sampled <= limits.max_new_tokens


def test_prompt_and_new_tokens_never_exceed_the_context(speaker: Speaker, text: TextSide) -> None:
    limits = limited(max_turns=99, max_new_tokens=1000)
    (trajectory,) = play(pool_of(on("some more words to read")), speaker, limits, max_context=90, size=1).trajectories
    assert len(trajectory.turns) > 1
    assert len(trajectory) <= 90
    assert trajectory.status is TrajectoryStatus.TRUNCATED
    for asked in speaker.requests:
        length = len(expand(text, asked.prompt_ids, asked.images))
        assert asked.sampling.max_new_tokens == min(32, 90 - length) >= 1


def test_an_image_that_does_not_fit_any_more_ends_the_episode(speaker: Speaker, text: TextSide) -> None:
    large = picture(np.random.default_rng(2), 128, 128)
    (trajectory,) = play(pool_of(on("see", large)), speaker, max_context=45, size=1).trajectories
    assert (len(trajectory.turns), trajectory.images, trajectory.status) == (1, (FIRST,), TrajectoryStatus.TRUNCATED)


def test_a_prompt_beyond_the_context_fails_the_group_by_name(speaker: Speaker) -> None:
    error = failure(pool_of(END), speaker, max_context=12)
    assert error.reason == "prompt_too_long"
    assert "item 7" in str(error)
    assert speaker.requests == []


# --- how turns end


def test_a_turn_that_was_cut_ends_the_episode_without_a_reward(speaker: Speaker) -> None:
    speaker.answer = lambda request, k: ("cut", StopReason.LENGTH) if k == 0 else "whole"
    pool = pool_of(END)
    group = play(pool, speaker, size=2)
    assert [trajectory.status for trajectory in group.trajectories] == [
        TrajectoryStatus.TRUNCATED,
        TrajectoryStatus.COMPLETED,
    ]
    assert group.rewards.tolist() == [0.0, 1.0]
    assert [env.heard for env in pool.made] == [[], ["whole"]]


@pytest.mark.parametrize("reason", [StopReason.LENGTH, StopReason.STOP])
def test_a_turn_without_its_end_is_ended_unsampled_when_it_goes_on(
    speaker: Speaker, text: TextSide, reason: StopReason
) -> None:
    limits = limited(require_end_of_turn=False)
    speaker.answer = lambda request, k: ("cut", reason)
    (trajectory,) = play(pool_of(on("go on"), END), speaker, limits, size=1).trajectories
    first = trajectory.turns[0]
    assert trajectory.token_ids[first.stop - 1] != text.codec.end_of_turn_id
    assert trajectory.token_ids[first.stop] == text.codec.end_of_turn_id
    assert not trajectory.loss_mask[first.stop]
    assert trajectory.reward == 1.0
    assert [turn.well_formed for turn in trajectory.turns] == [reason is not StopReason.LENGTH] * 2


def test_an_environment_may_truncate(speaker: Speaker) -> None:
    (trajectory,) = play(pool_of((Observation(), 0.25, False, True, {})), speaker, size=1).trajectories
    assert (trajectory.status, trajectory.reward) == (TrajectoryStatus.TRUNCATED, 0.25)


# --- failures


FAILURES: dict[str, tuple[Any, str, str]] = {
    "raises": (ValueError("boom"), "env", "ValueError: boom"),
    "raises its own error": (EnvError("sorry"), "env", "sorry"),
    "exits": (SystemExit(3), "env", "SystemExit"),
    "runs out of items": (StopIteration(), "env", "StopIteration"),
    "returns a text": (("an observation", 1.0, True, False, {}), "env", "must return an Observation"),
    "pays nan": ((Observation(), float("nan"), True, False, {}), "env", "reward nan"),
    "speaks as a system": (
        (Observation((Message.of("system", "obey"),)), 0.0, False, False, {}), "user_input", "drops or repeats",
    ),
    "shows a sliver": (on("see", Image.new("RGB", (1, 300))), "image", "200 times"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("turn", [1, 2])
def test_an_environment_that_fails_fails_its_group_with_a_reason(speaker: Speaker, name: str, turn: int) -> None:
    result, reason, words = FAILURES[name]
    pool = pool_of(*[on("go on")] * (turn - 1), result)
    error = failure(pool, speaker)
    assert error.reason == reason
    assert words in str(error)
    pool.close()
    wait_until(lambda: all(env.closed for env in pool.made))


@pytest.mark.parametrize("opening", [ValueError("boom"), SystemExit(1), lambda: None, lambda: (Observation(), {})])
def test_an_environment_that_cannot_open_fails_its_group(speaker: Speaker, opening: Any) -> None:
    def fail() -> Any:
        if isinstance(opening, BaseException):
            raise opening
        return opening()

    assert failure(pool_of(END, opening=fail), speaker).reason == "env"
    assert speaker.requests == []


def test_failed_environments_are_closed_and_good_ones_used_again(speaker: Speaker) -> None:
    pool = pool_of(END)
    play(pool, speaker)
    play(pool, speaker)
    assert len(pool.made) == 3
    broken = pool.made[0]
    broken.script = (ValueError("boom"),)
    failure(pool, speaker)
    wait_until(lambda: all(env.closed for env in pool.made[:3]))
    play(pool, speaker)
    assert len(pool.made) == 6
    assert not any(env.closed for env in pool.made[3:])


def test_an_environment_that_hangs_is_given_up_at_its_deadline(speaker: Speaker) -> None:
    release = threading.Event()
    pool = pool_of(lambda: release.wait(300) and END, timeout_s=0.2)
    started = time.monotonic()
    error = failure(pool, speaker, size=1)
    assert error.reason == "env_timeout"
    assert 0.2 <= time.monotonic() - started < 200
    assert pool.stuck == 1
    assert not pool.made[0].closed  # closing it could hang as well
    release.set()


def test_a_policy_that_fails_fails_the_group_with_its_reason(speaker: Speaker) -> None:
    pool = pool_of(on("go on"), END)
    speaker.answer = lambda request, k: EngineError("overloaded") if len(speaker.requests) == 2 else "ok"
    error = failure(pool, speaker, size=1)
    assert (error.reason, str(error)) == ("engine", "overloaded")


def test_an_error_waits_for_the_other_episodes(speaker: Speaker) -> None:
    """No environment is still stepping when its group is given up."""
    stepping = threading.Event()
    finished: list[str] = []

    def slow() -> Step:
        stepping.set()
        time.sleep(0.3)
        finished.append("slow")
        return END

    def fails() -> Step:
        assert stepping.wait(300)
        raise ValueError("boom")

    pool = pool_with(Scripted(on("go on"), slow), Scripted(on("go on"), fails))
    assert failure(pool, speaker, size=2).reason == "env"
    assert finished == ["slow"]


def test_a_group_whose_engine_expands_images_otherwise_fails_by_name(speaker: Speaker) -> None:
    for turn in (1, 2):
        speaker.requests.clear()

        def change(completion: Completion, turn: int = turn) -> Completion:
            if len(speaker.requests) != turn:
                return completion
            ids = completion.prompt_ids
            first = int(np.argmax(ids == speaker.text.codec.image_token_id))
            return dataclasses.replace(completion, prompt_ids=np.delete(ids, first))

        speaker.change = change
        error = failure(pool_of(on("go on"), END), speaker, size=1)
        assert error.reason == "image_accounting"
        assert "g7" in str(error)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (Observation.user(FIRST, "a"), Observation.user(FIRST, "b"), False),
        (Observation.user(FIRST, "a"), Observation.user("a", FIRST), False),
        (Observation.user(FIRST, "a"), Observation.user(picture(np.random.default_rng(9), 64, 64), "a"), False),
        (Observation.user(FIRST, "a"), Observation.user(FIRST.to_pil(), "a"), True),
    ],
)
def test_copies_must_open_alike(speaker: Speaker, one: Observation, other: Observation, same: bool) -> None:
    pool = pool_with(Scripted(END, opening=(one, {})), Scripted(END, opening=(other, {})))
    if same:
        assert len(play(pool, speaker, size=2)) == 2
    else:
        assert failure(pool, speaker, size=2).reason == "env_not_seeded"


@pytest.mark.parametrize(
    ("others", "shown"),
    [((LATER,), (LATER, LATER)), ((LATER, FIRST, FIRST), (LATER, FIRST)), ((), (blank(64, 64),) * 2)],
)
def test_items_of_other_numbers_of_images_take_each_others_places(
    speaker: Speaker, others: tuple[EncodedImage, ...], shown: tuple[EncodedImage, ...]
) -> None:
    openings = iter([(Observation.user(FIRST, FIRST, "own"), {}), (Observation.user(*others, "other"), {})])
    pool = pool_of(END, opening=lambda: next(openings))
    (trajectory,) = play(pool, speaker, size=1, view="swapped", other_index=8).trajectories
    assert list(trajectory.images) == [resized(image, 64, 64) for image in shown]


def test_an_unknown_error_leaves_no_environment_open(speaker: Speaker) -> None:
    pool = pool_of(END)
    speaker.answer = lambda request, k: KeyError("a bug")
    with pytest.raises(KeyError):
        play(pool, speaker)
    wait_until(lambda: all(env.closed for env in pool.made))
