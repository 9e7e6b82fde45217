"""What a GPU computes, on one that is pretended: no tensor is left on the other side, and the numbers are the CPU's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_support import conversation, picture, request, run_config, text_side
from full_support import FullWeightsOf
from label_support import random_pairs
from pretended_gpu import GPU, pretended_gpu

from rl_vlm.config import PolicyConfig, RewardModelSection, SACSection, SFTConfig
from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.labelling.labels import Label
from rl_vlm.learning.memory import recomputed_layers
from rl_vlm.learning.optimizer import make_optimizer, move_average
from rl_vlm.learning.plan import Scores, UpdateStats, divide, estimate_advantages, make_experience, update_batches
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.returns import ReturnScale
from rl_vlm.learning.sight_check import sight_logprobs
from rl_vlm.learning.strategies import Strategy
from rl_vlm.learning.update import PolicyUpdater
from rl_vlm.models.memory.reading import read_shape
from rl_vlm.models.weights import WeightPayload
from rl_vlm.preference.reward_examples import Examples
from rl_vlm.preference.reward_model import RewardEnsemble
from rl_vlm.preference.sac import Batch, SACUpdater
from rl_vlm.preference.sac_networks import SACNetworks
from rl_vlm.supervised.trainer import SFTTrainer
from rl_vlm.types import Completion, TrajectoryGroup

DEVICES = ("cpu", "cuda")


def device(name: str) -> Any:
    return pretended_gpu() if name == "cuda" else nullcontext()


# --- the pretended GPU itself


@pytest.fixture
def gpu() -> Iterator[None]:
    with pretended_gpu():
        yield


def test_a_tensor_of_the_cpu_may_not_meet_one_of_the_gpu(gpu: None) -> None:
    there = torch.ones(3, device="cuda")
    assert there.device == GPU and (there + 1).tolist() == [2, 2, 2] and float((there * torch.tensor(2.0)).sum()) == 6
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        torch.nn.functional.linear(torch.ones(2, 3), there[None])
    assert type((there + there.cpu().cuda()).cpu()) is torch.Tensor
    with pytest.raises(RuntimeError, match="numpy"):
        there.numpy()


# --- learners


def groups(folder: Path) -> list[TrajectoryGroup]:
    text, rng = text_side(folder), np.random.default_rng(0)
    made = []
    for k in range(2):
        prompt = [picture(rng, 64, 32), f"Question {k}?"]
        members = [
            conversation(text, rng, prompt, [6, 3 + n], [[picture(rng), "and now?"]], name=f"{k}:{n}") for n in range(3)
        ]
        made.append(TrajectoryGroup(str(k), k, members))
    return made


class Learned:
    """A policy, one scored update with every part that the configuration asks for, and what comes out."""

    def __init__(self, folder: Path, run: PolicyConfig, device: str) -> None:
        self.policy = PolicyModel(folder, run, device)
        generator = torch.Generator().manual_seed(1)
        if run.model.train == "lora":
            with torch.no_grad():
                for parameter in self.policy.parameters:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        if self.policy.critic is not None:
            self.policy.critic.last.weight.data.copy_(
                torch.randn(self.policy.critic.last.weight.shape, generator=generator)
            )
        self.updater = PolicyUpdater(self.policy, run)
        self.strategy = Strategy(self.policy, make_optimizer(self.policy, run))
        self.average = {name: tensor.detach().clone() for name, tensor in self.policy.trained.weights().items()}
        self.stats = UpdateStats()
        data, settings, rng = groups(folder), run.algorithm, np.random.default_rng(3)
        trajectories = [one for group in data for one in group.trajectories]
        self.logprobs = sight_logprobs(self.updater.recompute, self.policy.text.images, trajectories[:2])
        minibatches = divide(data, run, rng)
        scores = self.updater.score(minibatches[0])
        scale = ReturnScale()
        experience = make_experience(data, run, rng, Scores.merge([scores]), kl_coef=settings.kl_coef, scale=scale)
        (batch,) = update_batches(minibatches, estimate_advantages(experience, settings), scale, scored=True)
        for packed in self.updater.pack(batch):
            self.updater.step(self.strategy, packed, 1.0, self.stats)
            move_average(self.average, self.policy.trained.weights(), 0.9)
        self.payload = self.policy.payload(2)
        self.averaged = self.policy.payload(2, self.average)

    def restored(self) -> dict[str, torch.Tensor]:
        """The moments after they were saved and loaded."""
        moments = self.strategy.state()
        assert all(type(tensor) is torch.Tensor for tensor in moments.values())
        self.strategy.restore(moments)
        self.policy.load(self.payload)
        critic = self.policy.critic
        if critic is not None:
            assert all(type(tensor) is torch.Tensor for tensor in critic.state().values())
            critic.restore(critic.state())
        return self.strategy.state()


SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {},
    "checkpoint": {"learner__checkpoint": 1},
    "what fits": {"learner__gpus_per_learner": 1},
    "segments": {"learner__attention": "segments"},
    "dense": {"learner__attention": "dense"},
    "reference": {"algorithm__kl_coef": 0.1},
    "entropy": {"algorithm__entropy_coef": 0.01},
    "ppo": {"algorithm__name": "ppo"},
    "ppo, hidden": {"algorithm__name": "ppo", "critic__hidden": 8},
    "ppo, adapter": {"algorithm__name": "ppo", "critic__kind": "adapter"},
    "full": {"model__train": "full"},
    "full, reference": {"model__train": "full", "algorithm__kl_coef": 0.1},
    "full, checkpoint": {"model__train": "full", "learner__checkpoint": "all"},
    "bfloat16": {"model__dtype": "bfloat16"},
    "bfloat16, wide head": {"model__dtype": "bfloat16", "model__head_dtype": "float32"},
    "bfloat16, full": {"model__dtype": "bfloat16", "model__train": "full"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_learner_on_a_gpu_does_what_one_on_a_cpu_does(tiny_folder: Path, name: str) -> None:
    run = run_config(tiny_folder, learner__micro_batch_tokens=400, **SETTINGS[name])
    learned = {}
    for where in DEVICES:
        with device(where):
            learned[where] = one = Learned(tiny_folder, run, where)
            moments = one.restored()
            assert all(parameter.device.type == where for parameter in one.policy.model.parameters())
            assert moments and all(torch.isfinite(tensor.float()).all() for tensor in moments.values())
    cpu, there = learned["cpu"], learned["cuda"]
    # In bfloat16 the two take their roundings in different places.
    near = {"atol": 1e-5} if run.model.dtype == "float32" else {"atol": 0.15}
    for key, found in there.logprobs.items():
        for one, other in zip(found, cpu.logprobs[key], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, **near)
    assert there.stats["policy/grad_norm"] == pytest.approx(
        cpu.stats["policy/grad_norm"], rel=1e-3 if run.model.dtype == "float32" else 0.2
    )
    for here, other in ((cpu.payload, there.payload), (cpu.averaged, there.averaged)):
        # A step moves a weight by about 1e-3; Adam divides by a gradient's size, so rounding shows in single weights.
        check_close(here, other, 1e-5 if run.model.dtype == "float32" else 1e-3)


@pytest.mark.parametrize("size", [1, 80])
def test_a_learner_computes_the_layers_again_that_the_plan_says(
    tiny_folder: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_config(tiny_folder, learner__gpus_per_learner=1, learner__checkpoint="auto")
    with pretended_gpu():
        monkeypatch.setattr(torch.cuda.get_device_properties("cuda"), "total_memory", size << 30)
        layers = PolicyModel(tiny_folder, run, "cuda").model.model.language_model.layers
    count = recomputed_layers(run, read_shape(tiny_folder), size << 30)
    assert count == (len(layers) - 1 if size == 1 else 0)
    again = [layer.gradient_checkpointing and layer.training for layer in layers]
    assert again == [True] * count + [False] * (len(layers) - count)


def check_close(first: WeightPayload, second: WeightPayload, limit: float) -> None:
    ours, theirs = first.state(), second.state()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(
            tensor, theirs[name], rtol=0, atol=limit, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_supervised_steps_on_a_gpu_are_those_of_a_cpu(tiny_folder: Path, tmp_path: Path) -> None:
    found = {}
    for where in DEVICES:
        with device(where):
            job = SFTConfig.model_validate(
                {"model": {"path": str(tiny_folder)}, "sft": {"data": str(tmp_path / "x.jsonl")}}
            )
            policy = PolicyModel(tiny_folder, job, where)
            trainer = SFTTrainer(policy, job)
            batch = groups(tiny_folder)[0].trajectories
            before = trainer.evaluate([batch])
            steps = [trainer.step(batch, 1e-3) for _ in range(2)]
            trainer.restore(trainer.adapter(1), trainer.moments())
            found[where] = [before[0], *(loss for loss, *_ in steps), trainer.evaluate([batch])[0]]
    np.testing.assert_allclose(found["cuda"], found["cpu"], rtol=1e-4)


# --- engines


def answers(engine: TransformersEngine, folder: Path, load: Callable[[int], WeightPayload]) -> list[Completion]:
    """Greedy and sampled answers of the base model and of two versions, in batches that grow and shrink."""
    text, rng = text_side(folder), np.random.default_rng(0)
    pictures = [picture(rng), picture(rng, 64, 32)]
    requests = [
        request(
            text, [pictures[0], "What is it?"], name="one", n=2, max_new_tokens=9, ignore_eos=True, temperature=0.0
        ),
        request(text, ["No picture."], name="two", max_new_tokens=4, seeds=(7,), top_p=0.9, top_k=20, top_logprobs=3),
        request(text, [*pictures, "Compare."], name="three", max_new_tokens=12, ignore_eos=True, seeds=(3,)),
    ]
    base = [request(text, [pictures[0], "And this?"], name="base", min_version=BASE_MODEL, temperature=0.0)]

    async def run() -> list[Completion]:
        found = [*await engine.generate(requests)]
        for version in (1, 2):
            await engine.load_adapter(load(version))
            found += [*await engine.generate(requests), *await engine.generate(requests[2:])]
        found += await engine.generate(base)
        await engine.close()
        return found

    return asyncio.run(run())


ENGINES: dict[str, dict[str, Any]] = {
    "merged": {},
    "unmerged": {"dtype": "bfloat16"},
    "wide head": {"dtype": "bfloat16", "head_dtype": "float32"},
    "full": {"full": True},
    "full, bfloat16": {"full": True, "dtype": "bfloat16"},
    "recompute": {"in_flight": "recompute"},
}


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_on_a_gpu_answers_as_one_on_a_cpu(tiny_folder: Path, name: str) -> None:
    policy, whole = PolicyModel(tiny_folder, run_config(tiny_folder)), FullWeightsOf(tiny_folder)

    def load(version: int) -> WeightPayload:
        if ENGINES[name].get("full"):
            return whole.payload(version)
        generator = torch.Generator().manual_seed(version)
        return policy.payload(
            version,
            {key: 0.2 * torch.randn(one.shape, generator=generator) for key, one in policy.trained.weights().items()},
        )

    found = {}
    for where in DEVICES:
        with device(where):
            engine = TransformersEngine(tiny_folder, device=where, max_context=256, num_threads=None, **ENGINES[name])
            found[where] = answers(engine, tiny_folder, load)
    for here, there in zip(found["cpu"], found["cuda"], strict=True):
        assert here.policy_version == there.policy_version
        for one, other in zip(here.samples, there.samples, strict=True):
            if ENGINES[name].get("dtype") == "bfloat16":  # roundings differ, and with them a sampled token now and then
                assert np.isfinite(other.logprobs).all() and len(other.token_ids)
            else:
                assert one.token_ids.tolist() == other.token_ids.tolist()
                np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


# --- the preference loop


def test_sac_on_a_gpu_learns_what_it_learns_on_a_cpu() -> None:
    found: dict[str, list[Any]] = {}
    for where in DEVICES:
        with device(where):
            settings = SACSection(hidden=16, depth=2, batch_size=32, target_update_every=1, compile="off")
            networks = SACNetworks(5, 2, settings, seed=0).to(where)
            updater = SACUpdater(networks, settings, seed=3)
            rng = np.random.default_rng(0)
            rows = [rng.standard_normal(shape).astype(np.float32) for shape in ((32, 5), (32, 2), 32, (32, 5), 32)]
            for _ in range(3):
                updater.update(Batch(*(torch.from_numpy(row).to(where) for row in rows)))
            updater.reset_critics()
            updater.update(Batch(*(torch.from_numpy(row).to(where) for row in rows)))
            tensors = {name: tensor.cpu() for name, tensor in networks.state_dict().items()}
            found[where] = [updater.take_statistics(), tensors]
    for name, value in found["cpu"][0].items():
        assert found["cuda"][0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    for name, tensor in found["cpu"][1].items():
        torch.testing.assert_close(found["cuda"][1][name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["mlp", "cnn", pytest.param("resnet18", marks=pytest.mark.slow)])
def test_a_reward_model_on_a_gpu_learns_what_one_on_a_cpu_learns(kind: Any, tmp_path: Path) -> None:
    pairs = random_pairs(8, size=48)
    labels = [Label(k % 2) for k in range(8)]  # type: ignore[arg-type]
    found = {}
    for where in DEVICES:
        with device(where):
            settings = RewardModelSection(
                architecture=kind, size=2, channels=(4, 8, 8, 8), hidden=8, epochs=1, min_gradient_steps=2
            )
            ensemble = RewardEnsemble((5,) if kind == "mlp" else (48, 48, 3), settings, seed=1, device=where)
            examples = Examples(2)
            ensemble.add_pairs(examples, pairs, labels)
            ensemble.fit(examples)
            ensemble.save(tmp_path / where)
            ensemble.load(tmp_path / where)
            found[where] = ensemble.preferences(pairs)
    np.testing.assert_allclose(found["cuda"], found["cpu"], atol=1e-4)
