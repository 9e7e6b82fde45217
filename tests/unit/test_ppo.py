"""The critic beside the policy: what each loss trains, two-step updates, and going on from a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from core_support import conversation, gradient_vector, picture, plan_update, randomize, run_config, text_side
from tables import table

from rl_vlm.algorithms.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from rl_vlm.algorithms.ppo import PPO
from rl_vlm.config import PolicyConfig, parse_config
from rl_vlm.learning.experience import flat
from rl_vlm.learning.learner import VLMLearner
from rl_vlm.learning.optimizer import make_optimizer, move_average
from rl_vlm.learning.plan import (
    Scores,
    UpdateBatch,
    UpdateStats,
    divide,
    estimate_advantages,
    make_experience,
    update_batches,
)
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.returns import ReturnScale
from rl_vlm.learning.strategies import Strategy
from rl_vlm.learning.update import PolicyUpdater
from rl_vlm.types import TrajectoryGroup

KINDS = ["head", "adapter"]


def ppo_run(folder: Path, **dotted: Any) -> PolicyConfig:
    return run_config(folder, algorithm__name="ppo", learner__micro_batch_tokens=300, **dotted)


def make_groups(folder: Path, count: int = 4, seed: int = 0) -> list[TrajectoryGroup]:
    text, rng = text_side(folder), np.random.default_rng(seed)
    groups = []
    for k in range(count):
        prompt = [picture(rng, 64, 32), f"Question {k}?"]
        members = [
            conversation(
                text,
                rng,
                prompt,
                [int(rng.integers(1, 9)), int(rng.integers(1, 5))],
                [["more"]],
                name=f"{seed}.{k}:{n}",
            )
            for n in range(3)
        ]
        groups.append(TrajectoryGroup(f"{seed}.{k}", k, members))
    return groups


class Half:
    """One learner's two-step update without RLlib."""

    def __init__(self, run: PolicyConfig, folder: Path) -> None:
        self.run, self.policy = run, PolicyModel(folder, run)
        self.updater = PolicyUpdater(self.policy, run)
        self.optimizer = make_optimizer(self.policy, run)
        self.strategy = Strategy(self.policy, self.optimizer)
        self.scale = ReturnScale()
        self.average = {name: tensor.detach().clone() for name, tensor in self.policy.trained.weights().items()}

    def score(self, groups: list[TrajectoryGroup], learners: int = 1) -> list[UpdateBatch]:
        """Each learner's share of the update; the scale moves on."""
        settings, rng = self.run.algorithm, np.random.default_rng(3)
        shared = self.run.learner.model_copy(update={"num_learners": learners})
        self.shares = divide(groups, self.run.model_copy(update={"learner": shared}), rng)
        scores = Scores.merge([self.updater.score(share) for share in self.shares])
        experience = make_experience(groups, self.run, rng, scores, kl_coef=settings.kl_coef, scale=self.scale)
        estimate = estimate_advantages(experience, settings)
        before = self.scale
        self.scale = before.observe(flat(estimate.returns))
        rescaling = before.rescaling_to(self.scale)
        return update_batches(self.shares, estimate, self.scale, scored=True, rescaling=rescaling)

    def packed(self, groups: list[TrajectoryGroup]) -> list[Any]:
        """The scored micro-batches of each step."""
        return self.updater.pack(self.score(groups)[0])

    def train(self, *updates: list[TrajectoryGroup], learn_policy: bool = True) -> UpdateStats:
        """The statistics of the last update."""
        for groups in updates:
            stats = UpdateStats()
            for micro_batches in self.packed(groups):
                self.updater.step(self.strategy, micro_batches, 1.0, stats, learn_policy)
                move_average(self.average, self.policy.trained.weights(), 0.9)
        return stats

    @property
    def learner(self) -> Any:
        """What `VLMLearner`'s own methods need of it."""
        return SimpleNamespace(_strategy=self.strategy, policy=self.policy, _average=self.average)

    def gradients(self, packed: list[Any], learn_policy: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Policy's and critic's, of all minibatches."""
        self.policy.model.zero_grad(set_to_none=True)
        assert self.policy.critic is not None
        self.policy.critic.head.zero_grad(set_to_none=True)
        adding: Any = SimpleNamespace(backward=lambda loss: loss.backward(), step=lambda norm, groups: None)
        for micro_batches in packed:
            self.updater.step(adding, micro_batches, 1.0, UpdateStats(), learn_policy)
        return gradient_vector(self.policy.parameters), gradient_vector(self.policy.critic.parameters)


def bytes_of(half: Half) -> bytes:
    weights, moments, extras, _ = VLMLearner.snapshot(half.learner, 1)
    tensors = [tensor for _, tensor in sorted((moments | extras).items())]
    return b"".join([bytes(weights.tensors), *(tensor.detach().numpy().tobytes() for tensor in tensors)])


def disturb_head(half: Half) -> None:
    """A head that is not zero, so that values differ and gradients reach the critic's LoRA."""
    assert half.policy.critic is not None
    torch.manual_seed(5)
    torch.nn.init.normal_(half.policy.critic.last.weight, std=0.3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_critic_does_not_change_the_policys_log_probabilities(tiny_folder: Path, kind: str) -> None:
    run = ppo_run(tiny_folder, critic__kind=kind)
    half, plain = Half(run, tiny_folder), PolicyModel(tiny_folder, run_config(tiny_folder))
    assert (
        half.policy.payload(1).tensors == plain.payload(1).tensors
    )  # the same first adapter, and nothing of the critic
    randomize(half.policy, 1)
    randomize(plain, 1)
    if kind == "adapter":
        assert half.policy.critic is not None
        with torch.no_grad():
            for parameter in half.policy.critic.parameters:
                parameter.normal_(0, 0.5)
    groups = make_groups(tiny_folder)
    (minibatches,) = divide(groups, run, np.random.default_rng(0))
    scores = half.updater.score(minibatches)
    theirs = PolicyUpdater(plain, run_config(tiny_folder, learner__micro_batch_tokens=300))
    for micro in (micro for step in half.packed(groups) for micro in step):
        assert micro.old is not None and torch.equal(micro.old, theirs.logprobs(micro)[0])
    values = np.concatenate(list(scores.values.values()))
    assert len(values) == sum(t.num_sampled for g in groups for t in g.trajectories)
    assert bool(values.any()) == (kind == "adapter")  # a head that was not touched says zero


def test_each_loss_trains_its_own_part(tiny_folder: Path) -> None:
    groups = make_groups(tiny_folder)
    for kind in KINDS:
        half = Half(ppo_run(tiny_folder, critic__kind=kind), tiny_folder)
        plain = Half(ppo_run(tiny_folder, critic__kind=kind, critic__loss_coef=1e-9), tiny_folder)
        for each in (half, plain):
            randomize(each.policy, 1)
            disturb_head(each)
        found, critic = half.gradients(half.packed(groups))
        without, _ = plain.gradients(plain.packed(groups))
        assert torch.allclose(found, without, rtol=1e-4, atol=1e-6) == (kind == "adapter")
        assert critic.abs().sum() > 0
        # In the warm-up the critic learns alone.
        policy, critic = half.gradients(half.packed(groups), learn_policy=False)
        assert not policy.any() and critic.abs().sum() > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["token", "turn"])
def test_the_number_of_learners_does_not_change_the_gradient(tiny_folder: Path, kind: str, level: str) -> None:
    groups = make_groups(tiny_folder, 5)
    found = []
    for learners in (1, 2, 3):
        half = Half(ppo_run(tiny_folder, critic__kind=kind, algorithm__gae_level=level), tiny_folder)
        randomize(half.policy, 1)
        disturb_head(half)
        sums = []
        for number, batch in enumerate(half.score(groups, learners)):
            half.updater.score(
                half.shares[number]
            )  # one model plays all learners: it keeps the last share, and is rescaled once
            sums.append(half.gradients(half.updater.pack(replace(batch, rescaling=None) if number else batch)))
        found.append(torch.cat([sum(policy for policy, _ in sums), sum(critic for _, critic in sums)]))  # type: ignore[list-item]
    assert found[0].abs().max() > 1e-3
    for other in found[1:]:
        assert torch.allclose(other, found[0], rtol=1e-3, atol=1e-5)


def test_a_two_step_update_without_a_critic_equals_the_one_step(tiny_folder: Path) -> None:
    """The same gradient, though trajectories are packed before their advantages are known."""
    groups = make_groups(tiny_folder)
    run = run_config(tiny_folder, learner__micro_batch_tokens=300, algorithm__entropy_coef=1e-9)
    half = PolicyModel(tiny_folder, run)
    randomize(half, 1)
    updater = PolicyUpdater(half, run)
    batches = plan_update(groups, run.algorithm, np.random.default_rng(0)).batches
    found = []
    for scored in (True, False):
        if scored:
            updater.score(batches[0].minibatches)
        half.model.zero_grad(set_to_none=True)
        for micro_batches in updater.pack(replace(batches[0], minibatches=[]) if scored else batches[0]):
            for micro in micro_batches:
                updater.loss(micro, UpdateStats()).backward()
        found.append(gradient_vector(half.parameters))
    assert found[0].abs().max() > 1e-3 and torch.equal(*found)


@pytest.mark.parametrize("kind", KINDS)
def test_values_keep_their_meaning_when_the_scale_changes(tiny_folder: Path, kind: str) -> None:
    half = Half(ppo_run(tiny_folder, critic__kind=kind), tiny_folder)
    disturb_head(half)
    groups = make_groups(tiny_folder)
    (minibatches,) = divide(groups, half.run, np.random.default_rng(0))

    def returns() -> np.ndarray:
        values = half.updater.score(minibatches).values
        return np.concatenate([values[name] for name in sorted(values)]) * half.scale.std + half.scale.mean

    earlier = half.scale = ReturnScale().observe(np.array([5.0, 7.0]))
    before = returns()
    half.packed(groups)  # moves the scale and rescales the head
    assert half.scale != earlier
    np.testing.assert_allclose(returns(), before, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("", "adamw"),
        ("adapter", "adamw"),
        pytest.param("head", "adamw", marks=pytest.mark.slow),
        pytest.param("adapter", "adafactor", marks=pytest.mark.slow),
    ],
)
def test_two_and_two_updates_equal_four_byte_for_byte(
    tiny_folder: Path, tmp_path: Path, kind: str, optimizer: str
) -> None:
    changes = {"learner__lr": 1e-2, "learner__optimizer": optimizer, "algorithm__minibatches": 2}
    run = ppo_run(tiny_folder, critic__kind=kind, **changes) if kind else run_config(tiny_folder, **changes)
    batches = [make_groups(tiny_folder, seed=k) for k in range(4)]
    whole, first, second, forgetful = (Half(run, tiny_folder) for _ in range(4))
    whole.train(*batches)
    first.train(*batches[:2])
    weights, moments, extras, random = VLMLearner.snapshot(first.learner, 1)
    write_checkpoint(tmp_path, Checkpoint(weights, moments, {}, extras))
    saved = read_checkpoint(tmp_path)
    for half, kept in ((second, saved.moments), (forgetful, {})):
        VLMLearner.restore(half.learner, saved.adapter, kept, saved.extras, random)
        half.scale = first.scale
    assert bytes_of(second) == bytes_of(first) != bytes_of(forgetful)
    for half in (second, forgetful):
        half.train(*batches[2:])
    assert bytes_of(second) == bytes_of(whole)
    assert forgetful.policy.payload(4).tensors != whole.policy.payload(4).tensors  # the moments matter


