"""What the right answers to the strangers are rewarded with, and constant answers: the best without looking.

The text of each of tests/fixtures/strangers/*.py states both: "Oracle 1, blind best 0.25".
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rl_vlm.envs.registry import make

GIVERS = 30  # items whose right answers are given to all others
_STATED = re.compile(r"Oracle:? (\d+(?:\.\d+)?).*?Blind best:? (\d+(?:\.\d+)?)", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Worth:
    """Rewards of an environment: of the right answers, the least over items, and the best mean of constant answers."""

    oracle: float
    blind: float


def stated(path: Path) -> Worth:
    """What the file says. Raises ValueError for a file that states nothing."""
    found = _STATED.search(path.read_text())
    if found is None:
        raise ValueError(f"{path} must state its rewards in its docstring: Oracle 1, blind best 0.25.")
    return Worth(float(found[1]), float(found[2]))


def measured(path: Path, items: int) -> Worth:
    """Over the first test items. The constant answers are the right ones of train items, turn by turn."""
    env: Any = make(str(path))  # a stranger has `right()`, the right answer to what it shows
    given = [_played_right(env, {"index": index, "split": "train"})[0] for index in range(GIVERS)]
    constants = list(product(*(sorted(set(answers)) for answers in zip(*given, strict=True))))
    tests = [{"index": index, "split": "test"} for index in range(items)]
    totals = [sum(rewards) / items for rewards in zip(*(_rewards(env, one, constants) for one in tests), strict=True)]
    return Worth(min(_played_right(env, one)[1] for one in tests), max(totals))


def holds(said: Worth, found: Worth, items: int) -> bool:
    """Whether every item gives the oracle its full reward, and the best constant answer about the blind best: within
    four standard errors of a share of 0.5."""
    return math.isclose(found.oracle, said.oracle) and abs(found.blind - said.blind) < 2 / math.sqrt(items)


def _played_right(env: Any, options: dict[str, Any]) -> tuple[list[str], float]:
    """The right answers to an item, and the reward of all of them."""
    env.reset(options=options)
    said, total, ended = [], 0.0, False
    while not ended:
        said.append(env.right())
        _, reward, terminated, truncated, _ = env.step(said[-1])
        total, ended = total + reward, terminated or truncated
    return said, total


def _rewards(env: Any, options: dict[str, Any], constants: Sequence[tuple[str, ...]]) -> list[float]:
    """What each sequence of answers gets for an item, which is opened once: drawing takes most of the time."""
    env.reset(options=options)
    copies = [copy.deepcopy(env) for _ in constants]
    return [sum(one.step(text)[1] for text in texts) for one, texts in zip(copies, constants, strict=True)]
