"""Settings of the learners' strategies, and micro-batches that count for nothing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_support import adapted_policy, batch_of, conversation, run_config, text_side, train_sample
from tables import table

from rl_vlm.config import parse_config
from rl_vlm.learning.plan import UpdateBatch, UpdateStats
from rl_vlm.learning.strategies import AllReduce, Strategy, gradient_vector
from rl_vlm.learning.update import make_optimizer, make_updater, padding_batch
from rl_vlm.types import UserInputError

TABLES = table("settings")


@pytest.mark.parametrize(("settings", "message"), TABLES["settings_that_contradict_each_other"])
def test_settings_that_contradict_each_other(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        parse_config({"learner": settings})


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_what_deepspeed_cannot_learn_is_refused(strategy: str) -> None:
    learner = {"strategy": strategy, "num_learners": 2}
    with pytest.raises(UserInputError, match=r"clips all gradients by one norm.*use fsdp2 or all_reduce"):
        parse_config({"learner": learner, "algorithm": {"name": "ppo"}})
    with pytest.raises(UserInputError, match=r"vision tower has some only where there are images"):
        parse_config(
            {
                "learner": learner,
                "model": {"lora": {"target_modules": "vision"}},
                "serving": {"engine": "transformers"},
            }
        )
    parse_config({"learner": {**learner, "strategy": "fsdp2"}, "algorithm": {"name": "ppo"}})


def test_padding_changes_neither_gradient_nor_figures(tiny_folder: Path) -> None:
    run = run_config(tiny_folder, algorithm__kl_coef=0.1, algorithm__entropy_coef=0.01)
    policy, text = adapted_policy(tiny_folder), text_side(tiny_folder)
    updater = make_updater(policy, run)
    rng = np.random.default_rng(0)
    sample = train_sample(conversation(text, rng, ["What now?"], [5]), 0.7, 0.2)

    def learned(padding: int) -> tuple[torch.Tensor, UpdateStats]:
        policy.model.zero_grad(set_to_none=True)
        (packed,) = updater.pack(batch_of([[sample]]))
        packed += [padding_batch(text.codec.end_of_turn_id) for _ in range(padding)]
        stats = UpdateStats()
        for micro in packed:
            if not micro.counts:
                micro.reference = updater.logprobs(micro)[0].detach()
            updater.loss(micro, stats if micro.counts else UpdateStats()).backward()
        return gradient_vector(policy.parameters), stats

    (plain, figures), (padded, same) = learned(0), learned(2)
    assert plain.abs().max() > 0 and torch.equal(plain, padded)
    assert figures == same


def test_scores_and_targets_leave_padding_out(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_vlm.learning import update

    run = run_config(tiny_folder, algorithm__name="ppo", learner__strategy="fsdp2", learner__num_learners=2)
    policy, text = adapted_policy(tiny_folder, algorithm__name="ppo"), text_side(tiny_folder)
    updater = make_updater(policy, run)
    monkeypatch.setattr(update, "missing_passes", lambda counts, device: [2 for _ in counts])
    trajectory = conversation(text, np.random.default_rng(0), ["What now?"], [5])
    scores = updater.score(batch_of([[train_sample(trajectory, 0.0, 0.2)]]).minibatches)
    assert set(scores.values) == {trajectory.trajectory_id}
    ones = {trajectory.trajectory_id: np.ones(5, dtype=np.float32)}
    (packed,) = updater.pack(UpdateBatch([], [True], ones, ones, [0.2]))
    assert len(packed) == 3
    strategy, stats = Strategy(), UpdateStats()
    strategy.prepare(policy, make_optimizer(policy, run))
    assert updater.step(strategy, packed, 1.0, stats) and stats.tokens == 5


def test_what_has_a_gradient_in_no_learner_stays_as_in_one_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vision tower in a step without images: neither momentum nor decay may move it, whatever the number of learners."""
    together, shared = threading.Barrier(2, timeout=300), [torch.zeros(0)] * 2

    def all_reduce(tensor: torch.Tensor) -> None:
        rank = int(threading.current_thread().name)
        shared[rank] = tensor.clone()
        together.wait()
        tensor.copy_(shared[0] + shared[1])
        together.wait()

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)

    def trained(strategy: Strategy, ranks: list[int]) -> dict[str, torch.Tensor]:
        """Three steps; the first learner has the decoder's gradient, the last one the tower's, which the second step lacks."""
        tower, decoder, unused = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
        optimizer = torch.optim.AdamW([tower, decoder, unused], lr=0.1, weight_decay=0.1)
        strategy.prepare(None, optimizer)  # type: ignore[arg-type]
        for step in range(3):
            if 0 in ranks:
                strategy.backward((decoder * torch.arange(1.0, 4.0)).sum())
            if 1 in ranks and step != 1:
                strategy.backward((tower * torch.arange(2.0, 5.0)).sum())
            before = tower.detach().clone()
            assert strategy.step(1.0) is not None
            assert torch.equal(tower, before) == (step == 1)
        assert torch.equal(unused, torch.ones(3))
        return {"tower": tower.detach(), "decoder": decoder.detach(), **strategy.state()}

    alone = trained(Strategy(), [0, 1])
    found: list[dict[str, torch.Tensor]] = [{}, {}]

    def learner(rank: int) -> None:
        found[rank] = trained(AllReduce(), [rank])

    threads = [threading.Thread(target=learner, args=(rank,), name=str(rank), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for several in found:
        assert several.keys() == alone.keys()
        assert all(torch.equal(several[name], tensor) for name, tensor in alone.items())
