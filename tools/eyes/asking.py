"""Pictures with what a person would ask of them: each generator draws a new one, with the right answer and wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from PIL import Image

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


class Asked(NamedTuple):
    """A question about pictures. others: wrong answers of the same kind."""

    pictures: list[Image.Image]
    question: str
    answer: str
    others: list[str]


Kind = Callable[[Random], Asked]
KINDS: dict[str, Kind] = {}


def kind(draw: Kind) -> Kind:
    KINDS[draw.__name__] = draw
    return draw


def others_of(answer: str, all_: list[str]) -> list[str]:
    return [one for one in dict.fromkeys(all_) if one != answer]


def near(number: int, least: int, most: int) -> list[str]:
    return [str(n) for n in range(max(least, number - 4), min(most, number + 4) + 1) if n != number]


def counted(rng: Random, pictures: list[Image.Image], asked: str, n: int, least: int, most: int) -> Asked:
    if rng.random() < 0.15 and most <= 10:
        return Asked(
            pictures,
            asked + rng.choice([" Write the number as a word.", " In words."]),
            NUMBERS[n],
            [NUMBERS[k] for k in range(least, most + 1) if k != n],
        )
    return Asked(pictures, asked, str(n), near(n, least, most))
