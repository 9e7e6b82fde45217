"""Guided choice: a sample is one of the texts, drawn from the model's distribution over what is still possible."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_support import reference_logits, request

from rl_vlm.engines.base import EngineError, encode_choices
from rl_vlm.engines.decoder import Decoder
from rl_vlm.models.loading import TextSide
from rl_vlm.models.qwen_vl import Backbone
from rl_vlm.types import Completion, GenerationRequest, StopReason

PREFIXES = ("red", "red square", "redder", "0", "1", "-1")


@pytest.fixture
def decoder(model: Any, text: TextSide) -> Decoder:
    suppressed = text.codec.suppressed_token_ids(text.vocab_size)
    return Decoder(Backbone(model, text.images, suppressed), text.codec, max_context=512)


def run(decoder: Decoder, *requests: GenerationRequest) -> list[Completion]:
    jobs = decoder.prepare(requests)
    for job in jobs:
        if isinstance(job, EngineError):
            raise job
    done = decoder.admit(jobs)  # type: ignore[arg-type]
    while decoder.num_rows:
        done += decoder.step()
    by_name = {job.request.request_id: decoder.completion(job) for job in done}
    return [by_name[asked.request_id] for asked in requests]


def ask(text: TextSide, choices: tuple[str, ...] = PREFIXES, name: str = "r", **more: Any) -> GenerationRequest:
    return request(text, ["Which?"], name=name, **{"max_new_tokens": 40, "choices": choices, **more})


def sequences(text: TextSide, choices: tuple[str, ...]) -> list[list[int]]:
    """Each choice as the ids that must be sampled, end-of-turn included."""
    return [[*text.codec.encode_text(choice).tolist(), text.codec.end_of_turn_id] for choice in choices]


def exact(
    folder: Path, model: Any, text: TextSide, prompt: np.ndarray, choices: tuple[str, ...], temperature: float
) -> dict[str, list[float]]:
    """Per choice the log-probability of each of its tokens among what is possible there, by transformers alone."""
    wanted = sequences(text, choices)
    found = {}
    for choice, ids in zip(choices, wanted, strict=True):
        with torch.no_grad():
            logits = reference_logits(folder, model, np.concatenate([prompt, np.array(ids, dtype=np.int32)]), [])
        logits = logits[len(prompt) - 1 : -1] / temperature
        logprobs = []
        for place, token in enumerate(ids):
            possible = sorted({other[place] for other in wanted if other[:place] == ids[:place]})
            distribution = torch.log_softmax(logits[place, possible], -1)
            logprobs.append(float(distribution[possible.index(token)]))
        found[choice] = logprobs
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_follow_the_models_distribution_over_the_choices(
    tiny_folder: Path, text: TextSide, model: Any, decoder: Decoder, temperature: float
) -> None:
    number = 3000
    (answer,) = run(decoder, ask(text, temperature=temperature, n=number, seeds=tuple(range(number))))
    expected = exact(tiny_folder, model, text, answer.prompt_ids, PREFIXES, temperature)
    counts = dict.fromkeys(PREFIXES, 0)
    for sample in answer.samples:
        choice = text.codec.decode(sample.token_ids)
        counts[choice] += 1
        assert sample.stop_reason is StopReason.END_OF_TURN
        assert sample.token_ids.tolist() == sequences(text, (choice,))[0]
        np.testing.assert_allclose(sample.logprobs, expected[choice], rtol=0, atol=5e-5)
    for choice, count in counts.items():
        probability = float(np.exp(sum(expected[choice])))
        assert abs(count / number - probability) < 5 * np.sqrt(probability * (1 - probability) / number) + 1e-9
    assert sum(float(np.exp(sum(logprobs))) for logprobs in expected.values()) == pytest.approx(1)


def test_greedy_takes_the_likelier_branch_at_every_step(
    tiny_folder: Path, text: TextSide, model: Any, decoder: Decoder
) -> None:
    (answer,) = run(decoder, ask(text, temperature=0.0))
    expected = exact(tiny_folder, model, text, answer.prompt_ids, PREFIXES, 1.0)
    chosen = text.codec.decode(answer.samples[0].token_ids)
    wanted = dict(zip(PREFIXES, sequences(text, PREFIXES), strict=True))
    for other in PREFIXES:
        pairs = zip(wanted[chosen], wanted[other], strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if other != chosen:
            assert expected[chosen][shared] > expected[other][shared]


def test_guided_and_free_rows_share_a_batch(text: TextSide, decoder: Decoder) -> None:
    free = request(text, ["Free."], name="free", max_new_tokens=12, n=3, seeds=(1, 2, 3))
    (alone,) = run(decoder, free)
    guided, together, other = run(
        decoder, ask(text, ("yes", "no"), "guided", n=4), free, ask(text, ("green",), "other", top_logprobs=3)
    )
    assert {text.codec.decode(sample.token_ids) for sample in guided.samples} <= {"yes", "no"}
    assert text.codec.decode(other.samples[0].token_ids) == "green"
    assert np.all(other.samples[0].logprobs == 0)  # nothing else was possible
    assert [len(alternatives) for alternatives in other.samples[0].top_logprobs] == [1] * len(
        other.samples[0].token_ids
    )
    for one, two in zip(alone.samples, together.samples, strict=True):
        assert one.token_ids.tolist() == two.token_ids.tolist()


def test_special_strings_and_unusual_texts_are_choices_like_others(text: TextSide, decoder: Decoder) -> None:
    choices = ("<|im_end|>", "<|image_pad|>", " two  spaces ", "ünïcödé 漢字 🙂", "a" * 20, "line\nbreak")
    (answer,) = run(decoder, ask(text, choices, n=200, max_new_tokens=120, temperature=3.0))
    drawn = {text.codec.decode(sample.token_ids) for sample in answer.samples}
    assert drawn <= set(choices) and len(drawn) >= 3
    suppressed = set(text.codec.suppressed_token_ids(text.vocab_size).tolist())
    assert all(suppressed.isdisjoint(sample.token_ids.tolist()) for sample in answer.samples)


REFUSED = {
    "max_new_tokens is 3": {"choices": ("a long choice", "b"), "max_new_tokens": 3},
    "would cut the choice": {"choices": ("yes, sir", "no"), "stop": (", s",)},
    "lone surrogates": {"choices": ("\ud800", "b")},
    "normalise": {"choices": ("e\u0301", "b")},
}


@pytest.mark.parametrize("message", REFUSED)
def test_choices_that_cannot_be_kept_are_refused(text: TextSide, decoder: Decoder, message: str) -> None:
    with pytest.raises(EngineError, match=f"Request r: .*{message}"):
        run(decoder, ask(text, **REFUSED[message]))  # type: ignore[arg-type]
    assert decoder.num_rows == 0


def test_choices_are_tokenised_as_the_policy_would_write_them(text: TextSide) -> None:
    asked = ask(text, ("<answer>red</answer>", "12"))
    for ids, choice in zip(
        encode_choices(asked, text.codec.encode_text, text.codec.decode), asked.sampling.choices, strict=True
    ):
        assert text.codec.decode(np.array(ids)) == choice
