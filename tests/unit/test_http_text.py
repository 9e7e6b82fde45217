"""From sampled tokens to text: pieces give what the whole gives, stop strings are cut off, thoughts removed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from core_support import text_side
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table

from rl_vlm.chat import ChatCodec
from rl_vlm.http.replies import ReplyText, without_thoughts

TABLES = table("thoughts")


@pytest.fixture(scope="module")
def codec(tiny_folder: Path) -> ChatCodec:
    return text_side(tiny_folder).codec


def encode(codec: ChatCodec, text: str) -> list[int]:
    return codec._plain.encode(text, add_special_tokens=False).ids


def in_pieces(codec: ChatCodec, ids: list[int], cuts: list[int], stop: tuple[str, ...]) -> tuple[list[str], list[int]]:
    reply, texts, tokens = ReplyText(codec, stop), [], []
    edges = [0, *sorted(cuts), len(ids)]
    for start, end in pairwise(edges):
        text, released = reply.feed(ids[start:end], last=end == len(ids) and (start, end) == (edges[-2], edges[-1]))
        texts.append(text)
        tokens += released
    return texts, tokens


@pytest.mark.parametrize(
    "text", ["<answer>3</answer>", "naïve 日本 🙂 \u200d x", "  spaces\n\n\ttabs", "<think>a</think>"]
)
def test_token_bytes_join_to_what_the_tokenizer_decodes(codec: ChatCodec, text: str) -> None:
    ids = encode(codec, text)
    assert b"".join(map(codec.token_bytes, ids)).decode() == text == codec.decode(np.array(ids))


@settings(max_examples=200, deadline=None)
@given(data=st.data(), text=st.text(alphabet="ab<é🙂", max_size=12))
def test_pieces_give_what_the_whole_gives(codec: ChatCodec, data: st.DataObject, text: str) -> None:
    ids = encode(codec, text)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    stop = tuple(data.draw(st.lists(st.text(alphabet="ab<é🙂", min_size=1, max_size=3), max_size=2)))
    ends = [(text.index(s) + len(s), text.index(s)) for s in stop if s in text]
    expected = text[: min(ends)[1]] if ends else text
    whole, tokens = ReplyText(codec, stop).feed(ids, last=True)
    assert whole == expected
    texts, pieces = in_pieces(codec, ids, cuts, stop)
    assert "".join(texts) == expected
    assert pieces == list(tokens)
    assert b"".join(codec.token_bytes(ids[k]) for k in tokens).decode("utf-8", "replace").startswith(expected)


@pytest.mark.parametrize("cuts", [[], [1], [2], [1, 2]])
def test_of_two_stop_strings_the_one_that_is_complete_first_counts(codec: ChatCodec, cuts: list[int]) -> None:
    assert "".join(in_pieces(codec, encode(codec, "a<<"), cuts, ("<", "a<<"))[0]) == "a"


def test_a_split_character_waits_for_its_other_half(codec: ChatCodec) -> None:
    ids = encode(codec, "🙂!")
    assert len(ids) >= 5
    reply = ReplyText(codec)
    assert [reply.feed([token], last=False)[0] for token in ids] == ["", "", "", "🙂", "!"]


def test_what_may_become_a_stop_string_is_held_back_and_released(codec: ChatCodec) -> None:
    reply = ReplyText(codec, ["aab"])
    fed = [reply.feed(encode(codec, letter), last=False)[0] for letter in "xaaab"]
    assert "".join(fed) == "xa"
    reply = ReplyText(codec, ["aab"])
    fed = [reply.feed(encode(codec, letter), last=letter == "c")[0] for letter in "xaac"]
    assert fed == ["x", "", "", "aac"]


@pytest.mark.parametrize(("text", "expected"), TABLES["thoughts_are_removed"])
def test_thoughts_are_removed(text: str, expected: str) -> None:
    assert without_thoughts(text) == expected


def test_every_id_has_the_bytes_that_the_tokenizer_decodes(codec: ChatCodec) -> None:
    for token_id in range(codec.num_known_tokens):
        assert codec.token_bytes(token_id).decode("utf-8", "replace") == codec._tokenizer.decode([token_id])
