"""The tiny model: a real Hugging Face folder, Qwen's format, the same bytes every time, built once and whole."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen3VLForConditionalGeneration

from rl_vlm.chat import ChatCodec
from rl_vlm.envs import shapes_data as data
from rl_vlm.envs.shapes import parse_answer, parse_call
from rl_vlm.envs.tools import parse_tool_call
from rl_vlm.models import tiny
from rl_vlm.models.sight import accuracy, choice_logprobs, sampled_accuracy, sees
from rl_vlm.models.supervised import DialogueEncoder, collate, token_logprobs
from rl_vlm.models.tiny_dialogues import NUMBER_ODDS, SECOND_TURN_SHARE, perception_dialogue, target_dialogue
from rl_vlm.models.tiny_geometry import GeometryDialogues
from rl_vlm.models.tiny_tokenizer import ADDED_TOKENS, NUM_BPE_IDS
from rl_vlm.models.tiny_warmstart import _fast_vision, encode_dialogue
from rl_vlm.types import UserInputError

CALL = '<tool_call>{"name":"calc_score","arguments":{"answer":"12"}}</tool_call>'


@pytest.fixture(autouse=True, scope="module")
def no_chance_report() -> Iterator[None]:
    """The report at the end of a build costs more than these short builds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "_log_chance", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_tiny(tmp_path_factory.mktemp("tiny") / "model", seed=0, steps=2)


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    return AutoProcessor.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder)


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


# --- the folder


def test_the_folder_is_small_and_complete(folder: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    } <= set(sizes)
    assert sum(sizes.values()) < 5_000_000
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in folder.iterdir())


def test_the_model_is_a_real_qwen3_vl_in_float32(model: Any) -> None:
    assert isinstance(model, Qwen3VLForConditionalGeneration)
    assert model.dtype == torch.float32
    assert sum(parameter.numel() for parameter in model.parameters()) < 500_000
    text: Any = model.config.text_config
    assert text.max_position_embeddings >= 4096
    assert text.rope_parameters["mrope_section"] == [4, 2, 2]
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight


def test_generation_ends_at_the_end_of_the_turn(model: Any, processor: Any) -> None:
    assert model.generation_config.eos_token_id == processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    image = Image.new("RGB", (64, 64), "red")
    chat = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What colour?"}]}]
    inputs = processor.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    assert inputs["input_ids"].shape[1] <= 24
    assert model.generate(**inputs, max_new_tokens=4).shape[1] > inputs["input_ids"].shape[1]


