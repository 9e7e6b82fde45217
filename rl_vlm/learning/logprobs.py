"""Log-probabilities of given tokens, computed without logits of all positions in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from rl_vlm.models.backbone import Backbone

# Up to this many logits at once are kept for the backward pass; beyond it, chunks are recomputed instead.
_KEEP_LOGITS = 1 << 22


def token_logprobs(
    backbone: Backbone, hidden: Tensor, targets: Tensor, temperature: float, chunk_size: int = 256
) -> tuple[Tensor, Tensor]:
    """Log-probabilities float32 [N] of `targets` int64 [N] from hidden states [N, D], and the entropies [N].

    The token mask and the temperature are the engine's. With a large vocabulary the positions go in chunks whose
    logits are recomputed in the backward pass, so memory is chunk_size × vocabulary.
    """
    if hidden.shape[0] * backbone.token_bias.shape[0] <= _KEEP_LOGITS:
        return _chunk(backbone, hidden, targets, temperature)
    parts = [
        checkpoint(
            _chunk,
            backbone,
            hidden[start : start + chunk_size],
            targets[start : start + chunk_size],
            temperature,
            use_reentrant=False,
        )
        for start in range(0, hidden.shape[0], chunk_size)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(backbone: Any, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(backbone.logits(hidden) / temperature, dim=-1)
    # Suppressed tokens have probability 0 and log-probability -inf; they add nothing to the entropy. The bound keeps
    # 0 · -inf out of the value, and is small enough that the gradient's 0 · bound cannot overflow either.
    entropy = -(logprobs.exp() * logprobs.clamp(min=-1e4)).sum(dim=-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropy
