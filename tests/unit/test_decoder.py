"""Batched decoding: equal to transformers' own generation and forward pass, whatever else is in the batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_support import (
    adapted_policy,
    gap,
    picture,
    pictures,
    plain_model,
    processor,
    reference_logits,
    request,
    text_side,
)
from peft import PeftModel
from transformers import Qwen3VLForConditionalGeneration

from rl_vlm.engines.decoder import Decoder
from rl_vlm.models.families.qwen_fast import QwenBackbone
from rl_vlm.models.images import TextSide
from rl_vlm.types import Completion, EncodedImage, GenerationRequest, RLVLMError, StopReason

Parts = list[str | EncodedImage]


@pytest.fixture
def endless(model: Any, text: TextSide) -> Iterator[QwenBackbone]:
    """A backbone that never ends a turn, so that lengths are what the test says."""
    backbone = backbone_of(model, text)
    backbone.token_bias[text.codec.end_of_turn_id] = float("-inf")
    yield backbone


def backbone_of(model: Any, text: TextSide) -> QwenBackbone:
    return QwenBackbone(model, text.images, text.codec.suppressed_token_ids(text.vocab_size))


def decoder_of(backbone: QwenBackbone, text: TextSide, max_context: int = 2048) -> Decoder:
    return Decoder(backbone, text, max_context=max_context)


def run(decoder: Decoder, *waves: tuple[int, Sequence[GenerationRequest]]) -> dict[str, Completion]:
    """Run requests to their ends; each wave is admitted before the step of its number."""
    done, step = [], 0
    pending = list(waves)
    while pending or decoder.num_rows:
        while pending and (pending[0][0] <= step or not decoder.num_rows):
            _, requests = pending.pop(0)
            done.extend(decoder.admit(decoder.prepare(requests)))  # type: ignore[arg-type]
        if decoder.num_rows:
            done.extend(decoder.step())
        step += 1
    return {job.request.request_id: decoder.completion(job) for job in done}


def mixed_requests(text: TextSide, rng: np.random.Generator, **sampling: Any) -> list[GenerationRequest]:
    """Prompts of many lengths with none to three images."""
    images = pictures(rng, 9)
    prompts: list[Parts] = [
        ["Hello"],
        [images[0], "How many shapes?"],
        [images[1], "Compare", images[2], "and say what differs " * 4],
        ["look:", images[3], images[4], images[5]],
        ["A question without any picture, and rather a long one. " * 3],
        [images[6], images[7], "x"],
        [images[8]],
    ]
    return [request(text, parts, name=f"r{k}", **sampling) for k, parts in enumerate(prompts)]


def close(one: np.ndarray, other: Any, tolerance: float = 5e-5) -> bool:
    return bool(np.allclose(one, np.asarray(other), rtol=0, atol=tolerance))


# --- against transformers


def test_greedy_tokens_equal_those_of_generate(tiny_folder: Path, text: TextSide, model: Any) -> None:
    requests = mixed_requests(text, np.random.default_rng(0), max_new_tokens=20, temperature=0.0, n=2)
    completions = run(decoder_of(backbone_of(model, text), text), (0, requests))
    suppressed = text.codec.suppressed_token_ids(text.vocab_size).tolist()
    for asked in requests:
        answer = completions[asked.request_id]
        inputs: dict[str, Any] = {"input_ids": torch.from_numpy(answer.prompt_ids.astype(np.int64))[None]}
        if asked.images:
            inputs |= processor(tiny_folder).image_processor([i.to_pil() for i in asked.images], return_tensors="pt")
        is_image = inputs["input_ids"] == text.codec.image_token_id
        whole = model.generate(
            **inputs,
            mm_token_type_ids=is_image.int(),
            attention_mask=torch.ones_like(inputs["input_ids"]),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=text.codec.end_of_turn_id,
            suppress_tokens=suppressed,
        )
        theirs = whole[0, len(answer.prompt_ids) :].tolist()
        assert [sample.token_ids.tolist() for sample in answer.samples] == [theirs, theirs]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("adapter", [False, True])
def test_logprobs_equal_teacher_forcing(
    tiny_folder: Path, tmp_path: Path, text: TextSide, temperature: float, adapter: bool
) -> None:
    reference = plain_model(tiny_folder)
    if adapter:
        folder = adapted_policy(tiny_folder).payload(1).write(tmp_path / "adapter")
        reference = PeftModel.from_pretrained(reference, folder).merge_and_unload()
    common: dict[str, Any] = {"max_new_tokens": 24, "temperature": temperature, "n": 3, "seeds": (1, 2, 3)}
    requests = mixed_requests(text, np.random.default_rng(1), **common)
    answers = run(decoder_of(backbone_of(reference, text), text), (0, requests))
    assert all(gap(tiny_folder, reference, asked, answers[asked.request_id]) < 5e-5 for asked in requests)


# --- the batch does not matter


def test_rows_of_different_lengths_survive_many_retirements(text: TextSide, endless: QwenBackbone) -> None:
    rng = np.random.default_rng(3)
    requests = []
    for k, image in enumerate(pictures(rng, 8)):
        count, length = int(rng.integers(1, 4)), int(rng.integers(1, 50))
        seeds = tuple(range(100 * k, 100 * k + count))
        parts: Parts = [image, "x" * int(rng.integers(60))]
        requests.append(request(text, parts, name=str(k), n=count, seeds=seeds, temperature=0.8, max_new_tokens=length))
    together = run(decoder_of(endless, text), *((5 * k, [asked]) for k, asked in enumerate(requests)))
    for asked in requests:
        alone = run(decoder_of(endless, text), (0, [asked]))[asked.request_id]
        for sample, other in zip(together[asked.request_id].samples, alone.samples, strict=True):
            assert (len(sample.token_ids), sample.stop_reason) == (asked.sampling.max_new_tokens, StopReason.LENGTH)
            assert sample.token_ids.tolist() == other.token_ids.tolist()
            assert close(sample.logprobs, other.logprobs)


def test_more_prompt_tokens_than_one_prefill_takes_give_the_same(
    text: TextSide, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = mixed_requests(text, np.random.default_rng(4), max_new_tokens=6, seeds=(5,))
    expected = run(decoder_of(backbone_of(model, text), text), (0, requests))
    monkeypatch.setattr("rl_vlm.engines.decoder.PREFILL_TOKENS", 100)
    backbone, rows = backbone_of(model, text), []
    logits = backbone.logits
    monkeypatch.setattr(backbone, "logits", lambda hidden: rows.append(len(hidden)) or logits(hidden))
    found = run(decoder_of(backbone, text), (0, requests))
    for name, answer in expected.items():
        assert found[name].samples[0].token_ids.tolist() == answer.samples[0].token_ids.tolist()
    lengths = iter(sorted(len(answer.prompt_ids) for answer in expected.values()))
    prefills = [list(itertools.islice(lengths, count)) for count in rows]  # by length, then the steps
    several = [prompts for prompts in prefills if len(prompts) > 1]
    assert len(prefills[0]) < len(requests) and several
    assert all(len(prompts) * prompts[-1] <= 100 for prompts in several)


def test_samples_with_seeds_repeat_and_samples_without_differ(text: TextSide, endless: QwenBackbone) -> None:
    def tokens(**sampling: Any) -> list[list[int]]:
        answer = run(decoder_of(endless, text), (0, [request(text, ["hi"], max_new_tokens=16, **sampling)]))["r"]
        return [sample.token_ids.tolist() for sample in answer.samples]

    assert tokens(n=2, seeds=(3, 4)) == tokens(n=2, seeds=(3, 4))
    assert tokens(n=2, seeds=(3, 4)) == [*tokens(seeds=(3,)), *tokens(seeds=(4,))]
    fresh = tokens(n=3) + tokens(n=3)
    assert len({tuple(sample) for sample in fresh}) == 6


# --- ends


def test_a_sample_ends_with_its_end_of_turn_token(text: TextSide, model: Any) -> None:
    asked = request(text, ["?"], max_new_tokens=80, n=24, seeds=tuple(range(24)))
    answer = run(decoder_of(backbone_of(model, text), text), (0, [asked]))["r"]
    ended = [sample for sample in answer.samples if sample.stop_reason is StopReason.END_OF_TURN]
    assert ended
    for sample in ended:
        assert np.flatnonzero(sample.token_ids == text.codec.end_of_turn_id).tolist() == [len(sample.token_ids) - 1]
        assert len(sample.logprobs) == len(sample.token_ids)
        assert (sample.token_ids.dtype, sample.logprobs.dtype) == (np.int32, np.float32)


def test_a_stop_string_ends_the_sample_where_it_appears(text: TextSide, endless: QwenBackbone) -> None:
    free = run(decoder_of(endless, text), (0, [request(text, ["?"], max_new_tokens=40, seeds=(8,))]))["r"].samples[0]
    whole = text.codec.decode(free.token_ids)
    stop = text.codec.decode(free.token_ids[10:13])  # three tokens: it straddles token borders
    first = whole.index(stop) + len(stop)
    asked = request(text, ["?"], max_new_tokens=40, seeds=(8,), stop=("never said by anyone", stop))
    sample = run(decoder_of(endless, text), (0, [asked]))["r"].samples[0]
    assert sample.stop_reason is StopReason.STOP
    assert sample.token_ids.tolist() == free.token_ids[: len(sample.token_ids)].tolist()
    assert stop in text.codec.decode(sample.token_ids)
    assert len(text.codec.decode(sample.token_ids[:-1])) < first


# --- what may never be sampled


@pytest.fixture(scope="module")
def hostile_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the model that wants to say nothing but `<|image_pad|>` or `<|video_pad|>`."""
    folder = tmp_path_factory.mktemp("hostile")
    hostile = plain_model(tiny_folder)
    hostile.config.tie_word_embeddings = hostile.config.text_config.tie_word_embeddings = False
    head = torch.zeros_like(hostile.lm_head.weight)
    direction = torch.randn(head.shape[1], generator=torch.Generator().manual_seed(0))
    # Opposite rows: whatever the hidden state, one of them wins by far.
    head[hostile.config.image_token_id], head[hostile.config.video_token_id] = 1000 * direction, -1000 * direction
    hostile.lm_head.weight = torch.nn.Parameter(head)
    hostile.save_pretrained(folder)
    processor(tiny_folder).save_pretrained(folder)
    return folder