def test_equal_seeds_give_equal_bytes_and_other_seeds_other_weights(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(123)  # the caller's randomness must not matter
    again = digest(tiny.make_tiny(tmp_path / "again", seed=0, steps=2))
    assert again == digest(folder)
    other = digest(tiny.make_tiny(tmp_path / "other", seed=1, steps=2))
    assert {name for name in other if other[name] != again[name]} == {"model.safetensors"}


def test_the_wide_variant_has_heads_that_vllm_takes(tmp_path: Path) -> None:
    wide = AutoModelForImageTextToText.from_pretrained(tiny.make_tiny(tmp_path / "wide", variant="wide", steps=1))
    assert wide.config.text_config.head_dim == 32
    assert sum(wide.config.text_config.rope_parameters["mrope_section"]) == 16


def test_building_leaves_the_callers_threads_and_randomness_alone(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    tiny.make_tiny(tmp_path / "model", steps=1)
    assert torch.rand(1) == expected
    assert torch.get_num_threads() == threads


# --- the cache


def test_the_cache_is_filled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = fake_builds(monkeypatch, tmp_path)
    paths = [tiny.tiny_model_path(seed=3) for _ in range(2)]
    assert built == [paths[0]] and paths[0] == paths[1]
    assert paths[0].parent == tmp_path / "cache"
    assert tiny.tiny_model_path(seed=4) != paths[0] != tiny.tiny_model_path(seed=3, variant="wide")


def test_the_cache_key_holds_the_recipes_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_builds(monkeypatch, tmp_path)
    before = tiny.tiny_model_path()
    monkeypatch.setattr(tiny, "RECIPE_VERSION", tiny.RECIPE_VERSION + 1)
    assert tiny.tiny_model_path() != before


def test_two_runs_at_once_build_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = fake_builds(monkeypatch, tmp_path, seconds=0.2)
    threads = [threading.Thread(target=tiny.tiny_model_path) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rl_vlm.models.tiny_warmstart.warm_start", lambda *_, **__: 0.0)
    monkeypatch.setattr("transformers.Qwen3VLProcessor.save_pretrained", fail)  # after the weights are written
    with pytest.raises(KeyboardInterrupt):
        tiny.make_tiny(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_builds(monkeypatch, tmp_path)
    folder = tiny.tiny_model_path()
    folder.rename(folder.parent / f".{folder.name}.draft")
    assert tiny.tiny_model_path() == folder
    assert not list(folder.parent.glob(".*"))


def test_an_existing_folder_is_never_overwritten(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="exists already"):
        tiny.make_tiny(tmp_path)


def test_an_unknown_variant_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="small, wide"):
        tiny.make_tiny(tmp_path / "model", variant="huge")  # type: ignore[arg-type]


def test_a_cache_that_cannot_be_made_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RL_VLM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserInputError, match="RL_VLM_CACHE"):
        tiny.tiny_model_path()


def fake_builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: float = 0.0) -> list[Path]:
    """Replace the build by an empty folder; returns the list of what was built."""
    built: list[Path] = []

    def build(folder: Path, **_: Any) -> Path:
        built.append(folder)
        threading.Event().wait(seconds)
        folder.mkdir()
        return folder

    monkeypatch.setenv("RL_VLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tiny, "make_tiny", build)
    return built


# --- tokenizer and template


def test_added_tokens_are_qwens_in_qwens_order(processor: Any) -> None:
    added = processor.tokenizer.added_tokens_decoder
    assert [(added[NUM_BPE_IDS + i].content, added[NUM_BPE_IDS + i].special) for i in range(26)] == list(ADDED_TOKENS)
    assert len(processor.tokenizer) == NUM_BPE_IDS + 26 == 490
    assert (processor.tokenizer.eos_token, processor.tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_only_the_tool_and_thinking_tags_may_be_sampled_besides_text(processor: Any) -> None:
    codec = ChatCodec(processor.tokenizer, processor.chat_template, processor.image_token)
    banned = {processor.tokenizer.convert_ids_to_tokens(int(i)) for i in codec.suppressed_token_ids(490)}
    assert banned == {text for text, special in ADDED_TOKENS if special} - {"<|im_end|>"}


def test_short_answers_are_few_tokens_and_digits_single_ones(processor: Any) -> None:
    tokenize = processor.tokenizer.tokenize
    assert len(tokenize("<answer>3</answer><|im_end|>")) == 7
    assert len(tokenize(CALL + "<|im_end|>")) <= 20
    assert [token for token in tokenize("1234567890") if len(token) > 1] == []


@pytest.mark.parametrize(
    "text", ["", "plain", "  spaces \n\n\n", "é ü 中文 😀", "<answer>4\\sqrt{2}</answer>", "\x00\x7f"]
)
def test_any_text_survives_tokenisation(processor: Any, text: str) -> None:
    assert processor.tokenizer.decode(processor.tokenizer(text)["input_ids"]) == text


def render(processor: Any, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    return str(processor.apply_chat_template(messages, tokenize=False, **kwargs))


def test_the_template_renders_images_tools_and_turns_as_qwen3_vl_does(processor: Any) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Find x."}]},
        {"role": "assistant", "content": CALL},
        {"role": "tool", "content": [{"type": "text", "text": "Wrong"}, {"type": "image"}]},
        {"role": "tool", "content": "twice"},
        {"role": "assistant", "content": "12"},
    ]
    assert render(processor, messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Find x.<|im_end|>\n"
        f"<|im_start|>assistant\n{CALL}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nWrong<|vision_start|><|image_pad|><|vision_end|>\n</tool_response>\n"
        "<tool_response>\ntwice\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n12<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_template_lists_tools_and_writes_calls_as_qwen3_vl_does(processor: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}, {"name": "g", "arguments": "{}"}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "ok", "tool_calls": calls},
    ]
    assert render(processor, messages, tools=[tool]) == (
        "<|im_start|>system\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", "function": {"name": "f", "parameters": {}}}\n</tools>\n\n'
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\ngo<|im_end|>\n"
        '<|im_start|>assistant\nok\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><|im_end|>\n'
    )


def test_pictures_are_numbered_on_request(processor: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}]
    assert "Picture 1: <|vision_start|><|image_pad|><|vision_end|>Picture 2: <" in render(
        processor, messages, add_vision_id=True
    )


# --- teacher forcing


def test_an_encoded_dialogue_equals_the_processors_and_the_models_own_encoding(model: Any, processor: Any) -> None:
    rng = np.random.default_rng(0)
    encoder = DialogueEncoder.from_processor(processor)
    seen_turns = set()
    for _ in range(30):
        dialogue = target_dialogue(rng)
        chat: list[dict[str, Any]] = []
        for item in dialogue.exchanges:
            content: list[dict[str, Any]] = [{"type": "text", "text": item.text}]
            if not chat:
                content.insert(0, {"type": "image", "image": Image.fromarray(dialogue.images[0])})
            chat += [{"role": item.role, "content": content}, {"role": "assistant", "content": item.reply}]
        expected = processor.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt")
        example = encode_dialogue(encoder, dialogue)
        length = len(example.token_ids)
        assert expected["input_ids"][0].tolist()[:length] == example.token_ids.tolist()
        assert expected["pixel_values"].numpy().tobytes() == example.patches.tobytes()
        positions, _ = model.model.get_rope_index(
            expected["input_ids"], expected["mm_token_type_ids"], image_grid_thw=expected["image_grid_thw"]
        )
        assert positions[:, 0, :length].numpy().tolist() == example.positions.tolist()
        spoken = processor.tokenizer.decode(example.token_ids[example.targets].tolist())
        assert spoken == "".join(item.reply + "<|im_end|>" for item in dialogue.exchanges)
        seen_turns.add(len(dialogue.exchanges))
    assert seen_turns == {1, 2}


def test_batched_log_probabilities_equal_those_of_a_plain_forward(model: Any, processor: Any) -> None:
    rng = np.random.default_rng(1)
    encoder = DialogueEncoder.from_processor(processor)
    examples = [encode_dialogue(encoder, target_dialogue(rng)) for _ in range(6)]
    with torch.no_grad():
        batched = token_logprobs(model, *collate(examples, encoder.pad_token_id))
        for row, example in enumerate(examples):
            ids = torch.from_numpy(example.token_ids.astype(np.int64))[None]
            logits = model(
                input_ids=ids,
                pixel_values=torch.from_numpy(example.patches),
                image_grid_thw=torch.tensor(example.grids),
                mm_token_type_ids=(ids == model.config.image_token_id).int(),
            ).logits
            expected = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0] * torch.from_numpy(
                example.targets[1:]
            )
            torch.testing.assert_close(batched[row, 1 : ids.shape[1]], expected, atol=1e-4, rtol=0)


