"""Model folders with a family's true form, reduced widths and random weights: `build(family, folder)`.

True are: the configuration's structure, the processor with its settings, how images stand in a prompt, the names of
special tokens, and the chat template (of those that trl ships, that copy; else written here in the same form). The
vocabulary is of bytes, but for `qwen3_vl_published`, whose tokenizer is Qwen's own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

# Heads of 32, which vLLM's attention on a CPU asks for.
_TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "initializer_range": 0.1,
}  # fmt: skip
_SIGLIP = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "initializer_range": 0.15,
}  # fmt: skip
_QWEN_TOWER = {
    "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64,
    "num_position_embeddings": 64, "initializer_range": 0.15,
}  # fmt: skip
_QWEN_TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def trl_template(name: str) -> str:
    """A template that trl ships, without importing trl."""
    found = importlib.util.find_spec("trl")
    assert found is not None and found.origin is not None
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


def _loop(turn: str, end: str, image: str, start: str = "", prompt: str = "") -> str:
    """A template of the plain form: `turn` before a message, where {role} stands for its role, and `end` after it."""
    before = turn.replace("{role}", "{{ message['role'] }}")
    return (
        f"{start}{{% for message in messages %}}{before}{{% for part in message['content'] %}}"
        f"{{% if part['type'] == 'image' %}}{image}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}{{% endfor %}}{end}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{prompt or turn.replace('{role}', 'assistant')}{{% endif %}}"
    )


_CHATML = _loop("<|im_start|>{role}\n", "<|im_end|>\n", "<image>\n")
_MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}[INST]{% for part in "
    "message['content'] %}{% if part['type'] == 'image' %}[IMG]{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "[/INST]{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
_GLM = _loop("<|{role}|>\n", "", "<|begin_of_image|><|image|><|end_of_image|>", "[gMASK]<sop>")


def byte_level(special: tuple[str, ...], **named: str) -> PreTrainedTokenizerFast:
    """Bytes as tokens, as GPT-2 writes them, and special tokens; `named` gives some of these a name."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Line breaks join, as in every published vocabulary.
    vocab = {piece: number for number, piece in enumerate([*alphabet, "ĊĊ", "Ġa"])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[("Ċ", "Ċ"), ("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _finished(tokenizer, special, named)


def sentence_pieces(special: tuple[str, ...], **named: str) -> PreTrainedTokenizerFast:
    """Characters as tokens, spaces as ▁, the rest as bytes, as Gemma's vocabulary has them."""
    letters = [chr(code) for code in range(33, 127)]
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *letters,
        "\n",
        "\n\n",
        "\n\n\n",
        "\n\n\n\n",
        "▁a",
    ]
    merges = [("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n"), ("▁", "a")]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _finished(tokenizer, special, named)


_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_SPECIAL = (  # from id 151643 on
    "endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start", "box_end", "quad_start",
    "quad_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad",
)  # fmt: skip
_QWEN_ADDED = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip


@cache
def _qwen_published() -> str:
    """Qwen's tokenizer as JSON, of the ranks that its package dashscope ships."""
    (ranks,) = (file for file in metadata.files("dashscope") or () if file.name == "qwen.tiktoken")
    special = [f"<|{name}|>" for name in _QWEN_SPECIAL]
    converter = TikTokenConverter(str(ranks.locate()), pattern=_QWEN_PATTERN, extra_special_tokens=special)
    tokenizer = converter.converted()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in _QWEN_ADDED])
    return tokenizer.to_str()


def qwen_published(special: tuple[str, ...], **named: str) -> PreTrainedTokenizerFast:
    """The tokenizer that Qwen published for Qwen2.5 and Qwen3, whose special tokens have their true ids."""
    return _finished(Tokenizer.from_str(_qwen_published()), special, named)


def _finished(tokenizer: Tokenizer, special: tuple[str, ...], named: Mapping[str, str]) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    usual = {name: token for name, token in named.items() if name in ("bos_token", "eos_token", "pad_token")}
    extra = {name: token for name, token in named.items() if name not in usual}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=extra, **usual)


