"""All generators of pictures, by name, and how often each is drawn."""

from __future__ import annotations

from random import Random

from tools.eyes import measures, pages, relations, signs, things, ways
from tools.eyes.asking import KINDS, Asked

MODULES = (things, relations, measures, ways, signs, pages)  # importing one registers its generators
_OFTEN = {"digit": 3, "letter": 3, "word": 3}  # reading takes longest to learn
_OFTEN |= dict.fromkeys(("count", "count_by", "maze", "buttons", "table", "price", "dial", "clock"), 2)
WEIGHTS = [_OFTEN.get(name, 1) for name in KINDS]


def seen(rng: Random) -> Asked:
    return rng.choices(list(KINDS.values()), WEIGHTS)[0](rng)
