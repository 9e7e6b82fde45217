"""Full fine-tuning with parts of all kinds: after each update engine and learner agree, on Ray Serve and in vLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import gap, picture, request, text_side
from full_support import FullWeightsOf, ServedEngine, agreements
from policy_loop import Loop
from serving_support import served
from vllm_support import vllm_config

from rl_vlm.config import load_config
from rl_vlm.engines.base import BASE_MODEL, EngineError
from rl_vlm.models.trained import trained_folder
from rl_vlm.models.weights import FullPayload
from rl_vlm.monitoring.callbacks import Callback
from rl_vlm.runs.train import evaluate_run, opened_run, train
from rl_vlm.types import Completion

ROOT = Path(__file__).resolve().parents[2]
FULL: dict[str, Any] = {"model__train": "full", "learner__lr": 1e-3}
pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    ("engine", "updates"),
    [
        ("transformers", 3),
        pytest.param("transformers", 20, marks=pytest.mark.acceptance),
        pytest.param("vllm", 20, marks=pytest.mark.acceptance),
    ],
)
def test_replicas_agree_with_the_learner_after_each_update(
    engine: str, updates: int, tiny_folder: Path, wide_folder: Path, tmp_path: Path
) -> None:
    folder = tiny_folder if engine == "transformers" else wide_folder
    replicas = 2 if engine == "transformers" else 1
    with served(folder, serving__engine=engine, serving__num_replicas=replicas, **FULL) as (_, service):
        loop = Loop(folder, 0.8, ServedEngine(service), **FULL)
        found = agreements(loop, updates)
        loop.pool.close()
        kept = list(Path(service.folder).iterdir())
        assert len(kept) == 2  # the newest versions, in memory alone
    assert not kept[0].parent.exists()
    print(f"{engine}: largest difference {max(found):.1e} nats, per update", " ".join(f"{one:.1e}" for one in found))
    assert len(found) == updates and max(found) < 1e-4


@pytest.mark.acceptance
def test_a_run_of_two_learners_leaves_weights_that_are_evaluated(tiny_folder: Path, tmp_path: Path) -> None:
    """Two learners that add their gradients, checkpoint, weights, resume."""
    changes = [
        f"model.path={tiny_folder}", "algorithm.iterations=2", "evaluation.num_items=8", "rollout.prompts_per_iteration=4",
        "learner.num_learners=2", "learner.cpus_per_learner=0.1", "algorithm.minibatches=1", "sight.gate=warn",
        "algorithm.shuffle_rewards=true", "algorithm.entropy_coef=0.01",
    ]  # fmt: skip
    run = load_config(ROOT / "configs/full_tiny.yaml", changes)
    versions = dict[int, int]()

    class Files(Callback):
        def on_iteration(self, folder: Path, iteration: int, metrics: Mapping[str, float]) -> None:
            versions[iteration] = len(list(Path(running.algorithm.service.folder).iterdir()))

    with opened_run(run, str(tmp_path / "run"), callbacks=[Files()]) as running:
        result = running.execute()
    assert (result["status"], result["policy_version"]) == ("done", 2)
    assert versions == {1: 1, 2: 2}  # one learner alone puts them into the driver's memory
    weights = trained_folder(tmp_path / "run")
    assert weights is not None and weights.name == "weights"
    longer = load_config(ROOT / "configs/full_tiny.yaml", [*changes, "algorithm.iterations=3"])
    assert train(longer, str(tmp_path / "run"), resume=True)["iterations"] == 3
    evaluation = load_config(tmp_path / "run" / "config.yaml", ["serving.num_replicas=1"])
    found = evaluate_run(evaluation, run_dir=tmp_path / "run", out=tmp_path / "eval.json")
    assert found["adapter"] == str(tmp_path / "run" / "weights")
    assert json.loads((tmp_path / "eval.json").read_text())["lost"] == 0


@pytest.fixture(scope="module")
def vllm_folder(wide_folder: Path) -> Path:
    pytest.importorskip("vllm")
    return wide_folder


@pytest.fixture
def vllm_engine(vllm_folder: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    from rl_vlm.engines.vllm_engine import VLLMEngine

    made = VLLMEngine(vllm_folder, vllm_config(512, train="full"), getattr(request, "param", None))
    yield made
    asyncio.run(made.close())


@pytest.mark.acceptance
def test_vllm_finishes_samples_with_the_weights_that_they_began_with(vllm_engine: Any, vllm_folder: Path) -> None:
    weights, text, rng = FullWeightsOf(vllm_folder), text_side(vllm_folder), np.random.default_rng(0)
    image = picture(rng, 64, 32)
    asked = [
        request(text, [image, f"What is it? {k}"], name=f"r{k}", n=2, max_new_tokens=80, ignore_eos=True)
        for k in range(4)
    ]

    async def run() -> list[tuple[int, Completion]]:
        found = []
        for version in range(1, 6):
            running = [asyncio.create_task(vllm_engine.generate([one])) for one in asked]
            await asyncio.sleep(0.05)
            loading = asyncio.create_task(vllm_engine.load_adapter(weights.payload(version)))
            await asyncio.sleep(0.01)
            later = [asyncio.create_task(vllm_engine.generate([one])) for one in asked]
            await loading
            found += [(k, answer) for k, task in enumerate(running) for answer in await task]
            found += [(k, answer) for k, task in enumerate(later) for answer in await task]
        with pytest.raises(EngineError, match="base model"):
            await vllm_engine.generate([request(text, ["Hello"], min_version=BASE_MODEL)])
        return found

    answers = asyncio.run(run())
    assert {answer.policy_version for _, answer in answers} == set(range(6))
    for k, answer in answers:
        if version := answer.policy_version:
            assert gap(vllm_folder, weights.under(version), asked[k], answer) < 1e-4
            assert gap(vllm_folder, weights.under(version % 5 + 1), asked[k], answer) > 0.01


@pytest.mark.acceptance
@pytest.mark.parametrize("vllm_engine", ["recompute"], indirect=True)
def test_vllm_exchanges_the_weights_under_running_samples(vllm_engine: Any, vllm_folder: Path) -> None:
    weights, text = FullWeightsOf(vllm_folder), text_side(vllm_folder)
    asked = request(
        text, [picture(np.random.default_rng(0), 64, 32), "Go on."], n=4, max_new_tokens=200, ignore_eos=True
    )

    async def run() -> Completion:
        running = asyncio.create_task(vllm_engine.generate([asked]))
        for version in (1, 2, 3):
            wanted = vllm_engine.stats().generated_tokens + 120
            while vllm_engine.stats().generated_tokens < wanted:
                await asyncio.sleep(0.001)
            await vllm_engine.load_adapter(weights.payload(version))
        return (await running)[0]

    answer = asyncio.run(run())
    assert answer.policy_version == 0
    for sample in answer.samples:
        assert [version for _, version in sample.pieces] == [0, 1, 2, 3]
        ids = np.concatenate([answer.prompt_ids, sample.token_ids])
        start = 0
        for count, version in sample.pieces:
            if version:
                part = _logprobs(vllm_folder, weights.under(version), ids, asked, len(answer.prompt_ids) + start, count)
                assert np.abs(part - sample.logprobs[start : start + count]).max() < 1e-4
            start += count


def _logprobs(folder: Path, model: Any, ids: np.ndarray, asked: Any, first: int, count: int) -> np.ndarray:
    import torch
    from core_support import reference_logprobs

    with torch.no_grad():
        every = reference_logprobs(folder, model, ids, asked.images, asked.sampling.temperature)
    return every.numpy()[first - 1 : first - 1 + count]


@pytest.mark.acceptance
def test_vllm_answers_nothing_more_after_half_a_version(vllm_engine: Any, vllm_folder: Path) -> None:
    weights, text = FullWeightsOf(vllm_folder), text_side(vllm_folder)
    state = weights.payload(2).state()
    half = dict(sorted(state.items())[: len(state) // 2])

    async def run() -> None:
        await vllm_engine.load_adapter(weights.payload(1))
        assert not vllm_engine.dead
        with pytest.raises(EngineError, match="whole"):
            await vllm_engine.load_adapter(FullPayload.build(2, half, "tiny"))
        assert vllm_engine.dead and vllm_engine.version == 1
        with pytest.raises(EngineError, match="whole"):
            await vllm_engine.generate([request(text, ["Hello"])])

    asyncio.run(asyncio.wait_for(run(), 60))
