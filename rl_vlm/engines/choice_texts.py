"""The texts of a guided choice as tokens, and which of them no sample could ever be. Without torch: HTTP asks before the engine does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rl_vlm.engines.base import EngineError
from rl_vlm.types import GenerationRequest, SamplingParams, UserInputError

TokenSequence = tuple[int, ...]
Encode = Callable[[str], np.ndarray]
Decode = Callable[[np.ndarray], str]


def choice_tokens(sampling: SamplingParams, encode: Encode, decode: Decode) -> tuple[TokenSequence, ...]:
    """The choices as token ids, each in the tokenizer's own tokenisation. Raises UserInputError.

    Only that tokenisation may be sampled: it is the one that the model has learned, and every text has one log-probability.
    """
    sequences = []
    for choice in sampling.choices:
        ids = encode(choice)
        if decode(ids) != choice:
            raise UserInputError(
                f"The tokenizer cannot write the choice {choice!r} as it is: normalise the text (NFC)."
            )
        if len(ids) >= sampling.max_new_tokens:
            raise UserInputError(
                f"The choice {choice!r} takes {len(ids) + 1} tokens with its end, and max_new_tokens is "
                f"{sampling.max_new_tokens}: raise it (max_tokens of a chat)."
            )
        if stop := next((stop for stop in sampling.stop if stop in choice), None):
            raise UserInputError(f"The stop string {stop!r} would cut the choice {choice!r}: remove it.")
        sequences.append(tuple(ids.tolist()))
    return tuple(sequences)


def encode_choices(request: GenerationRequest, encode: Encode, decode: Decode) -> tuple[TokenSequence, ...]:
    """`choice_tokens` of a request in the engine. Raises EngineError."""
    try:
        return choice_tokens(request.sampling, encode, decode)
    except UserInputError as error:
        raise EngineError(f"Request {request.request_id}: {error}") from error
