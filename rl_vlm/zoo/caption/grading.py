"""Grades a caption by the words that it shares with a reference, and by which of them stand together."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import TypeVar

import snowballstemmer

from rl_vlm.rewards.text import behind_thought

# Words are compared by their Snowball stems (Porter, http://snowball.tartarus.org) and known synonyms; function words
# do not count. Words alone would reward lists of keywords, so the score is the geometric mean of two F scores: of the
# words, and of the pairs of words that stand near each other in one clause (skip-bigrams, as in ROUGE-S, Lin 2004).
# The pairs say which colour belongs to which thing, and a list of single words has none that are right.

MAX_CHARS = 2000
REACH = 3  # words of a pair are at most so many content words apart
BETA = 0.5  # of the F scores: precision counts more, so that a list of guesses scores no higher than one wrong guess
LONG_CLAUSE = 8  # content words; a clause that is longer, and longer than any reference's by REACH, is a list

Unit = TypeVar("Unit")

_TOKEN = re.compile(r"[^\W_]+(?:['’][^\W_]+)?|[,.;:!?\n|/•]|-{2,}")
_NO_CONTENT = (
    "a an the this that these those some any it its they their there here he she his her we i you is are was were be "
    "been being am has have had do does did of at in on to by for with from as into onto over under up out off near "
    "next and or but while which who whose what where when than then so very also just can will would there's located "
    "positioned situated placed contains containing image picture photo photograph drawing scene shows show showing "
    "shown see seen caption"
)
_FUNCTION_WORDS = frozenset(_NO_CONTENT.split())
_BREAKS = frozenset(("and", "or", "but", "while"))
_NEGATIONS = frozenset(("no", "not", "never", "without", "neither", "nor", "cannot"))  # and "isn't"
_NEGATED = "¬"  # before the stems that follow a negation in its clause: "no circle" does not claim a circle
# "at the top left corner": at the top left
_CORNER = re.compile(r"\b(left|right)(?:[- ]hand)?[- ](?:corner|quadrant)\b")
# Words that are one in captions, whatever their stems.
SYNONYMS: tuple[tuple[str, ...], ...] = (
    ("0", "zero"), ("1", "one"), ("2", "two"), ("3", "three"), ("4", "four"), ("5", "five"), ("6", "six"),
    ("circle", "disc", "disk", "dot", "round"), ("top", "upper"), ("bottom", "lower"), ("left", "lefthand"),
    ("right", "righthand"), ("gray", "grey"), ("man", "men", "guy", "gentleman"), ("woman", "women", "lady"),
    ("child", "children", "kid"), ("bicycle", "bike"), ("sofa", "couch"), ("television", "tv"), ("airplane", "aeroplane", "plane"),  # noqa: E501
    ("big", "large"), ("little", "small"), ("street", "road"), ("phone", "cellphone", "telephone"), ("person", "people"),  # noqa: E501
)  # fmt: skip
_STEMMER = snowballstemmer.stemmer("english")
_STEMMER_LOCK = threading.Lock()  # it keeps the word that it works on in itself


@dataclass(frozen=True, slots=True)
class CaptionGrade:
    """score, in [0, 1]: the geometric mean of F0.5 of words and of pairs, times `length`; 0 with a `reason`.

    precision, recall and f1 are those of words. length: below 1 if the caption is much longer than every reference.
    Reasons: those of `behind_thought`, empty, list (a clause of far too many content words), repetition (a clause that
    comes more than twice, and more often than in the reference).
    """

    score: float = 0.0
    f1: float = 0.0
    precision: float = 0.0
    recall: float = 0.0
    length: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a caption: its clauses as stems, and how many words it has in all."""

    clauses: tuple[tuple[str, ...], ...]
    num_words: int

    @property
    def words(self) -> Counter[str]:
        return Counter(stem for clause in self.clauses for stem in clause)

    @property
    def pairs(self) -> Counter[tuple[str, str]]:
        """How often two stems stand at most REACH apart in a clause, in any order."""
        return Counter(
            (min(first, second), max(first, second))
            for clause in self.clauses
            for place, first in enumerate(clause)
            for second in clause[place + 1 : place + 1 + REACH]
        )


def grade_caption(text: str, references: Sequence[str]) -> CaptionGrade:
    """Grade a caption against the reference that it agrees with best. Repeated and added words cost precision."""
    said, reason = behind_thought(text, MAX_CHARS)
    if reason:
        return CaptionGrade(reason=reason)
    given = read_content(said)
    if not given.clauses:
        return CaptionGrade(reason="empty")
    truths = [read_content(reference) for reference in references]
    longest = max((len(clause) for truth in truths for clause in truth.clauses), default=0)
    if max(map(len, given.clauses)) > max(LONG_CLAUSE, longest + REACH):
        return CaptionGrade(reason="list")
    return max(
        (_grade(given, truth) for truth in truths),
        key=lambda grade: (grade.score, not grade.reason),
        default=CaptionGrade(),
    )


def _grade(given: Content, truth: Content) -> CaptionGrade:
    said, meant = (Counter(clause for clause in content.clauses if len(clause) > 1) for content in (given, truth))
    if any(count > max(2, meant[clause]) for clause, count in said.items()):
        return CaptionGrade(reason="repetition")
    precision, recall, score = agreement(given.words, truth.words)
    if truth.pairs:
        score = sqrt(score * agreement(given.pairs, truth.pairs)[2])
    # 1 up to one and a half times the reference and three words; falls to 0 at twice that.
    length = min(1.0, max(0.0, 2 - given.num_words / (1.5 * truth.num_words + 3)))
    f1 = 2 * precision * recall / ((precision + recall) or 1.0)
    return CaptionGrade(score * length, f1, precision, recall, length)


def agreement(given: Counter[Unit], truth: Counter[Unit]) -> tuple[float, float, float]:
    """(precision, recall, F_beta) of two counts, with BETA. An extra occurrence counts as a mistake."""
    hits = sum(min(count, truth[what]) for what, count in given.items())
    if not hits:
        return 0.0, 0.0, 0.0
    precision, recall = hits / given.total(), hits / truth.total()
    return precision, recall, (1 + BETA**2) * precision * recall / (BETA**2 * precision + recall)


def read_content(text: str) -> Content:
    """Cut a text into clauses of content words, at punctuation and conjunctions."""
    clauses: list[list[str]] = [[]]
    num_words, negated = 0, ""
    for token in _TOKEN.findall(_CORNER.sub(r"\1", text.casefold().replace("’", "'"))):
        if not token[0].isalnum() or token in _BREAKS:
            clauses.append([])
            negated = ""
        num_words += token[0].isalnum()
        if token in _NEGATIONS or token.endswith("n't"):
            negated = _NEGATED
        elif token[0].isalnum() and token not in _FUNCTION_WORDS:
            clauses[-1].append(negated + _meaning(token))
    return Content(tuple(tuple(clause) for clause in clauses if clause), num_words)


@lru_cache(maxsize=65_536)
def _meaning(word: str) -> str:
    return _GROUPS.get(_stem(word), _stem(word))


def _stem(word: str) -> str:
    with _STEMMER_LOCK:
        return str(_STEMMER.stemWord(word))


_GROUPS = {_stem(word): _stem(group[0]) for group in SYNONYMS for word in group}