def test_a_hostile_model_cannot_forge_an_image(hostile_folder: Path) -> None:
    text, model = text_side(hostile_folder), plain_model(hostile_folder)
    requests = [
        request(text, ["?"], name="sampled", max_new_tokens=30, n=40),
        request(text, ["?"], name="greedy", max_new_tokens=30, temperature=0.0),
        request(text, ["?"], name="cut", max_new_tokens=30, n=4, top_k=2, top_p=0.5),
        request(text, ["?"], name="hot", max_new_tokens=30, n=4, temperature=50.0),
    ]
    assert isinstance(model, Qwen3VLForConditionalGeneration)
    pads = {model.config.image_token_id, model.config.video_token_id}
    with torch.no_grad():
        wanted = reference_logits(hostile_folder, model, np.arange(9), []).argmax(-1).tolist()
    assert set(wanted) <= pads
    completions = run(decoder_of(backbone_of(model, text), text), (0, requests))
    suppressed = set(text.codec.suppressed_token_ids(text.vocab_size).tolist())
    for answer in completions.values():
        for sample in answer.samples:
            assert suppressed.isdisjoint(sample.token_ids.tolist())
            assert np.all(np.isfinite(sample.logprobs))
    # All allowed tokens are equally likely: the mask takes effect before normalising.
    expected = -np.log(text.vocab_size - len(suppressed))
    assert all(
        close(sample.logprobs, np.full(len(sample.logprobs), expected)) for sample in completions["sampled"].samples
    )


