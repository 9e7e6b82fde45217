"""The metrics of one update: sums over sampled tokens, and the averages that are logged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Metrics = dict[str, float]


@dataclass(slots=True)
class UpdateStats:
    """Sums over sampled tokens, so that they can be added across micro-batches and learners."""

    tokens: float = 0.0
    loss: float = 0.0
    clipped: float = 0.0
    entropy: float = 0.0  # NaN where it is not measured
    logprob: float = 0.0
    value_loss: float = 0.0
    kl: float = 0.0
    approx_kl: float = 0.0
    mismatch_kl: float = 0.0
    mismatch_prob: float = 0.0
    masked: float = 0.0  # tokens that a mask of algorithm.mismatch left out
    ratio_max: float = 0.0
    grad_norm: float = 0.0
    steps: int = 0
    skipped_steps: int = 0  # the gradient was not finite
    lr: float = 0.0
    first_ratio_error: float = 0.0  # largest |ratio - 1| on the first minibatch, where it was probed: must be exactly 0

    @classmethod
    def merge(cls, parts: Sequence[UpdateStats]) -> UpdateStats:
        """The statistics of all learners together."""
        merged = cls(grad_norm=parts[0].grad_norm, steps=parts[0].steps, skipped_steps=parts[0].skipped_steps)
        sums = ("tokens", "loss", "clipped", "entropy", "logprob", "value_loss", "kl", "approx_kl")
        for name in (*sums, "mismatch_kl", "mismatch_prob", "masked"):
            setattr(merged, name, sum(getattr(part, name) for part in parts))
        for name in ("ratio_max", "first_ratio_error"):
            setattr(merged, name, max(getattr(part, name) for part in parts))
        return merged

    def metrics(self) -> Metrics:
        """Averages under the names that are logged."""
        tokens = max(self.tokens, 1.0)
        steps = max(self.steps, 1)
        return {
            "policy/loss": self.loss / steps,
            "policy/kl": self.kl / tokens,
            "policy/approx_kl": self.approx_kl / tokens,
            "policy/entropy": self.entropy / tokens,
            "policy/token_logprob_mean": self.logprob / tokens,
            "policy/clip_fraction": self.clipped / tokens,
            "policy/ratio_max": self.ratio_max,
            "policy/grad_norm": self.grad_norm / steps,
            "policy/lr": self.lr,
            "policy/optimizer_steps": float(self.steps),
            "policy/skipped_steps": float(self.skipped_steps),
            "policy/first_ratio_error": self.first_ratio_error,
            "mismatch/kl": self.mismatch_kl / tokens,
            "mismatch/token_mult_prob_error": self.mismatch_prob / tokens if self.tokens else 1.0,
            "mismatch/masked": self.masked / tokens,
        }
