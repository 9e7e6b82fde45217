"""Guided choice: restricts a sample to one of several texts, followed by the end of the turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rl_vlm.engines.base import EngineError
from rl_vlm.types import GenerationRequest, UserInputError

TokenSequence = tuple[int, ...]


def encode_choices(
    request: GenerationRequest, encode: Callable[[str], np.ndarray], decode: Callable[[np.ndarray], str]
) -> tuple[TokenSequence, ...]:
    """The choices of a request as token ids, each in the tokenizer's own tokenisation; raises EngineError.

    Only that tokenisation may be sampled: it is the one that the model has learned, and every text has one log-probability.
    """
    sampling, sequences = request.sampling, []
    for choice in sampling.choices:
        try:
            ids = encode(choice)
        except UserInputError as error:
            raise EngineError(f"Request {request.request_id}: {error}") from error
        if decode(ids) != choice:
            raise EngineError(
                f"Request {request.request_id}: the tokenizer cannot write the choice {choice!r} as it is: "
                "normalise the text (NFC)."
            )
        if len(ids) >= sampling.max_new_tokens:
            raise EngineError(
                f"Request {request.request_id}: the choice {choice!r} takes {len(ids) + 1} tokens with its end, and "
                f"max_new_tokens is {sampling.max_new_tokens}: raise it."
            )
        if stop := next((stop for stop in sampling.stop if stop in choice), None):
            raise EngineError(
                f"Request {request.request_id}: the stop string {stop!r} would cut the choice {choice!r}: remove it."
            )
        sequences.append(tuple(ids.tolist()))
    return tuple(sequences)


@dataclass(slots=True, eq=False)
class ChoiceNode:
    """A state of the token trie: the states that tokens lead to, and whether a choice is complete here."""

    following: dict[int, ChoiceNode] = field(default_factory=dict)
    complete: bool = False

    def allowed(self, end_of_turn_id: int) -> list[int]:
        """The tokens that may come next."""
        return [*self.following, end_of_turn_id] if self.complete else [*self.following]


def choice_trie(sequences: Sequence[TokenSequence]) -> ChoiceNode:
    """The root of the trie of these token sequences."""
    root = ChoiceNode()
    for sequence in sequences:
        node = root
        for token in sequence:
            node = node.following.setdefault(token, ChoiceNode())
        node.complete = True
    return root


def restrict_to_choices(logits: Tensor, nodes: Mapping[int, ChoiceNode], end_of_turn_id: int) -> None:
    """Set everything but the allowed tokens to -inf, in the rows of logits [R, V] that `nodes` (row -> state) names."""
    for row, node in nodes.items():
        allowed = torch.tensor(node.allowed(end_of_turn_id), device=logits.device)
        kept = logits[row, allowed]
        logits[row] = float("-inf")
        logits[row, allowed] = kept
