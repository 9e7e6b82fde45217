"""First weights with which a tiny model copies: what follows a word in the prompt is likely to follow it again.

Large models learn this early on (induction heads: arXiv 2209.11895). One of a million weights does not within minutes,
so its first two layers begin with it. The residual stream has three parts: a token's own embedding, the code of the
token before it, and one dimension that is the same everywhere.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

OWN = 64  # dimensions of the embedding; the code of the token before stands behind them, the constant in the last
_CODE = 22  # dimensions of that code
_SHARPNESS = 3.0  # of queries and keys
_CONSTANT, _GAIN = 0.3, 0.3
_SLOW = 0.02  # rotary frequencies below this hardly see a distance


@torch.no_grad()
def begin_with_copying(model: Any, vocabulary: dict[str, int]) -> None:
    """Set the first weights of a Qwen3-VL of at least OWN + _CODE + 1 dimensions in place; the rest stays random, but
    smaller. vocabulary: byte-level tokens, where "Ġ" is a blank."""
    text, random = model.model.language_model, torch.Generator().manual_seed(0)
    embeddings = text.embed_tokens.weight
    embeddings[:, OWN:] = 0
    embeddings[:, -1] = _CONSTANT
    _relate_spellings(embeddings, vocabulary, random)
    rotation = torch.linalg.qr(torch.randn(OWN, OWN, generator=random))[0]
    for number, layer in enumerate(text.layers):
        layer.mlp.down_proj.weight *= 0.03
        layer.self_attn.o_proj.weight *= 0.02 if number < 2 else 0.05
    _look_one_back(text.layers[0].self_attn, text.config, rotation)
    _follow_the_same(text.layers[1].self_attn, text.config, rotation)


def _relate_spellings(embeddings: Tensor, vocabulary: dict[str, int], random: torch.Generator) -> None:
    """A word with a blank before it, or with a capital, is the word and a shift."""
    blank, capital = (torch.randn(OWN, generator=random) * 0.06 for _ in range(2))
    for name, row in vocabulary.items():
        word, shift = name.removeprefix("Ġ"), torch.zeros(OWN)
        if word != name:
            shift = shift + blank
        if len(word) > 1 and word[0].isupper() and word.lower() in vocabulary:
            word, shift = word.lower(), shift + capital
        if word and word != name and word in vocabulary:
            embeddings[row, :OWN] = embeddings[vocabulary[word], :OWN] + shift


def _frequencies(config: Any) -> list[float]:
    half = config.head_dim // 2
    return [config.rope_parameters["rope_theta"] ** (-pair / half) for pair in range(half)]


def _look_one_back(attention: Any, config: Any, rotation: Tensor) -> None:
    """Head 0 attends to the token before, whose code it writes behind the embedding. Its query and key depend on the
    position alone: their fast frequencies agree at a distance of one."""
    size, half = config.head_dim, config.head_dim // 2
    attention.q_norm.weight.fill_(_SHARPNESS)
    attention.k_norm.weight.fill_(_SHARPNESS)
    attention.q_proj.weight[:size] = attention.k_proj.weight[:size] = attention.v_proj.weight[:size] = 0
    for pair, frequency in enumerate(_frequencies(config)[:3]):
        attention.q_proj.weight[pair, -1] = 1
        attention.k_proj.weight[pair, -1] = math.cos(frequency)
        attention.k_proj.weight[pair + half, -1] = math.sin(frequency)
    attention.v_proj.weight[:_CODE, :OWN] = _GAIN * rotation[:_CODE]
    attention.o_proj.weight[:, :size] = 0
    attention.o_proj.weight[OWN : OWN + _CODE, :_CODE] = _GAIN * torch.eye(_CODE)


def _follow_the_same(attention: Any, config: Any, rotation: Tensor) -> None:
    """One head of each key-value head looks for places whose token before is the present one, and writes the embedding
    of what stands there, each head one part of it."""
    size, half = config.head_dim, config.head_dim // 2
    attention.q_norm.weight.fill_(_SHARPNESS)
    attention.k_norm.weight.fill_(_SHARPNESS)
    slow = [pair for pair, frequency in enumerate(_frequencies(config)) if frequency < _SLOW][: _CODE // 2]
    places = [*slow, *(pair + half for pair in slow)]
    for head in range(config.num_key_value_heads):
        keys = slice(head * size, (head + 1) * size)
        first = head * config.num_attention_heads // config.num_key_value_heads * size
        queries = slice(first, first + size)
        attention.q_proj.weight[queries] = attention.k_proj.weight[keys] = attention.v_proj.weight[keys] = 0
        for number, place in enumerate(places):
            attention.q_proj.weight[first + place, :OWN] = rotation[number]
            attention.k_proj.weight[head * size + place, OWN + number] = 1
        attention.v_proj.weight[keys, :OWN] = rotation[keys]
        attention.o_proj.weight[:, queries] = 0
        attention.o_proj.weight[:OWN, queries] = _GAIN * rotation[keys].T
