"""Tests whether a model uses images: its accuracy on questions about a picture, with the picture and with a blank one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rl_vlm.models.supervised import DialogueEncoder, collate, token_logprobs
from rl_vlm.zoo.shapes import data

_ROWS = 64  # per forward pass


@dataclass(frozen=True, slots=True)
class SightReport:
    """Accuracy of the likeliest answer with the real picture and with a blank one, and that of guessing."""

    real: float
    blank: float
    chance: float

    @property
    def sees(self) -> bool:
        """Whether accuracy with the picture is at least 0.2 higher."""
        return self.real >= self.blank + 0.2


def choice_logprobs(
    model: Any, encoder: DialogueEncoder, pixels: Sequence[np.ndarray], questions: Sequence[data.Question]
) -> list[np.ndarray]:
    """Per question, the log-probability of each of its choices as a whole turn, end of turn included."""
    device = next(model.parameters()).device
    examples = [
        encoder.encode([image], [("user", question.text, data.format_answer(choice))])
        for image, question in zip(pixels, questions, strict=True)
        for choice in question.choices
    ]
    flat: list[np.ndarray] = []
    for start in range(0, len(examples), _ROWS):
        arguments, targets = collate(examples[start : start + _ROWS], encoder.pad_token_id)
        arguments = {name: value.to(device) for name, value in arguments.items()}
        with torch.no_grad():
            flat.append(token_logprobs(model, arguments, targets.to(device)).sum(1).cpu().numpy())
    ends = np.cumsum([len(question.choices) for question in questions])
    return np.split(np.concatenate(flat), ends[:-1])


def sees(model: Any, encoder: DialogueEncoder, num_questions: int = 96, seed: int = 0) -> SightReport:
    """Ask perception questions about drawings of the test split, with the drawing and with a blank one."""
    rng = data.stable_rng("sight", seed)
    asked = [data.perception_question(rng, "test") for _ in range(num_questions)]
    questions = [question for question, _ in asked]
    blank = np.full_like(asked[0][1], data.BACKGROUND)
    return SightReport(
        real=accuracy(choice_logprobs(model, encoder, [pixels for _, pixels in asked], questions), questions),
        blank=accuracy(choice_logprobs(model, encoder, [blank] * num_questions, questions), questions),
        chance=float(np.mean([1 / len(question.choices) for question in questions])),
    )


def accuracy(logprobs: Sequence[np.ndarray], questions: Sequence[data.Question]) -> float:
    """How often the likeliest choice is right."""
    right = [
        question.choices[int(values.argmax())] == question.answer
        for values, question in zip(logprobs, questions, strict=True)
    ]
    return float(np.mean(right))


def sampled_accuracy(logprobs: Sequence[np.ndarray], questions: Sequence[data.Question]) -> float:
    """How often a turn sampled at temperature 1 is right: the mean probability of the right one."""
    right = [
        np.exp(values[question.choices.index(question.answer)])
        for values, question in zip(logprobs, questions, strict=True)
    ]
    return float(np.mean(right))
