"""What an env runner does with an engine of this process, without Ray: groups that are opened ahead, mixtures, calls at the same time, images sent once."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import conversation, picture, request, text_side
from engine_support import until
from loops import in_loop
from PIL import Image
from test_client import Handle, client_of

from rl_vlm.config import PolicyConfig, parse_config
from rl_vlm.engines.base import EngineError
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.envs.base import StepResult
from rl_vlm.envs.errors import EnvError
from rl_vlm.models.reference import ModelReference
from rl_vlm.rollout.base_env_runner import RunnerConfig
from rl_vlm.rollout.curriculum import make_task_source
from rl_vlm.rollout.env_runner import RolloutWorker, VLMEnvRunner, share_images
from rl_vlm.rollout.task_stream import TaskStream
from rl_vlm.rollout.tasks import RolloutResult, RolloutTask
from rl_vlm.testing import EngineClient
from rl_vlm.types import EncodedImage, TrajectoryGroup
from rl_vlm.zoo.drawing import IMAGE_SIZE
from rl_vlm.zoo.shapes.environment import ShapesEnv


@pytest.fixture
def resets(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The items that environments were opened with."""
    opened: list[int] = []
    reset = ShapesEnv.reset

    def note(self: ShapesEnv, **more: Any) -> Any:
        opened.append(more["options"]["index"])
        return reset(self, **more)

    monkeypatch.setattr(ShapesEnv, "reset", note)
    return opened


SHAPES = PolicyConfig.model_validate({"env": {"id": "Shapes-v0"}, "rollout": {"group_size": 2, "group_retries": 0}})


def worker_of(
    engine: TransformersEngine, folder: Path, run: PolicyConfig = SHAPES
) -> tuple[RolloutWorker, EngineClient]:
    client = EngineClient(engine)
    return RolloutWorker(run, "run", folder, client=client), client


def tasks(first: int, count: int = 3) -> list[RolloutTask]:
    return [
        RolloutTask(f"{k:06d}", k, "train", seed=k, sampling_seed=100 + k, size=2, temperature=1.0, min_version=0)
        for k in range(first, first + count)
    ]


def sampled(result: RolloutResult) -> list[tuple[str, list[int], list[float]]]:
    return [(t.trajectory_id, t.token_ids.tolist(), t.logprobs.tolist()) for g in result.groups for t in g.trajectories]


@in_loop
async def test_groups_are_the_same_and_open_once(
    engine: TransformersEngine, tiny_folder: Path, resets: list[int]
) -> None:
    plain, _ = worker_of(engine, tiny_folder)
    ahead, client = worker_of(engine, tiny_folder)
    expected = await plain.run(tasks(0))
    resets.clear()
    await ahead.open_ahead(tasks(0))
    assert sorted(resets) == [0, 0, 1, 1, 2, 2]
    shown = [t.images[0].sha256 for g in expected.groups for t in g.trajectories[:1]]
    assert sorted(image.sha256 for image in client.announced) == sorted(shown)
    result = await ahead.run([dataclasses.replace(task, min_version=0) for task in tasks(0)])
    assert len(resets) == 6  # not once more
    found, wanted = sampled(result), sampled(expected)
    assert [one[:2] for one in found] == [one[:2] for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one[2], other[2], atol=1e-5)


@in_loop
async def test_images_are_encoded_when_the_engine_is_idle(engine: TransformersEngine, tiny_folder: Path) -> None:
    text, rng = text_side(tiny_folder), np.random.default_rng(0)
    asked = [request(text, [picture(rng, 64, 64), "What?"], name=str(k), max_new_tokens=4) for k in range(20)]
    missed, hit = engine.stats().image_cache_misses, engine.stats().image_cache_hits
    engine.encode_images([image for one in asked for image in one.images])
    await until(lambda: engine.stats().image_cache_misses == missed + 20)
    await engine.generate(asked)
    assert engine.stats().image_cache_misses == missed + 20 and engine.stats().image_cache_hits == hit + 20


