"""What a policy learns from a teacher: advantages, and divergences as a loss.

Shapes: T sampled tokens of a trajectory, N of a micro-batch, K tokens that the teacher finds most likely.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import numpy as np

from rl_vlm.config import TeacherModelSection
from rl_vlm.learning.experience import Arrays, Estimate

if TYPE_CHECKING:
    from torch import Tensor  # the driver computes no losses


def toward_teacher(
    gaps: Mapping[str, np.ndarray], rewarded: Estimate | None, settings: TeacherModelSection
) -> Estimate:
    """Advantages float32 [T] by trajectory id: `gaps`, log-probabilities of the teacher minus the policy's, with the
    `reverse` divergence, beside what rewards make. Their expected gradient is that of -KL(policy || teacher)
    of each token, later tokens left out (Agarwal et al., arXiv 2306.13649, section 3)."""
    advantages: Arrays = {}
    for name, gap in gaps.items():
        tokens = settings.weight * gap if settings.divergence == "reverse" else np.zeros_like(gap)
        if rewarded is not None:
            tokens = tokens + settings.reward_weight * rewarded.advantages[name]
        advantages[name] = tokens.astype(np.float32)
    return Estimate(advantages)


def divergence(policy: Tensor, teacher: Tensor, kind: Literal["forward", "jsd"]) -> Tensor:
    """Per token [N]: the divergence between the policy and the teacher, which has no tokens but its K most likely ones.

    policy, teacher: log-probabilities of these tokens [N, K], -inf in both where there are fewer.
    forward: KL(teacher || policy). jsd: (KL(teacher || m) + KL(policy || m)) / 2 with their mean m; of the policy's
    other tokens, on which m is half of it, the mass alone counts. Nats.
    """
    known = teacher.isfinite() & policy.isfinite()
    teacher = teacher.masked_fill(~known, -math.inf).log_softmax(-1).masked_fill(~known, 0.0)
    policy = policy.masked_fill(~known, 0.0)
    of_teacher, of_policy = (logprobs.exp() * known for logprobs in (teacher, policy))
    if kind == "forward":
        return (of_teacher * (teacher - policy)).sum(-1)
    mean = ((of_teacher + of_policy) / 2).masked_fill(~known, 1.0).log()
    rest = (1 - of_policy.sum(-1)).clamp(min=0)
    both = of_teacher * (teacher - mean) + of_policy * (policy - mean)
    return (both.sum(-1) + rest * math.log(2)) / 2
