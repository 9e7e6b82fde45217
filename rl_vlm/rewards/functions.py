"""Built-in reward functions with TRL's signature: lists of completions and of columns give a list of rewards.

A completion is a text, or a list of messages whose last one holds the answer. `answer` holds for each completion the
right answer, or a list of the answers that are accepted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rl_vlm.rewards.coordinates import BRACKETS, box_of, overlap, point_of
from rl_vlm.rewards.math import is_equal
from rl_vlm.rewards.text import usual_width
from rl_vlm.rewards.truths import bare_truth
from rl_vlm.safe_text import without_thoughts

Completion = str | Sequence[dict[str, Any]]
RewardFunction = Callable[..., Any]

MAX_CHARS = 2000  # of a completion's end, where its answer is
_MOST = 1000  # characters that ANLS compares
_SPACES = re.compile(r"\s+")
_FULL_STOP = re.compile(r"(?<=[^. ]) ?[.。]$")
# Fonts, spaces and dollar signs of TeX, emphasis and quotes around an option's letter.
_MARKUP = re.compile(r"\\(?:(?:text|math|bold)[a-z]*|left|right|bf|rm)(?![a-z])|\\[()\[\],;!]|[{}$*`'\"]")
_OPTION = re.compile(
    r"\s*(?:option|choice|选项?)?\s*[(\[<【「〔]?\s*([A-Z])\s*(?:[])>】」〕:、]|[.,]?\s*$|\.?(?=\n)|\.(?=\s|[^\x00-\x7f])|\s[-–—(])",
    re.IGNORECASE,
)
# A second option behind the first makes no answer: letters alone, one in brackets or of a list, "or B" at the end.
_SECOND = re.compile(
    r"(?:\W*\b[A-Z]\b)+\W*\Z|.*(?:(?<!\w)[(\[][A-Ja-j][)\]]|(?<=[\w,;] )[A-J][).:](?=\s)"
    r"|(?:\b(?:or|and|maybe|not|also)\b|[/&|,;])\s*[A-J]\W*$)|(?s:.*)\n\W*[A-J][).:]\s"
)
_THINK_ANSWER = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"
_SAME_BOX = 0.5  # IoU from which a box is found, as PASCAL VOC counts (Everingham et al. 2010, section 4.2)


def text_of(completion: Completion) -> str:
    """The text of a completion; of messages that of the last one."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def stated_answer(completion: Completion) -> str:
    r"""What a completion gives as its answer, outside of thoughts: in `<answer>` tags or a `\\boxed{}`, after "Answer:"
    or "####" in the last line, or all of it."""
    return bare_truth(without_thoughts(text_of(completion))[-MAX_CHARS:])


def is_right(completion: Completion, accepted: Sequence[str]) -> bool:
    """Whether a completion states one of the accepted answers: as a text, a mathematical value, or a box."""
    said = stated_answer(completion)
    return any(
        _same_text(said, truth)
        or is_equal(said, truth)
        or (BRACKETS.fullmatch(truth) and overlap(said, truth) >= _SAME_BOX)
        for truth in accepted
    )


