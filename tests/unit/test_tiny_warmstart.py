"""The tiny model's warm start: what it teaches, how dialogues are encoded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rl_vlm.models.families.qwen_fast import fast_vision
from rl_vlm.models.supervised import DialogueEncoder, collate, token_logprobs
from rl_vlm.zoo.geo3k.form_lesson import geometry_drawer
from rl_vlm.zoo.shapes.lesson import target_dialogue
from rl_vlm.zoo.tiny import model as tiny


@pytest.fixture(scope="module", params=["small", "smol"])
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def processor(variant: str) -> Any:
    return tiny.build_processor(variant)


@pytest.fixture(scope="module")
def model(processor: Any, variant: str) -> Any:
    return tiny.build_model(0, processor.tokenizer, variant).eval()


def test_an_encoded_dialogue_equals_the_processors_and_the_models_own_encoding(
    model: Any, processor: Any, encoder: Any
) -> None:
    rng = np.random.default_rng(0)
    lead = "" if hasattr(model.model, "get_rope_index") else " "  # what SmolVLM's template writes before a reply
    seen_turns = set()
    for _ in range(30):
        dialogue = target_dialogue(rng)
        chat: list[dict[str, Any]] = []
        for item in dialogue:
            content: list[dict[str, Any]] = [{"type": "text", "text": item.text}]
            if not chat:
                content.insert(0, {"type": "image", "image": Image.fromarray(dialogue[0].parts[0])})
            chat += [{"role": item.role, "content": content}, {"role": "assistant", "content": item.reply}]
        expected = processor.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt")
        example = encoder.encode_chat(dialogue)
        length = len(example.token_ids)
        assert expected["input_ids"][0].tolist()[:length] == example.token_ids.tolist()
        assert expected["pixel_values"].numpy().tobytes() == example.pixels["pixel_values"].numpy().tobytes()
        positions = torch.arange(length)[None]
        if "image_grid_thw" in expected:
            grid, types = expected["image_grid_thw"], expected["mm_token_type_ids"]
            positions = model.model.get_rope_index(expected["input_ids"], types, image_grid_thw=grid)[0][:, 0, :length]
        assert positions.tolist() == example.positions.tolist()
        spoken = processor.tokenizer.decode(example.token_ids[example.targets].tolist())
        assert spoken == "".join(lead + item.reply + processor.tokenizer.eos_token for item in dialogue)
        seen_turns.add(len(dialogue))
    assert seen_turns == {1, 2}


def test_batched_log_probabilities_equal_those_of_a_plain_forward(model: Any, encoder: Any) -> None:
    rng = np.random.default_rng(1)
    examples = [encoder.encode_chat(target_dialogue(rng)) for _ in range(6)]
    examples.append(encoder.encode_turn((np.full((32, 96, 3), 90, dtype=np.uint8), "a"), "b"))
    with torch.no_grad():
        batched = token_logprobs(model, *collate(examples, encoder.pad_token_id))
        for row, example in enumerate(examples):
            ids = torch.from_numpy(example.token_ids.astype(np.int64))[None]
            types = (
                {"mm_token_type_ids": (ids == model.config.image_token_id).int()} if len(example.positions) > 1 else {}
            )
            logits = model(input_ids=ids, **example.pixels, **types).logits
            expected = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0] * torch.from_numpy(
                example.targets[1:]
            )
            torch.testing.assert_close(batched[row, 1 : ids.shape[1]], expected, atol=1e-4, rtol=0)


def test_the_fast_vision_tower_has_the_gradients_of_the_plain_one() -> None:
    processor = tiny.build_processor()
    model = tiny.build_model(0, processor.tokenizer)
    encoder = DialogueEncoder(processor)
    rng = np.random.default_rng(2)
    equal_sizes = [encoder.encode_chat(target_dialogue(rng)) for _ in range(3)]
    mixed = [*equal_sizes, encoder.encode_chat(geometry_drawer(0, rng)())]
    mixed.append(encoder.encode_turn((np.zeros((96, 32, 3), dtype=np.uint8), "a"), "b"))

    def gradients(examples: list[Any]) -> torch.Tensor:
        model.zero_grad()
        token_logprobs(model, *collate(examples, encoder.pad_token_id)).mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    for examples in (equal_sizes, mixed):
        plain = gradients(examples)
        with fast_vision(model):
            fast = gradients(examples)
        torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-4)
        assert torch.equal(gradients(examples), plain)
