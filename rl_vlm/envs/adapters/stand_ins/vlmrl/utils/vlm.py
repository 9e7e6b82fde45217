"""Token ids to text, as vlm-gym's environments do it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def decode_tokens(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text without special tokens, its spaces as they are."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
