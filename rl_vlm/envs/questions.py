"""Questions about images with one right answer, as `Geo3k-v0` and slime's environments ask them."""

from __future__ import annotations

from dataclasses import dataclass

from rl_vlm.envs.data import Row, Schema, as_list
from rl_vlm.envs.rows import BadRowError
from rl_vlm.rewards.truths import is_value
from rl_vlm.types import EncodedImage, Part

IMAGE_MARKER = "<image>"


@dataclass(frozen=True, slots=True)
class ImageQuestion:
    """A problem with its `<image>` markers, the true answer, the images, and the file and row that it comes from.

    `kind` says what sort of problem it is, where that is known.
    """

    problem: str
    answer: str
    images: tuple[EncodedImage, ...]
    where: str
    kind: str = ""

    def parts(self) -> tuple[Part, ...]:
        """Text and images in reading order: each marker replaced by its image; images first without markers."""
        if IMAGE_MARKER not in self.problem:
            return (*self.images, self.problem)
        texts = self.problem.split(IMAGE_MARKER)
        parts: list[Part] = [texts[0]]
        for image, text in zip(self.images, texts[1:], strict=True):
            parts += [image, text]
        return tuple(part for part in parts if part != "")


def _question(row: Row) -> ImageQuestion:
    problem, answer, images = row.text("problem"), row.truth("answer"), as_list(row.cells["images"])
    markers = problem.count(IMAGE_MARKER)
    if markers and markers != len(images):
        raise BadRowError(f"{markers} {IMAGE_MARKER} markers in the problem, {len(images)} images.")
    return ImageQuestion(problem, answer, tuple(map(row.image, images)), row.where)


def _doubt(question: ImageQuestion) -> str:
    odd = "" if is_value(question.answer) else f"where only an answer that repeats {question.answer[:80]!r} is right"
    odd = odd if question.images else "which has no image"
    return odd and f"{question.where}, {odd}"


QUESTIONS = Schema(_question, ("problem", "answer", "images"), doubt=_doubt)
