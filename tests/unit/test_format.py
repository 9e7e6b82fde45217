"""`rollout.format`: the policy keeps to a grammar, and the learner computes with what the grammar allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import torch
from core_support import batch_of, gradient_vector, randomize, reference_logits, run_config, train_sample
from policy_loop import Loop

from rl_vlm.config.loading import load_config
from rl_vlm.engines.grammars import allowed_tokens, format_matcher
from rl_vlm.learning.plan import UpdateStats
from rl_vlm.models.images import TextSide
from rl_vlm.runs.policy_checks import inspect_policy_run
from rl_vlm.types import StopReason, Trajectory, TrajectoryError, UserInputError

PATTERN = r"-?(0|[1-9][0-9]{0,9})(\.[0-9]{1,2})?"
TEMPERATURE = 0.7


@pytest.fixture
def loop(tiny_folder: Path) -> Any:
    changes = {"learner__attention": "dense", "algorithm__kl_coef": 0.1, "algorithm__entropy_coef": 0.1}
    loop = Loop(tiny_folder, TEMPERATURE, rollout__format={"regex": PATTERN}, learner__lr=1e-2, **changes)
    yield loop
    loop.close()


def dense(loop: Loop, one: Trajectory) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies by transformers' own forward pass and a softmax over the tokens that another
    library's partial matches allow."""
    codec, size = loop.policy.text.codec, loop.policy.text.vocab_size
    never = set(codec.suppressed_token_ids(size).tolist())
    texts = [codec.decode(np.array([token])) for token in range(size)]
    logits = reference_logits(loop.folder, loop.policy.model, one.token_ids, one.images) / TEMPERATURE
    found = []
    for turn in one.turns:
        said = ""
        for place in range(turn.start, turn.stop):
            ids = [
                token for token in range(size)
                if token not in never and token != codec.end_of_turn_id and texts[token]
                and regex.fullmatch(PATTERN, said + texts[token], partial=True)
            ] + [codec.end_of_turn_id] * bool(regex.fullmatch(PATTERN, said))  # fmt: skip
            token = int(one.token_ids[place])
            chosen = torch.distributions.Categorical(logits=logits[place - 1, ids])
            found.append(torch.stack([chosen.log_prob(torch.tensor(ids.index(token))), chosen.entropy()]))
            said += texts[token]
    logprobs, entropies = torch.stack(found, 1)
    return logprobs, entropies


def test_learner_and_engine_compute_what_a_dense_softmax_over_the_allowed_tokens_gives(loop: Loop) -> None:
    """Three turns with images, some cut off in the middle of a number, in packed rows: values, entropies, gradients."""
    loop.update(loop.sample())  # the adapter is another policy than the model
    ones = [one for group in loop.sample() for one in group.trajectories]
    reasons = {turn.stop_reason for one in ones for turn in one.turns}
    assert reasons == {StopReason.END_OF_TURN, StopReason.LENGTH}
    samples = [[train_sample(one, 1.0, 1.0) for one in ones[start : start + 4]] for start in (0, 4)]
    (packed,) = loop.updater.pack(batch_of(samples))
    rng, ours, theirs = np.random.default_rng(0), torch.zeros(()), torch.zeros(())
    by_id = {one.trajectory_id: one for one in ones}
    for micro in packed:
        logprobs, entropies, *_ = loop.updater.logprobs(micro, "gradient")
        assert entropies is not None and np.abs(logprobs.detach().numpy() - micro.behaviour).max() < 1e-4
        expected = [
            torch.cat(both) for both in zip(*(dense(loop, by_id[name]) for name, _ in micro.parts), strict=True)
        ]
        for found, wanted in zip((logprobs, entropies), expected, strict=True):
            assert torch.allclose(found, wanted, rtol=0, atol=1e-4)
            mixture = torch.from_numpy(rng.normal(size=len(found)).astype(np.float32))
            ours, theirs = ours + (found * mixture).sum(), theirs + (wanted * mixture).sum()
    slopes = []
    for total in (ours, theirs):
        loop.policy.model.zero_grad(set_to_none=True)
        total.backward()
        slopes.append(gradient_vector(loop.policy.parameters))
    assert slopes[1].abs().max() > 0.1
    assert torch.allclose(*slopes, rtol=1e-3, atol=1e-3 * float(slopes[1].abs().max()))


def test_ratios_are_one_before_the_first_step_and_the_reference_has_the_same_support(loop: Loop) -> None:
    stats = loop.update(loop.sample())
    assert (stats["policy/first_ratio_error"], stats["policy/skipped_steps"]) == (0.0, 0.0)
    assert abs(stats.metrics()["mismatch/kl"]) < 1e-6
    randomize(loop.policy, 1)
    packed = loop.updater.pack(loop.batch(loop.sample()))
    first = UpdateStats()
    for micro in packed[0]:
        loop.updater.loss(micro, first)
    assert first["policy/ratio_max"] == 1.0 and np.isfinite(first["policy/kl"]) and first["policy/kl"] > 0
    forced = [micro for micro in packed[0] if micro.reference is not None and (micro.old == 0).any()]
    for micro in forced:  # a token that is the only one allowed is certain for both
        assert micro.reference is not None and not micro.reference[micro.old == 0].any()


def test_a_mask_is_kept_once_however_many_tokens_have_it(text: TextSide) -> None:
    matcher = format_matcher(text, run_config(Path("m"), rollout__format={"choice": ["aa", 'a"b']}).rollout.grammar)
    assert matcher is not None
    turn = np.append(text.codec.encode_text("aa"), text.codec.end_of_turn_id)
    masks, places = allowed_tokens(matcher, [turn, turn[:-1], turn])
    assert len(places) == 3 * len(turn) - 1 and len(masks) <= len(turn)
    with pytest.raises(TrajectoryError, match="breaks rollout.format"):
        allowed_tokens(matcher, [text.codec.encode_text("b")])


@pytest.mark.parametrize(
    ("form", "why"),
    [({"regex": "("}, "rollout.format: .*regex"), ({"json": {"type": "colour"}}, "rollout.format: .*colour"),
     ({"grammar": "start: x"}, "rollout.format: "), ({}, "rollout.format takes one of"),
     ({"choice": []}, "takes one of"), ({"choice": [1]}, "takes one of"), ({"json": "{}"}, "takes one of"),
     ({"regex": "a", "json": {}}, "takes one of"), ({"regx": "a"}, "takes one of")],
)  # fmt: skip
def test_a_format_that_no_answer_could_have_is_refused_before_anything_starts(
    form: Any, why: str, tiny_folder: Path
) -> None:
    with pytest.raises(UserInputError, match=why) as error:
        inspect_policy_run(run_config(tiny_folder, rollout__format=form))
    assert "\n" not in str(error.value)


def test_a_turn_in_pieces_cannot_keep_to_a_format() -> None:
    changes = ["rollout.format.regex=a", "rollout.max_policy_lag=1", "rollout.partial_tokens=8"]
    with pytest.raises(UserInputError, match="rollout.partial_tokens would begin rollout.format anew"):
        load_config(None, changes)