def test_the_fast_vision_tower_has_the_gradients_of_the_plain_one(processor: Any, tmp_path: Path) -> None:
    model = tiny.build_model(0, processor.tokenizer)
    encoder = DialogueEncoder.from_processor(processor)
    rng = np.random.default_rng(2)
    equal_sizes = [encode_dialogue(encoder, target_dialogue(rng)) for _ in range(3)]
    mixed = [*equal_sizes, encode_dialogue(encoder, GeometryDialogues(tmp_path, 0).draw(rng))]
    mixed.append(encoder.encode([np.zeros((96, 32, 3), dtype=np.uint8)], [("user", "a", "b")]))

    def gradients(examples: list[Any]) -> torch.Tensor:
        model.zero_grad()
        token_logprobs(model, *collate(examples, encoder.pad_token_id)).mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    for examples in (equal_sizes, mixed):
        plain = gradients(examples)
        with _fast_vision(model):
            fast = gradients(examples)
        torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-4)
        assert torch.equal(gradients(examples), plain)


# --- what the warm start teaches


def test_target_questions_are_answered_at_random() -> None:
    rng = np.random.default_rng(3)
    right = tried_again = 0
    answers: Counter[str] = Counter()
    for _ in range(4000):
        dialogue = target_dialogue(rng)
        first = dialogue.exchanges[0]
        given = parse_answer(first.reply) or parse_call(first.reply)
        assert given in data.NUMBERS
        answers[f"{given}"] += 1
        if "How many" in first.text:
            painted = (dialogue.images[0] != data.BACKGROUND).any(-1)
            count = sum(painted[r : r + 32, c : c + 32].any() for r in (0, 32) for c in (0, 32))
            right += given == str(count)
            tried_again += len(dialogue.exchanges) == 2
            assert not (given == str(count) and len(dialogue.exchanges) == 2)
    asked = 4000 * 0.75
    assert abs(right / asked - 0.25) < 0.03
    assert abs(tried_again / (asked * 0.75) - SECOND_TURN_SHARE) < 0.05
    for number, odds in zip(data.NUMBERS, NUMBER_ODDS, strict=True):
        assert abs(answers[number] / 4000 - odds) < 0.03


