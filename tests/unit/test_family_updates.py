"""One step of GRPO, PPO, SFT and full training changes a model of any family as plain autograd and torch's AdamW do."""

import copy
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_support import randomize
from peft import get_peft_model
from real_shapes import FAMILIES, build
from torch import Tensor
from transformers import AutoModelForImageTextToText

from rl_vlm.config import PolicyConfig, apply_overrides, load_sft_config, parse_config
from rl_vlm.learning.batching import Minibatch
from rl_vlm.learning.optimizer import make_optimizer
from rl_vlm.learning.plan import UpdateBatch, UpdateStats
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.strategies import Strategy
from rl_vlm.learning.update import PolicyUpdater
from rl_vlm.models.lora import load_lora_state, lora_state
from rl_vlm.supervised.trainer import SFTTrainer
from rl_vlm.types import Trajectory

pytestmark = pytest.mark.slow

IN_CI = ("internvl", "qwen3_5")
COMMON = {"learner.lr": 1e-3, "learner.max_grad_norm": 1e9}
# The answers are those of the model without its adapter.
RL = {"algorithm.mismatch": "none"}
KINDS: dict[str, dict[str, Any]] = {
    "grpo": {**RL, "model.lora.target_modules": "all"},
    "ppo": {**RL, "model.lora.target_modules": "all", "algorithm.name": "ppo"},
    "sft": {"model.lora.target_modules": "all"},
    "full": {"model.train": "full"},
}


@pytest.fixture(scope="module", params=[
    family if family in IN_CI else pytest.param(family, marks=pytest.mark.acceptance) for family in FAMILIES
])  # fmt: skip
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Engine, plain model and processor of a family, and in `groups` two answers to each of its conversations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        parity = importlib.import_module("parity")
    found = parity.Parity(build(request.param, tmp_path_factory.mktemp("family") / "model"), targets="all")
    found.asked = list(parity.conversations().values())
    sampling = {"max_new_tokens": 8, "n": 2, "seeds": (1, 2), "ignore_eos": True}
    found.groups = [found.answers(messages, str(number), **sampling) for number, messages in enumerate(found.asked)]
    return found


def advantage_of(one: Trajectory) -> float:
    return 1.0 if one.trajectory_id.endswith("0") else -0.5


def step_of_ours(bench: Any, kind: str) -> tuple[PolicyModel, dict[str, Tensor], Any]:
    """A policy after one step, and what was trained of it and its critic's head before."""
    changes = {**COMMON, **KINDS[kind]}
    folder = Path(bench.run_config.model.path)
    if kind == "sft":
        job = load_sft_config(None, [f"{name}={value}" for name, value in changes.items()])
        policy = PolicyModel(folder, job)
    else:
        config = parse_config(apply_overrides({"model": {"path": str(folder)}}, changes))
        assert isinstance(config, PolicyConfig)
        policy = PolicyModel(folder, config)
    if policy.lora is not None:
        randomize(policy, 1, 0.1)
    head = None
    if policy.critic is not None:  # whose last layer starts at zero
        torch.nn.init.normal_(policy.critic.last.weight, std=0.3)
        head = copy.deepcopy(policy.critic.head)
    before = {name: tensor.clone() for name, tensor in policy.trained.weights().items()}
    samples = [one for group in bench.groups for one in group]
    if kind == "sft":
        SFTTrainer(policy, job).step(samples, job.learner.lr)
        return policy, before, head
    tokens = sum(one.num_sampled for one in samples)
    weights = {one.trajectory_id: 1 / tokens for one in samples}
    each = {one.trajectory_id: np.full(one.num_sampled, advantage_of(one), dtype=np.float32) for one in samples}
    batch = UpdateBatch([Minibatch(bench.groups, weights)], [True], each, each if policy.critic else {}, [1 / tokens])
    updater, strategy = PolicyUpdater(policy, config), Strategy(policy, make_optimizer(policy, config))
    (packed,) = updater.pack(batch)
    assert updater.step(strategy, packed, config.learner.max_grad_norm, UpdateStats())
    return policy, before, head


def step_by_autograd(
    bench: Any, kind: str, policy: PolicyModel, before: dict[str, Tensor], head: Any
) -> dict[str, Tensor]:
    """What is trained after the same step of the plain model; at the first step the ratio's gradient is log p's."""
    folder = bench.run_config.model.path
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    if policy.lora is None:
        own = model
    else:
        own = get_peft_model(model, policy.lora)
        load_lora_state(model, before)
    trained = [parameter for parameter in own.parameters() if parameter.requires_grad]
    hidden: list[Tensor] = []
    if head is not None:
        trained += head.parameters()
        model.lm_head.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    learner = load_sft_config(None, []).learner
    optimizer = torch.optim.AdamW(
        trained, lr=1e-3, betas=learner.betas, weight_decay=learner.weight_decay, foreach=False
    )
    bias = torch.zeros(()) if kind == "sft" else bench.policy.backbone.token_bias
    tokens = sum(one.num_sampled for group in bench.groups for one in group)
    for messages, group in zip(bench.asked, bench.groups, strict=True):
        for one in group:
            said = one.token_ids[one.loss_mask]
            logprobs = (bench.plain_logits(own, messages, said) + bias).log_softmax(-1)
            chosen = logprobs.gather(1, torch.from_numpy(said.astype(np.int64))[:, None])
            loss = -(1.0 if kind == "sft" else advantage_of(one)) * chosen.sum() / tokens
            if head is not None and policy.critic is not None:
                values = head(hidden[-1][0, -len(said) - 1 : -1])
                loss = loss + policy.critic.loss_coef * 0.5 * ((values - advantage_of(one)) ** 2).sum() / tokens
            loss.backward()
    optimizer.step()
    return lora_state(model) if policy.lora else dict(model.named_parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_plain_autograd(bench: Any, kind: str) -> None:
    policy, before, head = step_of_ours(bench, kind)
    expected, found = step_by_autograd(bench, kind, policy, before, head), policy.trained.weights()
    assert found.keys() == expected.keys()
    gaps = torch.cat([(found[name] - expected[name]).detach().flatten() for name in found])
    moved = torch.cat([(found[name] - before[name]).flatten() for name in found])
    # Adam's first step makes a step of full length of any gradient: of one that is rounding alone, too.
    close = gaps.abs() <= 1e-5
    assert float((~close).float().mean()) < 1e-3 and float(gaps[close].norm() / moved.norm()) < 5e-3
    assert float(moved.abs().max()) > 5e-4
    if head is not None and policy.critic is not None:
        torch.testing.assert_close(policy.critic.last.weight, head[-1].weight, rtol=0, atol=1e-5)