@dataclass(frozen=True)
class Family:
    """How to build one: classes of transformers by name, and their settings."""

    config: str
    processor: str
    images: str
    text: dict[str, Any]
    vision: dict[str, Any]
    template: Callable[[], str]
    special: tuple[str, ...]
    named: dict[str, str]
    image_token: str
    image_settings: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    processor_settings: dict[str, Any] = field(default_factory=dict)
    video: str = ""
    tokenizer: Callable[..., PreTrainedTokenizerFast] = byte_level
    id_name: str = "image_token_id"


def _rows(side: int) -> tuple[str, ...]:
    return tuple(f"<row_{row}_col_{column}>" for row in range(1, side + 1) for column in range(1, side + 1))


_TILED = ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>", *_rows(4))
_SMOL = {"eos_token": "<end_of_utterance>", "pad_token": "<|im_end|>", "image_token": "<image>"}
_QWEN_IMAGES = {"size": {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}}

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DELTA_NET = {  # heads of 128, which vLLM's kernel on a CPU asks for
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
_QWEN_ROPE = {
    "rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4], "mrope_interleaved": True,
    "partial_rotary_factor": 1.0,
}  # fmt: skip
_QWEN_NAMES = {
    "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>",
}  # fmt: skip


def _qwen(config: str, template: str, text: dict[str, Any], series: str = "Qwen3VL", **tower: Any) -> Family:
    return Family(
        config, f"{series}Processor", "Qwen2VLImageProcessor", {**_TEXT, "rope_parameters": _QWEN_ROPE, **text},
        {**_QWEN_TOWER, **tower}, lambda: trl_template(template), _QWEN_TOKENS, _QWEN_NAMES, "<|image_pad|>",
        {**_QWEN_IMAGES, "patch_size": tower.get("patch_size", 16)},
        video="Qwen2VLVideoProcessor" if series == "Qwen2_5_VL" else "Qwen3VLVideoProcessor",
    )  # fmt: skip


def _tiled(name: str, start: str, video: str = "") -> Family:
    return Family(
        f"{name}Config", f"{name}Processor", f"{name}ImageProcessor", {"model_type": "llama", **_TEXT},
        {"image_size": 32, "patch_size": 8, **_SIGLIP}, lambda: trl_template(name.lower()),
        (start, "<|im_end|>", *_TILED), _SMOL, "<image>",
        {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}, {"scale_factor": 2},
        {"image_seq_len": 4}, video,
    )  # fmt: skip


FAMILIES: dict[str, Family] = {
    "idefics3": _tiled("Idefics3", "<|begin_of_text|>"),
    "internvl": Family(
        "InternVLConfig", "InternVLProcessor", "GotOcr2ImageProcessor",
        {"model_type": "qwen3", **_TEXT}, {"image_size": [32, 32], "patch_size": [8, 8], **_SIGLIP},
        lambda: _loop("<|im_start|>{role}\n", "<|im_end|>\n", "<IMG_CONTEXT>\n"),
        ("<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>"),
        {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "start_image_token": "<img>",
         "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>", "video_token": "<IMG_CONTEXT>"},
        "<IMG_CONTEXT>", {"size": {"height": 32, "width": 32}, "crop_to_patches": True, "max_patches": 4},
        {"image_seq_length": 4}, {"image_seq_length": 4}, "InternVLVideoProcessor",
    ),
    "llava_onevision": Family(
        "LlavaOnevisionConfig", "LlavaOnevisionProcessor", "LlavaOnevisionImageProcessor",
        {"model_type": "qwen2", **_TEXT}, {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8,
         "vision_use_head": False, **_SIGLIP},
        lambda: _CHATML, ("<|im_start|>", "<|im_end|>", "<image>", "<video>"),
        {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "image_token": "<image>", "video_token": "<video>"},
        "<image>", {"size": {"height": 32, "width": 32}, "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]},
        {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]},
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}, "LlavaOnevisionVideoProcessor",
        id_name="image_token_index",
    ),
    "gemma3": Family(
        "Gemma3Config", "Gemma3Processor", "Gemma3ImageProcessor",
        {**_TEXT, "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
         "query_pre_attn_scalar": 32}, {"image_size": 32, "patch_size": 8, "vision_use_head": False, **_SIGLIP},
        lambda: trl_template("gemma3"),
        ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>",
         "<image_soft_token>"),
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "boi_token": "<start_of_image>",
         "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        "<image_soft_token>", {"size": {"height": 32, "width": 32}}, {"mm_tokens_per_image": 4},
        {"image_seq_length": 4}, tokenizer=sentence_pieces, id_name="image_token_index",
    ),
    "qwen3_vl": _qwen("Qwen3VLConfig", "qwen3_vl", {}, deepstack_visual_indexes=[0]),
    "qwen2_5_vl": _qwen(  # attention in windows; no interleaving, which vLLM would do and transformers not
        "Qwen2_5_VLConfig", "qwen2_5_vl", {"rope_parameters": {**_QWEN_ROPE, "mrope_interleaved": False}}, "Qwen2_5_VL", patch_size=14, window_size=56, fullatt_block_indexes=[1]
    ),
    "qwen3_5": _qwen("Qwen3_5Config", "qwen3_5_nothink", _DELTA_NET),
    "smolvlm": _tiled("SmolVLM", "<|im_start|>", "SmolVLMVideoProcessor"),
    "gemma4": Family(
        "Gemma4Config", "Gemma4Processor", "Gemma4ImageProcessor",
        {**_TEXT, "num_hidden_layers": 4, "sliding_window": 12, "hidden_size_per_layer_input": 8,
         "vocab_size_per_layer_input": 400, "global_head_dim": 64, "num_global_key_value_heads": 1,
         "num_kv_shared_layers": 1, "final_logit_softcapping": 30.0,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]},
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.15, "position_embedding_size": 512, "default_output_length": 70},
        lambda: trl_template("gemma4_v5"),
        ("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|image>", "<image|>", "<|image|>", "<|think|>", "<|video|>",
         "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|tool>", "<|audio>", "<audio|>", "<|audio|>"),
        {"bos_token": "<bos>", "eos_token": "<turn|>", "pad_token": "<pad>", "boi_token": "<|image>",
         "eoi_token": "<image|>", "image_token": "<|image|>", "audio_token": "<|audio|>", "boa_token": "<|audio>",
         "eoa_token": "<audio|>"},
        "<|image|>", {"max_soft_tokens": 70, "patch_size": 16}, {}, {}, "Gemma4VideoProcessor", tokenizer=sentence_pieces,
    ),
    "qwen3_5_moe": _qwen(
        "Qwen3_5MoeConfig", "qwen3_5_nothink", {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 24}
    ),
    "qwen3_vl_moe": _qwen(
        "Qwen3VLMoeConfig", "qwen3_vl", {**_EXPERTS, "decoder_sparse_step": 1, "norm_topk_prob": True},
        deepstack_visual_indexes=[0],
    ),
    "mistral3": Family(
        "Mistral3Config", "PixtralProcessor", "PixtralImageProcessor",
        {"model_type": "mistral", "sliding_window": None, **_TEXT},
        {"model_type": "pixtral", "image_size": 96, "patch_size": 8, "head_dim": 16, **_SIGLIP},
        lambda: _MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "image_token": "[IMG]",
         "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        "[IMG]", {"size": {"longest_edge": 96}, "patch_size": {"height": 8, "width": 8}}, {"spatial_merge_size": 2},
        {"patch_size": 8, "spatial_merge_size": 2}, id_name="image_token_index",
    ),
    "glm46v": Family(
        "Glm46VConfig", "Glm46VProcessor", "Glm46VImageProcessor",
        {**_TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4],
                                      "partial_rotary_factor": 1.0}},
        {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64,
         "image_size": 112, "patch_size": 14, "initializer_range": 0.15},
        lambda: _GLM, ("[gMASK]", "<sop>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>",
                       "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>"),
        {"eos_token": "<|user|>", "pad_token": "<|endoftext|>", "image_token": "<|image|>", "video_token": "<|video|>"},
        "<|image|>", {"size": {"shortest_edge": 28 * 28, "longest_edge": 2 * 112 * 112}}, {}, {},
        "Glm46VVideoProcessor",
    ),
    "lfm2_vl": Family(
        "Lfm2VlConfig", "Lfm2VlProcessor", "Lfm2VlImageProcessor",
        {**{name: value for name, value in _TEXT.items() if name != "head_dim"}, "block_ff_dim": 96,
         "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention", "conv"], "block_dim": 64, "conv_dim": 64},
        {"num_patches": 64, "patch_size": 8, "vision_use_head": False, **_SIGLIP},
        lambda: _loop("<|im_start|>{role}\n", "<|im_end|>\n", "<image>", "{{ bos_token }}"),
        ("<|startoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<|image_start|>", "<|image_end|>",
         "<|img_thumbnail|>", *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5))),
        {"bos_token": "<|startoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "image_token": "<image>",
         "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>",
         "image_thumbnail": "<|img_thumbnail|>"},
        "<image>",
        {"tile_size": 64, "max_num_patches": 64, "min_image_tokens": 4, "max_image_tokens": 16, "encoder_patch_size": 8,
         "max_pixels_tolerance": 2.0, "min_tiles": 2, "max_tiles": 4},
        {"projector_hidden_size": 48},
    ),
}  # fmt: skip


