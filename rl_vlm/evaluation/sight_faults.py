"""Does the policy see? Names the fault that explains what an engine or a learner does with images.

The engine's log-probabilities of what it sampled are compared with the learner's, recomputed as they should be and
under hypotheses of what may have gone wrong: blank images, images in another order, positions without rows, no adapter.
A hypothesis that explains the engine much better than the truth is the fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rl_vlm.types import RLVLMError, Trajectory

# Mean distance of log-probabilities (nats per token) that arithmetic alone explains, and from which no hypothesis is
# needed.
EXACT, ROUNDED = (1e-4, 1e-3), (0.1, 0.5)
_BETTER = 3.0  # times closer than the truth must a hypothesis be
_UNCHANGED = 1e-6
# Nats: a token that is likelier than this whatever is shown can hardly change, seen or not. Log-probabilities are known
# to 1e-5.
_SURE = 1e-2

HYPOTHESES: dict[str, tuple[str, str]] = {
    "blank": ("engine_blind", "The engine answers as if images were blank: they get lost on the way to the model."),
    "reversed": ("images_swapped", "The engine sees the images of a prompt in another order."),
    "other": ("images_swapped", "The engine answers about the image of another request."),
    "no_rows": ("positions", "The engine drops the height and width rows of image positions (M-RoPE)."),
    "zero_rows": ("positions", "The engine has zeros in the height and width rows of positions (M-RoPE)."),
    "sequential": ("positions", "The engine counts image tokens one by one, without M-RoPE."),
    "one_place": ("positions", "The engine counts all tokens of an image as one position."),
    "base": ("stale_adapter", "The engine answers with the model without its adapter, or with an older one."),
}


class SightError(RLVLMError):
    """The policy does not see its images, or engine and learner see different ones.

    Do: follow the sentence; `sight` in the configuration explains the check.
    """


@dataclass(frozen=True, slots=True)
class Fault:
    """A named fault and a sentence about it; one that does not stop a run says what remains unknown."""

    name: str
    message: str
    stops: bool = True


def distance(engine: Sequence[np.ndarray], learner: Sequence[np.ndarray]) -> float:
    """Mean absolute difference of log-probabilities [T] over all tokens, nats."""
    return float(np.mean(np.abs(np.concatenate(list(engine)) - np.concatenate(list(learner)))))


def explain(distances: Mapping[str, float], limits: tuple[float, float]) -> Fault | None:
    """The fault behind the engine's log-probabilities, if there is one. `distances` from the learner's: "true" and by
    hypothesis. `limits`: EXACT or ROUNDED."""
    true = distances["true"]
    if true <= limits[0]:
        return None
    best = min((name for name in distances if name in HYPOTHESES), key=distances.__getitem__, default=None)
    if best is not None and distances[best] * _BETTER < true:
        name, message = HYPOTHESES[best]
        return Fault(name, f"{message} ({true:.3g} nats per token from the learner, {distances[best]:.3g} if so)")
    if not true <= limits[1]:  # nan too, which no hypothesis explains
        return Fault(
            "disagreement",
            f"Engine and learner give the same tokens log-probabilities that differ by {true:.3g} nats: they see "
            "different images or have different weights.",
        )
    return None


def engine_is_blind(
    true: Sequence[Trajectory], again: Sequence[Trajectory], blank: Sequence[Trajectory]
) -> Fault | None:
    """A fault if the engine answers the same with blank images; `again` repeats `true`, which shows its noise.

    All are sampled with the same seeds, item by item. Where equal answers are all sure the fault does not stop a run: a
    policy that has converged, or that says one thing only, gives them seeing or not.
    """
    seen = []
    for samples in zip(true, again, blank, strict=True):
        (ids, logprobs), (same_ids, same), (blank_ids, changed) = map(_answers, samples)
        # Rounding may let even the repetition part from the answer: what comes after that says nothing.
        firm = _common_prefix(ids, same_ids)
        same_answer = _common_prefix(ids, blank_ids) >= firm
        logprobs, same, changed = logprobs[:firm], same[:firm], changed[:firm]
        if not same_answer:
            seen.append(True)
        elif not (_is_sure(logprobs).all() and _is_sure(changed).all()):
            seen.append(bool(np.abs(logprobs - changed).max() > 3 * np.abs(logprobs - same).max() + 1e-5))
    if not seen:
        return Fault(
            "too_sure",
            "The policy is so sure of its answers, with blank images too, that they do not show whether the engine "
            "sees any.",
            stops=False,
        )
    if np.mean(seen) > 0.25:
        return None
    return Fault("engine_blind", "The engine gives the same answers with blank images: it does not see any.")


def learner_is_blind(true: Sequence[np.ndarray], blank: Sequence[np.ndarray]) -> Fault | None:
    """A fault if the learner's log-probabilities [T] of unsure tokens are the same with blank images."""
    seen, unseen = np.concatenate(list(true)), np.concatenate(list(blank))
    unsure = ~_is_sure(np.minimum(seen, unseen))
    if not unsure.any() or not distance([seen[unsure]], [unseen[unsure]]) <= _UNCHANGED:  # nan says nothing about sight
        return None
    return Fault("learner_blind", "The learner computes the same with blank images: it does not see any.")


def raise_or_warn(faults: Sequence[Fault], mode: str) -> list[str]:
    """The faults as sentences for people. Raises SightError in mode "error" if there are any that stop a run."""
    sentences = [f"{fault.message} [sight: {fault.name}]" for fault in faults]
    if mode == "error" and any(fault.stops for fault in faults):
        raise SightError(" ".join(sentences) + " Set sight.gate to warn to train all the same.")
    return sentences


def _common_prefix(first: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two answers share from the start."""
    length = min(len(first), len(other))
    return int(np.append(first[:length] == other[:length], False).argmin())


def _answers(trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray]:
    """Of all turns: the first image may be a tool's result. Where one answer differs, the rest says nothing."""
    return trajectory.token_ids[trajectory.loss_mask], trajectory.logprobs[trajectory.loss_mask]


def _is_sure(logprobs: np.ndarray) -> np.ndarray:
    return logprobs > -_SURE  # nan is not
