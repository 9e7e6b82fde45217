"""The gate of sight: what an engine or a learner does wrong with images is found, by name, and nothing is found otherwise."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import picture, run_config
from policy_loop import MAX_CONTEXT, ROLLOUT, Loop
from real_shapes import build

from rl_vlm.algorithms.evaluation import HeldOutItems
from rl_vlm.algorithms.sight_probe import SightProbe
from rl_vlm.engines.decoder import Decoder
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.envs.base import StepResult, VisionEnv
from rl_vlm.envs.images import blank
from rl_vlm.evaluation.sight_faults import (
    EXACT,
    Fault,
    SightError,
    distance,
    engine_is_blind,
    explain,
    learner_is_blind,
    raise_or_warn,
)
from rl_vlm.learning.sight_check import sight_logprobs
from rl_vlm.learning.update import PolicyUpdater
from rl_vlm.models.loading import load_text_side
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.rollout.env_pool import EnvPool
from rl_vlm.rollout.episodes import run_group
from rl_vlm.rollout.tasks import RolloutResult, RolloutTask, View
from rl_vlm.types import (
    Completion,
    GenerationRequest,
    Observation,
    PixelLimits,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    TrajectoryStatus,
    Turn,
)
from rl_vlm.zoo.tiny.model import make_tiny


class TwoPictures(VisionEnv):
    """Two pictures of the same size and one answer."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        rng = np.random.default_rng([self.item(options)[1], 3])
        return Observation.user(picture(rng, 64, 64), picture(rng, 64, 64), "Which?"), {}

    def step(self, action: str) -> StepResult:
        return Observation(), float(len(action) % 2), True, False, {}


class InProcess:
    """What the probe needs of an algorithm, without Ray: a loop whose environment shows two pictures."""

    def __init__(self, folder: Path, engine: TransformersEngine | None = None, **dotted: Any) -> None:
        self.loop = Loop(folder, 1.0, engine, learner__lr=1e-2, sight__items=4, **dotted)
        self.run_config, self.learner_text = self.loop.run, self.loop.policy.text
        self.pool = EnvPool(TwoPictures, timeout_s=30.0, inline=True)
        self.items = HeldOutItems(self.run_config, {"": 100}, {}, self)  # type: ignore[arg-type]

    def probe(self) -> SightProbe:
        def logprobs(trajectories: Sequence[Trajectory], counterfactuals: bool) -> Any:
            return sight_logprobs(self.loop.updater.recompute, self.learner_text.images, trajectories, counterfactuals)

        def sample(view: View) -> list[Trajectory]:
            groups = self.items.sample(self.loop.version, 4, f"sight/{view}", view=view, temperature=1.0)
            return [group.trajectories[0] for group in groups]

        return SightProbe(self.run_config, logprobs, sample)

    def evaluate(self, tasks: Sequence[RolloutTask], timeout_s: float) -> tuple[list[TrajectoryGroup], RolloutResult]:
        async def gather() -> list[TrajectoryGroup]:
            runs = (
                run_group(task, self.pool, self.loop, self.loop.policy.text, ROLLOUT, MAX_CONTEXT) for task in tasks
            )
            return list(await asyncio.gather(*runs))

        return asyncio.run(gather()), RolloutResult()

    def learn(self, updates: int = 3) -> None:
        for _ in range(updates):
            self.loop.update(self.loop.sample(size=3))

    def faults(self) -> list[str]:
        probe = self.probe()
        found = [fault.name for fault in probe.gate()]
        assert probe.needed
        self.loop.close()
        return found


class Crossed(InProcess):
    """Hands on each sample with the images of its neighbour."""

    def evaluate(self, tasks: Sequence[RolloutTask], timeout_s: float) -> tuple[list[TrajectoryGroup], RolloutResult]:
        groups, result = super().evaluate(tasks, timeout_s)
        samples = [group.trajectories[0] for group in sorted(groups, key=lambda group: group.group_id)]
        for one, other in zip(samples[::2], samples[1::2], strict=True):
            one.images, other.images = other.images, one.images
        return groups, result


class BlindEngine(TransformersEngine):
    """Loses the pixels of every image."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        return await super().generate(
            [replace(one, images=tuple(blank(image.width, image.height) for image in one.images)) for one in requests]
        )


class SwappingEngine(TransformersEngine):
    """Exchanges the images of a prompt."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        return await super().generate([replace(one, images=one.images[::-1]) for one in requests])


class StaleEngine(TransformersEngine):
    """Gives every new version the weights of the first one."""

    first: AdapterPayload | None = None

    async def load_adapter(self, payload: AdapterPayload) -> None:
        self.first = self.first or payload
        await super().load_adapter(replace(self.first, version=payload.version))


