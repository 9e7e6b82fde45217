"""Guided choice: restricts a sample to one of several texts, followed by the end of the turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_vlm.engines.choice_texts import TokenSequence


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
