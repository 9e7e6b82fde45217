"""The tokenizer that an environment of token ids gets: the model's, or a stand-in of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rl_vlm.types import UserInputError


class Tokenizer(Protocol):
    """What adapters and environments need of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str:
        """The text of token ids."""
        ...


class ByteTokenizer:
    """One token per byte of UTF-8, so every text comes back as it was; id 256 is the end of a sequence."""

    eos_token_id = pad_token_id = 256
    eos_token = pad_token = "<eos>"
    vocab_size = 257

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """The bytes of a text."""
        return list(text.encode(errors="replace")) + [self.eos_token_id] * add_special_tokens

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True, **_: Any) -> str:
        """The text of bytes; what is no UTF-8 becomes U+FFFD."""
        return bytes(int(one) for one in token_ids if 0 <= int(one) < 256).decode(errors="replace")

    def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
        """The ids under the name that transformers gives them."""
        ids = self.encode(text, **kwargs)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def __len__(self) -> int:
        return self.vocab_size


def load_tokenizer(name: str | None) -> Any:
    """The tokenizer of a model folder or hub name; without a name, a ByteTokenizer. Raises UserInputError."""
    if name is None:
        return ByteTokenizer()
    from transformers import AutoTokenizer  # takes seconds

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserInputError(
            f"env.kwargs.tokenizer {name!r} cannot be loaded ({str(error).splitlines()[0][:200]}): name a model folder or a "
            "model of the hub, or leave it out."
        ) from error