@pytest.fixture(scope="module", params=["Qwen's form", "the generic path"])
def folder(request: pytest.FixtureRequest, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "Qwen's form":
        return tiny_folder
    return make_tiny(tmp_path_factory.mktemp("smol") / "model", variant="smol", steps=5)


def test_an_engine_and_a_learner_that_see_the_same_have_no_fault(folder: Path) -> None:
    parts = InProcess(folder)
    parts.learn()
    assert parts.faults() == []


@pytest.mark.parametrize(("engine", "fault"), [(BlindEngine, "engine_blind"), (SwappingEngine, "images_swapped")])
def test_an_engine_that_loses_pixels_or_swaps_images_is_found(folder: Path, engine: Any, fault: str) -> None:
    assert InProcess(folder, engine(folder, max_context=MAX_CONTEXT)).faults() == [fault]


def test_images_of_two_samples_that_are_swapped_are_found(folder: Path) -> None:
    assert Crossed(folder).faults() == ["images_swapped"]


@pytest.mark.parametrize("family", ["qwen3_vl", "internvl"])
def test_an_engine_that_puts_all_of_an_image_at_one_position_is_found(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_one_place(decoder: Decoder, *arguments: Any) -> Any:
        prepared = own(decoder, *arguments)
        image = prepared.prompt_ids == decoder._side.images.image_token_id
        prepared.positions[:] = (~(image & np.roll(image, 1))).cumsum() - 1
        return prepared

    own = Decoder._expanded
    monkeypatch.setattr(Decoder, "_expanded", at_one_place)
    assert InProcess(build(family, tmp_path / family)).faults() == ["positions"]


def test_an_engine_with_zeros_in_the_rows_of_positions_is_found(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_rows(*arguments: Any) -> Any:
        prepared = own(*arguments)
        prepared.positions[1:] = 0
        return prepared

    own = Decoder._expanded
    monkeypatch.setattr(Decoder, "_expanded", without_rows)
    assert InProcess(tiny_folder).faults() == ["positions"]


def test_an_engine_that_serves_a_stale_adapter_under_a_new_name_is_found_one_iteration_later(tiny_folder: Path) -> None:
    parts = InProcess(tiny_folder, StaleEngine(tiny_folder, max_context=MAX_CONTEXT))
    parts.learn(1)
    figures, faults = parts.probe().measure(parts.loop.sample(size=1), parts.loop.version, done=0)
    assert [fault.name for fault in faults] == ["stale_adapter"]
    assert figures["sight/gap"] > EXACT[0]
    parts.loop.close()


def test_a_learner_with_another_image_size_is_found(folder: Path, tmp_path: Path) -> None:
    parts = InProcess(folder)
    other = shutil.copytree(folder, tmp_path / "other")
    settings = json.loads((other / "processor_config.json").read_text())
    size = settings["image_processor"]["size"]
    size["longest_edge"] = size.get("shortest_edge", 32)  # of which Qwen counts pixels, SmolVLM those of a side
    (other / "processor_config.json").write_text(json.dumps(settings))
    learner = copy(parts.loop.policy)
    learner.text = load_text_side(other, PixelLimits())
    parts.loop.updater, parts.learner_text = PolicyUpdater(learner, parts.run_config), learner.text
    assert parts.faults() == ["image_size"]


def test_a_learner_without_pixels_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = InProcess(folder)
    backbone = parts.loop.policy.backbone
    own = backbone.image_features
    monkeypatch.setattr(
        backbone, "image_features", lambda images: own([blank(image.width, image.height) for image in images])
    )
    assert parts.faults()[0] == "learner_blind"


def test_figures_during_training_say_how_much_answers_depend_on_images(tiny_folder: Path) -> None:
    parts = InProcess(tiny_folder, sight__every=5)
    probe = parts.probe()
    groups = parts.loop.sample(size=2)
    figures, faults = probe.measure(groups, parts.loop.version, done=0)
    assert faults == [] and figures["sight/gap"] < EXACT[0]
    firsts = [group.trajectories[0] for group in groups]
    by_hand = sight_logprobs(parts.loop.updater.recompute, parts.loop.policy.text.images, firsts, False)
    ratio = np.concatenate(by_hand["blank"]) - np.concatenate(by_hand["true"])
    assert figures["sight/kl_blank"] == pytest.approx(np.mean(np.exp(ratio) - 1 - ratio), abs=1e-7)
    assert probe.measure(groups, parts.loop.version, done=7) == ({}, [])
    parts.loop.close()


def test_a_gate_that_is_off_measures_no_more_often_than_it_is_told(tiny_folder: Path) -> None:
    for gate, measured in (("off", [0, 5]), ("warn", [0, 1, 5])):
        parts = InProcess(tiny_folder, sight__every=5, sight__gate=gate)
        probe, groups, seen = parts.probe(), parts.loop.sample(size=1), []
        for done in range(6):
            seen += [done] if probe.measure(groups, parts.loop.version, done)[0] else []
        assert seen == measured
        parts.loop.close()


def test_no_hypothesis_is_blamed_for_rounding() -> None:
    assert explain({"true": 5e-5, "blank": 1e-7}, EXACT) is None
    assert explain({"true": 5e-4, "blank": 4e-4}, EXACT) is None
    found = explain({"true": 5e-3, "blank": 4e-3}, EXACT)
    assert found is not None and found.name == "disagreement"


def test_a_learner_that_computes_nan_disagrees_and_is_not_called_blind() -> None:
    nan = [np.array([np.nan, -1.0])]
    assert learner_is_blind(nan, nan) is None
    found = explain({"true": distance([np.zeros(2)], nan), "blank": distance([np.zeros(2)], nan)}, EXACT)
    assert found is not None and found.name == "disagreement"


def said(ids: list[int], logprobs: list[float]) -> Trajectory:
    """One turn behind a prompt of one token."""
    count = len(ids)
    return Trajectory(
        "t", np.array([1, *ids], dtype=np.int32), np.arange(count + 1) > 0, np.array([0, *logprobs], dtype=np.float32),
        (Turn(1, count + 1, 1, StopReason.END_OF_TURN),), TrajectoryStatus.COMPLETED,
    ).check()  # fmt: skip


# A policy that has converged: float32 knows its log-probabilities, of three tokens, to some 1e-7.
CONVERGED = [said([7, 4, 2], [-2.4e-7, -3.6e-6, 0.0]) for _ in range(8)]
CONVERGED_BLANK = [said([7, 4, 2], [-1.2e-7, -8.3e-6, 0.0]) for _ in range(8)]


def test_answers_that_are_sure_whatever_is_shown_cannot_tell_whether_it_is_seen() -> None:
    fault = engine_is_blind(CONVERGED, CONVERGED, CONVERGED_BLANK)
    assert fault is not None and fault.name == "too_sure"
    (sentence,) = raise_or_warn([fault], "error")
    assert "too_sure" in sentence
    true, blank = ([one.logprobs for one in group] for group in (CONVERGED, CONVERGED_BLANK))
    assert learner_is_blind(true, blank) is None and learner_is_blind(true, true) is None


def test_one_token_that_is_not_sure_tells() -> None:
    unsure = [said([7, 4, 2], [-1e-7, -0.4, 0.0])]
    moved = [said([7, 4, 2], [-1e-7, -0.401, 0.0])]
    found = engine_is_blind(CONVERGED + unsure, CONVERGED + unsure, CONVERGED_BLANK + unsure)
    assert found is not None and found.name == "engine_blind" and found.stops
    assert engine_is_blind(CONVERGED + unsure, CONVERGED + unsure, CONVERGED_BLANK + moved) is None
    true, blank, other = ([one.logprobs for one in CONVERGED + last] for last in (unsure, unsure, moved))
    found = learner_is_blind(true, blank)
    assert found is not None and found.name == "learner_blind"
    assert learner_is_blind(true, other) is None
    # Hundreds of sure tokens do not hide the one that changes.
    sure = [np.zeros(5000, dtype=np.float32)]
    assert learner_is_blind(true + sure, other + sure) is None


def test_a_picture_that_only_a_later_turn_has_tells() -> None:
    """As a tool's result: what comes before it is the same with blank pictures."""
    true, seen = said([7, 2, 5, 2], [-0.9, -0.4, -0.8, -0.1]), said([7, 2, 5, 2], [-0.9, -0.4, -0.6, -0.1])
    for one in (true, seen):
        one.turns = (Turn(1, 3, 1, StopReason.END_OF_TURN), Turn(3, 5, 1, StopReason.END_OF_TURN))
    assert engine_is_blind([true], [true], [seen]) is None
    assert engine_is_blind([true], [true], [true]) is not None


@pytest.mark.parametrize(("shown", "names"), [([False, True], []), ([True, True], ["learner_blind"])])
def test_what_comes_before_the_first_picture_makes_no_learner_blind(
    shown: list[bool], names: list[str], tiny_folder: Path
) -> None:
    one = replace(said([7, 2], [-0.9, 0.0]), images=(blank(32, 32),))
    figures = {"true": [one.logprobs[1:]], "blank": [one.logprobs[1:]], "shown": [np.array(shown)]}
    probe = SightProbe(run_config(tiny_folder), lambda *_: dict(figures), lambda _: [])
    _, faults = probe.measure([TrajectoryGroup("g", 0, [one])], version=1, done=0)
    assert [fault.name for fault in faults] == names


def test_faults_end_a_run_or_are_told() -> None:
    fault = Fault("positions", "Rows are missing.")
    assert raise_or_warn([fault], "warn") == ["Rows are missing. [sight: positions]"]
    assert raise_or_warn([], "error") == []
    with pytest.raises(SightError):
        raise_or_warn([fault], "error")


def test_rounding_that_parts_equal_requests_hides_nothing() -> None:
    """In bfloat16 a long answer to the same request soon says something else; its first tokens still tell."""
    true, again = [said([7, 4, 2], [-0.9, -0.40, -1.0])], [said([7, 5, 2], [-0.91, -1.2, -0.7])]
    seen, unseen = [said([7, 6, 2], [-1.6, -0.8, -1.0])], [said([7, 6, 2], [-0.92, -0.8, -1.0])]
    assert engine_is_blind(true, again, seen) is None
    found = engine_is_blind(true, again, unseen)
    assert found is not None and found.name == "engine_blind"
