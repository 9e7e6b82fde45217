"""Group-relative advantages."""

from __future__ import annotations

from typing import Literal

import numpy as np

Normalization = Literal["std", "none"]


def group_advantages(
    rewards: np.ndarray, normalization: Normalization = "std", scale: float = 1.0, eps: float = 1e-6
) -> np.ndarray:
    """Advantages float64 [G] of one group: reward minus the group's mean.

    "std" divides by the unbiased standard deviation plus `eps` (GRPO: DeepSeekMath, arXiv 2402.03300, section 4.1);
    "none" does not (Dr. GRPO: arXiv 2503.20783). Equal rewards give exactly zero, and so does a group of one.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if len(rewards) < 2 or np.all(rewards == rewards[0]):
        # Said outright: the mean of equal floats need not be that float.
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    if normalization == "std":
        centred = centred / (rewards.std(ddof=1) + eps)
    return np.asarray(centred * scale)