@pytest.mark.parametrize(("settings", "message"), table("refused_settings")["ppo"])
def test_contradictions_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        parse_config(settings)


@pytest.mark.parametrize(("target", "coefficient"), [(None, 0.5), (0.02, 0.01)])
def test_a_resume_keeps_an_adapted_kl_coefficient_and_takes_a_new_fixed_one(
    target: float | None, coefficient: float
) -> None:
    algorithm = PPO.__new__(PPO)
    algorithm.rng = np.random.default_rng(0)
    algorithm.run_config = parse_config({"algorithm": {"kl_in": "reward", "kl_coef": 0.5, "kl_target": target}})
    algorithm.kl_coef = 0.5
    scale = {"mean_sum": 0.0, "square_sum": 0.0, "weight": 0.0}
    before = np.random.default_rng(1)
    algorithm.set_state({"updates": 3, "rng": before.bit_generator.state, "kl_coef": 0.01, "return_scale": scale})
    assert algorithm.kl_coef == coefficient
    assert algorithm.rng.random() == before.random()  # a resumed run goes on with the same draws


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_are_computed_again_have_the_same_gradients(tiny_folder: Path, kind: str) -> None:
    """Bit for bit, with the adapter of the loss that is on its way back: of the layers of auto, none, the first, all."""
    groups, found, passes = make_groups(tiny_folder), [], []
    for checkpoint in ("auto", "none", 1, "all"):
        half = Half(ppo_run(tiny_folder, critic__kind=kind, learner__checkpoint=checkpoint), tiny_folder)
        layers = half.policy.model.model.language_model.layers
        made = [0] * len(layers)

        def count(layer: Any, _: Any, made: list[int] = made) -> None:
            made[layer.layer_idx] += 1

        for layer in layers:
            layer.self_attn.register_forward_pre_hook(count)
        randomize(half.policy, 1)
        disturb_head(half)
        found.append(torch.cat(half.gradients(half.packed(groups))))
        passes.append(made)
    once, again = passes[0], passes[-1]
    assert len(once) > 1 and all(0 < one < other for one, other in zip(once, again, strict=True))
    assert passes[1:3] == [once, [again[0], *once[1:]]]
    assert found[0].abs().max() > 1e-3 and all(torch.equal(one, found[0]) for one in found)


def test_ratios_are_probed_before_the_first_step_with_a_critic_too(tiny_folder: Path) -> None:
    half = Half(ppo_run(tiny_folder), tiny_folder)
    randomize(half.policy, 1)
    micro = half.packed(make_groups(tiny_folder))[0][0]
    micro.probe = micro.probe + 0.1
    stats = UpdateStats()
    half.updater.loss(micro, stats)
    assert stats["policy/first_ratio_error"] == pytest.approx(1 - np.exp(-0.1), rel=1e-3)
    half.updater.loss(micro, again := UpdateStats())  # after a step it may differ
    assert again["policy/first_ratio_error"] == 0