def test_a_stop_string_in_the_last_allowed_token_counts_as_stop(text: TextSide, endless: QwenBackbone) -> None:
    free = run(decoder_of(endless, text), (0, [request(text, ["?"], max_new_tokens=12, seeds=(9,))]))["r"].samples[0]
    for length in range(1, 12):
        text_now, before = text.codec.decode(free.token_ids[:length]), text.codec.decode(free.token_ids[: length - 1])
        new = text_now[len(before) :]
        if new.isascii() and new and new not in before:
            break
    asked = request(text, ["?"], max_new_tokens=length, seeds=(9,), stop=(new,))
    sample = run(decoder_of(endless, text), (0, [asked]))["r"].samples[0]
    assert (sample.stop_reason, len(sample.token_ids)) == (StopReason.STOP, length)


def test_image_features_that_reach_the_last_layer_count(tiny_folder: Path, text: TextSide) -> None:
    model = plain_model(tiny_folder)
    model.model.language_model.layers = model.model.language_model.layers[:1]
    model.config.text_config.num_hidden_layers = 1
    assert len(model.model.visual.deepstack_visual_indexes) == 1
    image = picture(np.random.default_rng(5), 64, 64)
    asked = [
        request(text, [image, "and", image], name="a", max_new_tokens=6, temperature=0.7, seeds=(1,)),
        request(text, ["Hello"], name="b", max_new_tokens=6, temperature=0.7, seeds=(2,)),
    ]
    # A prompt that ends with its image: what the image writes into the last layer decides the first token.
    until_image = asked[0].prompt_ids[: 1 + int(np.argmax(asked[0].prompt_ids == text.codec.image_token_id))]
    asked.append(replace(asked[0], request_id="c", prompt_ids=until_image, images=(image,)))
    answers = run(decoder_of(backbone_of(model, text), text), (0, asked))
    assert all(gap(tiny_folder, model, one, answers[one.request_id]) < 5e-5 for one in asked)


@pytest.mark.parametrize("form", ["a row per layer", "one image less", "rows of another width"])
def test_image_features_of_another_form_are_an_error(
    text: TextSide, model: Any, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.17 gives the deep stack as one tensor for all images: a row of it would be broadcast."""
    own = model.model.get_image_features

    def other(*arguments: Any, **options: Any) -> Any:
        out = own(*arguments, **options)
        if form == "a row per layer":
            out.deepstack_features = [torch.cat(list(layer)) for layer in out.deepstack_features]
        elif form == "one image less":
            out.pooler_output = [features[:-1] for features in out.pooler_output]
        else:
            out.pooler_output = [features[:, :-1] for features in out.pooler_output]
        return out

    monkeypatch.setattr(model.model, "get_image_features", other)
    backbone = QwenBackbone(model, text.images, text.codec.suppressed_token_ids(text.vocab_size))
    with pytest.raises(RLVLMError, match="shapes"):
        backbone.image_features(pictures(np.random.default_rng(0), 2))
