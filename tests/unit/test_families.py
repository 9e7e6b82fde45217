"""The other supported family: a random Qwen2.5-VL, whose vision tower and positions differ, behaves like the tiny one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from core_support import (
    adapted_policy,
    batch_of,
    conversation,
    expand,
    gap,
    picture,
    plain_model,
    processor,
    reference_logprobs,
    request,
    run_config,
    text_side,
    train_sample,
)
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from rl_vlm.chat import mrope_positions
from rl_vlm.engines.decoder import Decoder
from rl_vlm.learning.update import PolicyUpdater
from rl_vlm.models.families.qwen_vl import QwenBackbone
from rl_vlm.types import Message
from rl_vlm.zoo.tiny.tokenizer import CHAT_TEMPLATE, build_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights; the image processor has Qwen2.5-VL's patches of 14 pixels."""
    tokenizer = build_tokenizer(4096)
    token_id = tokenizer.convert_tokens_to_ids
    images = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    size = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer) + 6,  # padded, as Qwen's own embedding matrices are
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "initializer_range": 0.08,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
            "tie_word_embeddings": True,
            "pad_token_id": token_id("<|endoftext|>"),
            "eos_token_id": token_id("<|im_end|>"),
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "num_heads": 4,
            "intermediate_size": 128,
            "patch_size": 14,
            "out_hidden_size": 64,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.08,
        },
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("qwen25")
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(path)
    Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**images, size=size),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**images, size=size),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(path)
    return path


def test_prompts_and_positions_equal_those_of_transformers(folder: Path) -> None:
    text, model = text_side(folder), plain_model(folder)
    rng = np.random.default_rng(0)
    images = [picture(rng, 90, 50), picture(rng, 30, 112)]
    span = text.codec.encode_prompt([Message.of("user", images[0], "and", images[1], "?")])
    ids = expand(text, span.token_ids, images)
    pixels = processor(folder).image_processor([image.to_pil() for image in images], return_tensors="pt")
    grids = [text.images.grid_thw(image.width, image.height) for image in images]
    assert [list(grid) for grid in grids] == pixels["image_grid_thw"].tolist()
    batch = torch.from_numpy(ids.astype(np.int64))[None]
    is_image = (batch == text.codec.image_token_id).int()
    theirs, _ = model.model.get_rope_index(batch, is_image, pixels["image_grid_thw"])
    assert np.array_equal(mrope_positions(ids, text.codec.image_token_id, grids, 2), theirs[:, 0].numpy())


def test_engine_and_learner_equal_teacher_forcing(folder: Path) -> None:
    text = text_side(folder)
    policy = adapted_policy(folder, rollout__temperature=0.7)
    decoder = Decoder(
        QwenBackbone(policy.model, text.images, text.codec.suppressed_token_ids(text.vocab_size)),
        text,
        max_context=512,
    )
    rng = np.random.default_rng(1)
    images = [picture(rng, 112, 70), picture(rng, 40, 30)]
    requests = [
        request(text, [images[0], "What?", images[1]], name="a", max_new_tokens=10, temperature=0.7, n=2, seeds=(1, 2)),
        request(text, ["Nothing to see."], name="b", max_new_tokens=10, temperature=0.7, seeds=(3,)),
    ]
    done = decoder.admit(decoder.prepare(requests))  # type: ignore[arg-type]
    while decoder.num_rows:
        done += decoder.step()
    answers = {job.request.request_id: decoder.completion(job) for job in done}
    assert all(gap(folder, policy.model, asked, answers[asked.request_id]) < 5e-5 for asked in requests)
    updater = PolicyUpdater(policy, run_config(folder, rollout__temperature=0.7))
    prompt = [images[0], "What is it? " * 4]
    members = [conversation(text, rng, prompt, [3, 4], [["again", images[1]]]) for _ in range(3)]
    ((micro,),) = updater.pack(batch_of([[train_sample(member, 1.0, 1.0) for member in members]]))
    assert len(micro.input_ids) == 1  # one row for all three
    with torch.no_grad():
        found = updater.logprobs(micro)[0]
        expected = torch.cat(
            [
                reference_logprobs(folder, policy.model, m.token_ids, m.images, 0.7)[torch.from_numpy(m.loss_mask[1:])]
                for m in members
            ]
        )
    assert torch.allclose(found, expected, rtol=0, atol=5e-5)


def test_unused_rows_of_the_vocabulary_are_suppressed(folder: Path) -> None:
    text = text_side(folder)
    suppressed = text.codec.suppressed_token_ids(text.vocab_size)
    assert set(range(text.vocab_size - 6, text.vocab_size)) <= set(suppressed.tolist())