_QWEN_IDS = {"video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>"}
# Further ids in a configuration, by its class.
_CONFIG_IDS = {
    "Qwen3VLConfig": _QWEN_IDS, "Qwen2_5_VLConfig": _QWEN_IDS, "Qwen3_5Config": _QWEN_IDS, "Qwen3_5MoeConfig": _QWEN_IDS, "Qwen3VLMoeConfig": _QWEN_IDS,
    "Gemma4Config": {"video_token_id": "<|video|>", "audio_token_id": "<|audio|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>"},
}  # fmt: skip


def _as_on_the_hub(name: str, file: Path) -> None:
    """Rewrite tensors as they are published, and as vLLM asks for them, where transformers writes them otherwise."""
    tensors = load_file(file)
    if name in ("llava_onevision", "gemma3", "lfm2_vl"):  # SigLIP's names have a part more
        tensors = {key.replace("vision_tower.", "vision_tower.vision_model.", 1): own for key, own in tensors.items()}
    if name == "qwen3_vl_moe":  # experts have inputs before outputs
        turned = {key: own.transpose(1, 2).contiguous() for key, own in tensors.items() if ".experts." in key}
        tensors |= turned
    save_file(tensors, file, {"format": "pt"})


FAMILIES["qwen3_vl_published"] = replace(FAMILIES["qwen3_vl"], tokenizer=qwen_published)