@in_loop
async def test_a_damaged_image_is_told_to_the_request_that_shows_it(
    engine: TransformersEngine, tiny_folder: Path
) -> None:
    text = text_side(tiny_folder)
    good = request(text, [picture(np.random.default_rng(0), 64, 64), "What?"], max_new_tokens=4)
    broken = dataclasses.replace(good.images[0], png=good.images[0].png[:40], sha256="0" * 64)
    engine.encode_images([broken])
    await asyncio.sleep(0.1)
    assert len(await engine.generate([good])) == 1
    with pytest.raises(EngineError):
        await engine.generate([dataclasses.replace(good, images=(broken,))])
    assert not engine.dead


def test_replicas_are_told_what_their_requests_will_show() -> None:
    images = [picture(np.random.default_rng(k), 32, 32) for k in range(3)]
    handle = Handle("a", "b")
    asyncio.run(client_of(handle).encode_images([[images[0]], [images[1]], [images[2]]]))
    assert [session for session, _ in handle.calls] == ["#0", "#1"]
    assert [calls for _, calls in handle.calls] == [[images[0], images[2]], [images[1]]]


@in_loop
async def test_what_fails_ahead_is_left_to_the_round_that_counts_it(
    engine: TransformersEngine, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, client = worker_of(engine, tiny_folder)
    reset = ShapesEnv.reset

    def fail(self: ShapesEnv, **more: Any) -> Any:
        if more["options"]["index"] == 1:
            raise EnvError("broken")
        return reset(self, **more)

    monkeypatch.setattr(ShapesEnv, "reset", fail)
    await worker.open_ahead(tasks(0))
    assert len(client.announced) == 2
    result = await worker.run(tasks(0))
    assert [group.index for group in result.groups] == [0, 2]
    assert result.lost == {"000001": "broken"} and result.dropped == {"env": 1}


# --- mixtures: arguments of the stage, rewards by parts


MIXTURE: list[dict[str, Any]] = [
    {"name": "count", "id": "Shapes-v0", "reward": {"weights": {"env": 1.0, "format": 0.5}}},
    {"name": "rule", "id": "Shapes-v0", "kwargs": {"task": "rule"}},
]
STAGES = [{"start": 0, "env": {"count": {"image_size": 96}}}, {"start": 8}]


def mixture_run(mixture: list[dict[str, Any]] = MIXTURE) -> PolicyConfig:
    rollout = {"group_size": 2, "prompts_per_iteration": 4, "group_retries": 0, "require_end_of_turn": False}
    return parse_config({"env": {"mixture": mixture}, "curriculum": {"stages": STAGES}, "rollout": rollout})


def play(run: PolicyConfig, stream: TaskStream, engine: TransformersEngine, folder: Path) -> RolloutResult:
    worker, _ = worker_of(engine, folder, run)
    result = asyncio.run(worker.run(stream.take(4)))
    worker.close_envs()
    return result  # type: ignore[no-any-return]


def test_tasks_are_played_as_their_stage_says_and_paid_as_their_environment_says(
    engine: TransformersEngine, tiny_folder: Path
) -> None:
    run = mixture_run()
    stream = TaskStream(make_task_source(run, {"count": 50, "rule": 50}), run)
    first = play(run, stream, engine, tiny_folder)
    stream.done_with(first.groups)
    second = play(run, stream, engine, tiny_folder)
    assert not first.lost and not second.lost
    assert [(group.env, group.stage) for group in first.groups] == [("count", 0), ("rule", 0)] * 2
    assert {group.stage for group in second.groups} == {1}
    widths = [
        {t.images[0].width for g in r.groups if g.env == "count" for t in g.trajectories} for r in (first, second)
    ]
    assert widths == [{96}, {IMAGE_SIZE}]
    for group in (*first.groups, *second.groups):
        for one in group.trajectories:
            (turn,) = one.turns
            if group.env == "rule":
                assert turn.parts == () and turn.reward in (0.0, 1.0)
            else:
                assert turn.reward == dict(turn.parts)["env"] + 0.5 * turn.well_formed
                assert turn.well_formed == bool(one.info.get("well_formed", False))


# --- several calls at once


class OneIsSlow(ShapesEnv):
    """A step of item 0 takes until the file `gate` is there, and a second more. Beside it each call's seconds are noted."""

    def __init__(self, gate: str = "", **more: Any) -> None:
        super().__init__(**more)
        self.gate = Path(gate)

    def reset(self, **more: Any) -> Any:
        self.index = more["options"]["index"]
        return super().reset(**more)

    def step(self, action: str) -> StepResult:
        started = time.monotonic()
        while self.index == 0 and not self.gate.exists() and time.monotonic() - started < 300:
            time.sleep(0.02)
        return super().step(action)


def run_of(lag: int, gate: Path = Path(), **rollout: Any) -> PolicyConfig:
    env = {"id": f"{__file__}:OneIsSlow", "kwargs": {"gate": str(gate)}}
    return parse_config(
        {"env": env, "rollout": {"group_size": 2, "max_policy_lag": lag, "require_end_of_turn": False, **rollout}}
    )


@pytest.fixture
def runner(tiny_folder: Path, tmp_path: Path) -> Iterator[VLMEnvRunner]:
    config = RunnerConfig(
        run_of(lag=2, gate=tmp_path / "gate"),
        "run",
        ModelReference.of(str(tiny_folder)),
    )
    runner, engine = VLMEnvRunner(config=config), TransformersEngine(tiny_folder, max_context=512)
    runner._worker._client = EngineClient(engine)  # type: ignore[assignment]
    yield runner
    runner.stop()
    asyncio.run_coroutine_threadsafe(engine.close(), runner._loop).result(30)


def test_a_slow_group_does_not_hold_up_the_others(runner: VLMEnvRunner, tmp_path: Path) -> None:
    runner.sample(tasks=tasks(1, 1))  # environments and model are warm
    with ThreadPoolExecutor(4) as calls:  # as Ray's threads of the actor
        slow, *others = [calls.submit(runner.sample, tasks=[task]) for task in tasks(0, 4)]
        assert not wait(others, timeout=240).not_done and not slow.done()
        (tmp_path / "gate").touch()
        results = [future.result(120) for future in (slow, *others)]
    assert [[g.group_id for g in result.groups] for result in results] == [[f"{k:06d}"] for k in range(4)]
    assert all(not result.lost and len(result.groups[0]) == 2 for result in results)


def test_a_runner_has_room_for_its_share_of_the_groups_and_an_evaluation() -> None:
    assert VLMEnvRunner.concurrent_calls(run_of(0)) == 1
    assert VLMEnvRunner.concurrent_calls(run_of(2, prompts_per_iteration=16, num_env_runners=3)) == 11 + 1
    assert VLMEnvRunner.concurrent_calls(run_of(2, groups_per_runner=5)) == 5 + 1


# --- what many episodes were shown is sent and held once


def test_equal_images_travel_once(tiny_folder: Path) -> None:
    text, rng = text_side(tiny_folder), np.random.default_rng(0)
    pixels = [rng.integers(0, 256, (64, 64, 3), dtype=np.uint8) for _ in range(3)]

    def shown(number: int) -> EncodedImage:  # each environment draws its own
        return EncodedImage.from_pil(Image.fromarray(pixels[number]))

    groups = []
    for number in range(2):
        members = [
            conversation(text, rng, [shown(number), "Where?"], [3, 3], [[shown(2), "And now?"]], name=f"{number}:{k}")
            for k in range(4)
        ]
        groups.append(TrajectoryGroup(str(number), number, members))
    hashes = [[image.sha256 for image in one.images] for group in groups for one in group.trajectories]
    before = len(pickle.dumps(groups))
    share_images(groups)
    found = pickle.loads(pickle.dumps(groups))
    assert [[image.sha256 for image in one.images] for group in found for one in group.trajectories] == hashes
    assert len({id(image) for group in found for one in group.trajectories for image in one.images}) == 3
    each = len(shown(0).png)
    assert before - len(pickle.dumps(groups)) > 0.9 * (16 - 3) * each