def exact(completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 for the same text as an accepted answer; case, spaces, the width of letters and the full stop at the end do not
    count."""
    return _best(completions, answer, lambda said, truth: float(_same_text(said, truth)))


def math(completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 for the same mathematical value as an accepted answer, without tolerance; see `rl_vlm.rewards.math`."""
    return _best(completions, answer, lambda said, truth: float(is_equal(said, truth)))


def choice(completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 for the letter of the right option: `B`, `(b)`, `\\textbf{(B)}` and `B. a cat` are the same. Several options
    are no answer."""
    return _best(completions, answer, lambda said, truth: float(_option(said) == _option(truth) != ""))


def _option(text: str) -> str:
    """The letter of the option that a text names, or "": "A cat" and "A or B" name none."""
    text = _MARKUP.sub("", usual_width(text).replace("\\ ", " ")).strip()
    found = _OPTION.match(text)
    if found is None or _SECOND.match(text, found.end()):
        return ""
    return (found[1] or found[2]).lower()


def format_(completions: Sequence[Completion], pattern: str = _THINK_ANSWER, **_: Any) -> list[float]:
    """1 if the whole completion matches a regular expression, in which a point matches line breaks too; by default
    `<think>...</think><answer>...</answer>`."""
    return [float(bool(re.fullmatch(pattern, text_of(one), re.DOTALL))) for one in completions]


def iou(completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float]:
    """Intersection over union of two boxes, x1 y1 x2 y2 in the units of the data: |A ∩ B| / |A ∪ B|, from 0 to 1."""
    return _best(completions, answer, overlap)


def point_in_box(
    completions: Sequence[Completion],
    answer: Sequence[Any],
    image: Sequence[Any] | None = None,
    point_unit: float | None = None,
    box_unit: float | None = None,
    **_: Any,
) -> list[float]:
    """1 for a point (or the centre of a box) within the box x1 y1 x2 y2, as ScreenSpot counts (arXiv 2401.10935).

    A unit is what the image's width and height are in: 1, 1000 as Qwen3-VL writes them, or None for pixels. Where the
    point has another than the box, the size of the first `image` converts them.
    """

    def hits(size: tuple[int, int], said: str, truth: str) -> float:
        point, box = point_of(said), box_of(truth)
        if point is None or box is None:
            return 0.0
        x, y = (one * (box_unit or side) / (point_unit or side) for one, side in zip(point, size, strict=True))
        return float(box[0] <= x <= box[2] and box[1] <= y <= box[3])

    sizes = [(1, 1) if one is None else one.size for one in image or [None] * len(completions)]
    each = zip(completions, answer, sizes, strict=True)
    return [_best([completion], [box], partial(hits, size))[0] for completion, box, size in each]


def anls(completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float]:
    """The similarity of document questions (ANLS; Biten et al. 2019, arXiv 1905.13648, equation 1).

    s = 1 - NL if NL < 0.5, else 0, where NL is Levenshtein's distance divided by the longer length; the best of the
    accepted answers counts.
    """

    def similarity(said: str, truth: str) -> float:
        ours, theirs = _plain(said)[:_MOST], _plain(truth)[:_MOST]
        longest = max(len(ours), len(theirs), 1)
        if abs(len(ours) - len(theirs)) / longest >= 0.5:  # the distance is at least the difference
            return 0.0
        distance = _levenshtein(ours, theirs) / longest
        return 1 - distance if distance < 0.5 else 0.0

    return _best(completions, answer, similarity)


FUNCTIONS: dict[str, RewardFunction] = {
    "exact": exact, "math": math, "choice": choice, "format": format_, "iou": iou,
    "point_in_box": point_in_box, "anls": anls,
}  # fmt: skip


def _best(completions: Sequence[Completion], answers: Sequence[Any], rate: Callable[[str, str], float]) -> list[float]:
    """For each completion the best rating against its accepted answers."""
    rewards = []
    for completion, answer in zip(completions, answers, strict=True):
        said = stated_answer(completion)
        is_box = isinstance(answer, list | tuple) and all(isinstance(one, int | float) for one in answer)
        accepted = [json.dumps(answer)] if is_box else answer if isinstance(answer, list | tuple) else [answer]
        rewards.append(max((rate(said, bare_truth(str(truth))) for truth in accepted), default=0.0))
    return rewards


def _plain(text: str) -> str:
    return _FULL_STOP.sub("", _SPACES.sub(" ", usual_width(text)).strip()).casefold()


def _same_text(said: str, truth: str) -> bool:
    return _plain(said) == _plain(truth)


def _levenshtein(one: str, other: str) -> int:
    """The number of characters to insert, delete or replace."""
    row = list(range(len(other) + 1))
    for number, character in enumerate(one, start=1):
        before, row[0] = row[0], number
        for place, wanted in enumerate(other, start=1):
            before, row[place] = (
                row[place],
                min(row[place] + 1, row[place - 1] + 1, before + (character != wanted)),
            )
    return row[-1]