def build(name: str, folder: Path, seed: int = 0, dtype: str = "float32", **changes: Any) -> Path:
    """Write the folder of a family, of which `changes` replaces parts; returns it."""
    family = replace(FAMILIES[name], **changes)
    tokenizer = family.tokenizer(family.special, **family.named)
    number = tokenizer.convert_tokens_to_ids
    ids = {f"{kind}_token_id": number(family.named[f"{kind}_token"]) for kind in ("pad", "eos")}
    config_class: Any = getattr(transformers, family.config)
    config = config_class(
        text_config={**family.text, "vocab_size": len(tokenizer) + 6, "max_position_embeddings": 4096, **ids},
        vision_config=family.vision,
        **{family.id_name: number(family.image_token)},
        **family.settings,
        **{name: number(token) for name, token in _CONFIG_IDS.get(family.config, {}).items()},
    )
    torch.manual_seed(seed)
    model: Any = AutoModelForImageTextToText.from_config(
        config, attn_implementation="sdpa", dtype=getattr(torch, dtype)
    )
    with torch.no_grad():
        for weights, parameter in model.named_parameters():
            if weights.endswith("mm_input_projection_weight"):  # zeros in a new model, which would see nothing
                parameter.normal_(std=0.15)
    model.generation_config.eos_token_id = number(family.named["eos_token"])
    model.save_pretrained(folder)
    _as_on_the_hub(name, folder / "model.safetensors")
    images: Any = getattr(transformers, family.images)(**family.image_settings)
    parts = {"image_processor": images, "tokenizer": tokenizer, "chat_template": family.template()}
    if family.video:
        parts["video_processor"] = getattr(transformers, family.video)()
    if name == "gemma4":
        parts["feature_extractor"] = transformers.Gemma4AudioFeatureExtractor()
    processor: Any = getattr(transformers, family.processor)(**parts, **family.processor_settings)
    processor.save_pretrained(folder)
    return folder