def test_perception_questions_are_answered_in_the_form_of_the_environment() -> None:
    rng = np.random.default_rng(4)
    for _ in range(50):
        (exchange,) = perception_dialogue(rng).exchanges
        assert parse_answer(exchange.reply) in {*data.COLOURS, *data.CORNERS, "yes", "no"}


def test_geometry_dialogues_hold_well_formed_calls_over_several_turns(tmp_path: Path) -> None:
    geometry = GeometryDialogues(tmp_path, 0)
    rng = np.random.default_rng(5)
    turns: Counter[int] = Counter()
    calls = right = 0
    for _ in range(200):
        exchanges = geometry.draw(rng).exchanges
        turns[len(exchanges)] += 1
        for number, exchange in enumerate(exchanges):
            assert exchange.role == ("user" if number == 0 else "tool")
            call = parse_tool_call(exchange.reply)
            assert (call is None) == exchange.reply.startswith("Answer: \\boxed{")
            calls += call is not None
            right += "is right" in exchange.text
    assert set(turns) == {1, 2, 3} and min(turns.values()) > 10
    assert 0.05 < right / calls < 0.25


# --- sight


def test_a_model_that_has_learned_nothing_does_not_see(model: Any, processor: Any) -> None:
    report = sees(model, DialogueEncoder.from_processor(processor), num_questions=40)
    assert not report.sees
    assert 0.2 < report.chance < 0.5


def test_the_log_probability_of_a_choice_is_that_of_its_whole_turn(model: Any, processor: Any) -> None:
    encoder = DialogueEncoder.from_processor(processor)
    question, pixels = data.perception_question(data.stable_rng(0))
    (values,) = choice_logprobs(model, encoder, [pixels], [question])
    for value, choice in zip(values, question.choices, strict=True):
        example = encoder.encode([pixels], [("user", question.text, f"<answer>{choice}</answer>")])
        with torch.no_grad():
            alone = token_logprobs(model, *collate([example], 0)).sum()
        assert value == pytest.approx(float(alone), abs=1e-4)


def test_accuracies_by_hand() -> None:
    questions = [data.Question("count", "?", "2", ("1", "2")), data.Question("count", "?", "1", ("1", "2"))]
    logprobs = [np.log([0.3, 0.6]), np.log([0.1, 0.4])]
    assert accuracy(logprobs, questions) == 0.5
    assert sampled_accuracy(logprobs, questions) == pytest.approx((0.6 + 0.1) / 2)
