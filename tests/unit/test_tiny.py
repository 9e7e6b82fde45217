"""The tiny model: a real Hugging Face folder, Qwen's format, the same bytes every time, built once and whole."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import core_support  # one thread: several gain nothing on a model this small
import pytest
import torch
from real_shapes import trl_template
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from rl_vlm.chat import ChatCodec
from rl_vlm.files import locked
from rl_vlm.models.loading import resolve_model
from rl_vlm.models.supervised import DialogueEncoder, collate
from rl_vlm.types import Message, UserInputError
from rl_vlm.zoo.tiny import model as tiny
from rl_vlm.zoo.tiny.ship import ship
from rl_vlm.zoo.tiny.teach import teach
from rl_vlm.zoo.tiny.variants import VARIANTS

CALL = '<tool_call>{"name":"calc_score","arguments":{"answer":"12"}}</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_tiny(tmp_path_factory.mktemp("tiny") / "model", seed=0, steps=2)


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    return core_support.processor(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder)


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


# --- the folder


def test_the_folder_is_small_and_complete(folder: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert needed <= set(sizes)
    assert sum(sizes.values()) < 5_000_000
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in folder.iterdir())


def test_equal_seeds_give_equal_bytes_and_other_seeds_other_weights(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(123)  # the caller's randomness must not matter
    again = digest(tiny.make_tiny(tmp_path / "again", seed=0, steps=2))
    assert again == digest(folder)
    other = digest(tiny.make_tiny(tmp_path / "other", seed=1, steps=2))
    assert {name for name in other if other[name] != again[name]} == {"model.safetensors"}


# --- the model that comes with the package


@pytest.mark.parametrize(
    ("variant", "most_bytes"), [("small", 1_000_000), pytest.param("words", 2_100_000, marks=pytest.mark.slow)]
)
def test_a_shipped_model_is_the_one_that_the_code_builds(variant: str, most_bytes: int, tmp_path: Path) -> None:
    shipped = tiny.tiny_model_path(variant=variant)
    assert shipped == tiny.SHIPPED / variant
    stored, built = digest(shipped), digest(tiny.make_tiny(tmp_path / "model", variant=variant, steps=2))
    assert stored.keys() == built.keys()
    changed = {name for name in built if stored[name] != built[name]}
    assert changed == {"model.safetensors"}, f"run `python -m rl_vlm.zoo.tiny.ship {variant}`"
    weights = AutoModelForImageTextToText.from_pretrained(shipped, dtype="auto").state_dict()
    assert {weight.dtype for weight in load_file(shipped / "model.safetensors").values()} == {torch.bfloat16}
    assert {weight.dtype for weight in weights.values()} == {torch.float32}  # as its config.json says
    assert sum(path.stat().st_size for path in shipped.iterdir()) < most_bytes


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
def test_a_rebuilt_model_gives_the_shipped_one_s_greedy_answers(tmp_path: Path) -> None:
    ship("small", tmp_path / "again")
    drawn, draw = [], VARIANTS["small"].lessons.drawer(9)
    while len(drawn) < 200:
        drawn.append(draw()[:1])
    again, shipped = (greedy(path, drawn) for path in (tmp_path / "again", tiny.SHIPPED / "small"))
    assert sum(a == b for a, b in zip(again, shipped, strict=True)) >= 190


def greedy(folder: Path, dialogues: list[Any]) -> list[list[int]]:
    """The likeliest token at each place of the replies."""
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    encoder, said = DialogueEncoder(core_support.processor(folder)), []
    for dialogue in dialogues:
        arguments, targets = collate([encoder.encode_chat(dialogue)], encoder.pad_token_id)
        with torch.no_grad():
            logits = model(**arguments, use_cache=False).logits
        said.append(logits[:, :-1][targets[:, 1:]].argmax(-1).tolist())
    return said


# --- the cache


def test_runs_at_once_build_once_and_seeds_and_variants_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = fake_builds(monkeypatch, tmp_path, seconds=0.2)
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: tiny.tiny_model_path(seed=3), range(4)))
    assert paths == {*built} and len(built) == 1 and built[0].parent == tmp_path / "cache"
    assert tiny.tiny_model_path(seed=4) != built[0] != tiny.tiny_model_path(seed=3, variant="wide")


def test_a_cache_that_takes_nothing_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cache in ("/dev/null/cache", "/proc/cache"):
        monkeypatch.setenv("RL_VLM_CACHE", cache)
        with pytest.raises(UserInputError, match="RL_VLM_CACHE"):
            tiny.tiny_model_path(seed=3)
    with locked(tmp_path / "tiny.lock"), (tmp_path / "tiny.lock").open("w") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rl_vlm.zoo.tiny.teach.teach", lambda *_, **__: 0.0)
    monkeypatch.setattr("transformers.Qwen3VLProcessor.save_pretrained", fail)  # after the weights are written
    with pytest.raises(KeyboardInterrupt):
        tiny.make_tiny(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


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


# --- the variants


@pytest.mark.acceptance
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_the_warm_start_depends_on_its_seed_alone(variant: str) -> None:
    processor = tiny.build_processor(variant)
    losses = []
    for seed in (0, 0, 1):
        model = tiny.build_model(0, processor.tokenizer, variant)
        draw = VARIANTS[variant].lessons.drawer(seed)
        losses.append(teach(model, DialogueEncoder(processor), draw, steps=2, batch=6))
    assert losses[0] == losses[1] != losses[2]
    known = VARIANTS[variant]
    assert len(processor.tokenizer) == (474 if known.smol else known.vocabulary + 26)
    assert model.config.text_config.num_hidden_layers == VARIANTS[variant].layers


def test_every_variant_is_a_built_in_model_under_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = fake_builds(monkeypatch, tmp_path)
    for variant in VARIANTS:
        folder = resolve_model("tiny" if variant == "small" else f"tiny-{variant}", seed=2)
        assert folder == built[-1] and folder.name.startswith(f"tiny-{variant}-2-")
    assert len(set(built)) == len(VARIANTS)


# --- tokenizer and template


@pytest.mark.parametrize(
    "text", ["", "plain", "  spaces \n\n\n", "é ü 中文 😀", "<answer>4\\sqrt{2}</answer>", "\x00\x7f"]
)
def test_any_text_survives_tokenisation(processor: Any, text: str) -> None:
    assert processor.tokenizer.decode(processor.tokenizer(text)["input_ids"]) == text


def render(processor: Any, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    return str(processor.apply_chat_template(messages, tokenize=False, **kwargs))


@pytest.mark.parametrize(("variant", "reference"), [("small", "qwen3_vl"), ("smol", "smolvlm")])
def test_a_template_renders_as_the_familys_own(variant: str, reference: str) -> None:
    processor, theirs = tiny.build_processor(variant), trl_template(reference)
    image, text, said = ({"type": "image"}, {"type": "text", "text": "Find x."}, {"type": "text", "text": "12"})
    user, reply = {"role": "user", "content": [image, text, image]}, {"role": "assistant", "content": [said]}
    chats: list[Any] = [
        [user],
        [{"role": "system", "content": [text]}, user, reply, {"role": "user", "content": [text]}],
    ]
    options: list[dict[str, Any]] = [{}, {"add_generation_prompt": True}]
    if variant == "small":
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        calls = [
            {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
            {"name": "g", "arguments": "{}"},
        ]
        chats.append([{"role": "user", "content": "go"}, {"role": "assistant", "content": "ok", "tool_calls": calls}])
        shown = {"role": "tool", "content": [{"type": "text", "text": "Wrong"}, image]}
        chats.append([user, {"role": "assistant", "content": CALL}, shown, {"role": "tool", "content": "twice"}, reply])
        options.append({"tools": [tool]})
    for chat, more in itertools.product(chats, options):
        assert render(processor, chat, **more) == render(processor, chat, chat_template=theirs, **more)


def test_a_blank_before_a_reply_belongs_to_the_template() -> None:
    """SmolVLM's prompt ends with "Assistant:" and its history says "Assistant: 12"."""
    processor = tiny.build_processor("smol")
    codec = ChatCodec(processor.tokenizer, processor.chat_template, "<image>")
    prompt, reply = codec.encode_prompt([Message.of("user", "Find x.")]).token_ids, codec.encode_text("12")
    chat = [{"role": "user", "content": "Find x."}, {"role": "assistant", "content": "12"}]
    expected = processor.tokenizer(render(processor, chat).removesuffix("\n"))["input_ids"]
    assert [*prompt, *reply, codec.end_of_turn_id] == expected
    assert codec.decode(reply) == "12"


def test_an_existing_folder_is_never_overwritten(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="exists already"):
        tiny.make_tiny(tmp_path)


def test_the_model_of_words_begins_able_to_copy() -> None:
    tokenizer = tiny.build_processor("words").tokenizer
    model = tiny.build_model(0, tokenizer, "words")
    random, count = torch.Generator().manual_seed(1), 12
    parts = [torch.randint(0, 3000, (16, length), generator=random) for length in (6, count, 5)]
    ids = torch.cat([*parts, parts[1]], 1)  # something, the words, something else, the words again
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[:, -count:-1]
    assert (logits.argmax(-1) == ids[:, -count + 1 :]).float().mean() > 0.8
    # A blank before a word changes its embedding alike for all words.
    rows = model.get_input_embeddings().weight
    shifts = [rows[tokenizer.get_vocab()[f"Ġ{word}"]] - rows[tokenizer.get_vocab()[word]] for word in ("red", "open")]
    assert torch.allclose(*shifts, atol=1e-6)
