"""Caption-v0: describe an image in one sentence; drawn scenes, or the rows of a data set with reference captions."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import sqrt
from typing import Annotated, ClassVar, Literal, TypeVar

import snowballstemmer
from pydantic import Field

from rl_vlm.envs.base import Count, EpisodeEnv, Info, Item, Reply
from rl_vlm.envs.data import DataSource, Row, Schema, TableSet, cell_text
from rl_vlm.envs.rows import BadRowError
from rl_vlm.rewards.text import behind_thought
from rl_vlm.types import EncodedImage, Observation, Split
from rl_vlm.zoo.drawing import MAX_IMAGE_SIZE, MIN_IMAGE_SIZE
from rl_vlm.zoo.scenes.data import caption_item, caption_of, picture_of

# Words are compared by their Snowball stems (Porter, http://snowball.tartarus.org) and known synonyms; function words
# do not count. Words alone would reward lists of keywords, so the score is the geometric mean of two F scores: of the
# words, and of the pairs of words that stand near each other in one clause (skip-bigrams, as in ROUGE-S, Lin 2004).
# The pairs say which colour belongs to which thing, and a list of single words has none that are right.

MAX_CHARS = 2000
REACH = 3  # words of a pair are at most so many content words apart
BETA = 0.5  # of the F figures: precision counts more, so that a list of guesses pays no more than one wrong guess
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
_NEGATED = "¬"  # before the stems that follow a negation in its clause: "no circle" does not say that there is one
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


PROMPTS = {
    "full": "Describe the image in one sentence: what is there, what it looks like, and where. Name each thing once.",
    "brief": "Caption?",
}


CaptionItem = tuple[EncodedImage, tuple[str, ...]]  # an image and its reference captions


def read_item(row: Row) -> CaptionItem:
    """An image with one reference caption, or a list of them."""
    caption = row.cells["caption"]
    references = tuple(map(cell_text, caption if isinstance(caption, list) else [caption]))
    if not references or "" in references:
        raise BadRowError("the caption is empty or not text.")
    if not any(grade_caption(reference, references).score == 1 for reference in references):
        reason = grade_caption(references[0], references).reason
        raise BadRowError(f"the caption {references[0][:80]!r} would not be paid as an answer ({reason}).")
    return row.image(row.cells["image"]), references


@lru_cache(maxsize=4096)
def drawn_item(split: Split, index: int, seed: int, image_size: int) -> CaptionItem:
    """A drawn item with its picture; cached for the copies of a group."""
    scene = caption_item(split, index, seed)
    return picture_of(scene, image_size), (caption_of(scene),)


class CaptionEnv(EpisodeEnv):
    """One image to describe; the reward, 0 to 1, is how well it agrees with a reference in precision and recall.

    data: a data set with the columns `image` and `caption` (a text, or several); without it scenes of one to three
    shapes are drawn. docs/environments.md lists the other arguments and what `info` holds.
    """

    name = "Caption-v0"
    metrics: ClassVar[Mapping[str, tuple[float, ...]]] = {"score": ()}

    def __init__(
        self,
        data: DataSource | None = None,
        *,
        prompt: Literal["full", "brief"] = "full",
        image_size: Annotated[int, Field(ge=MIN_IMAGE_SIZE, le=MAX_IMAGE_SIZE)] = 64,
        seed: int = 0,
        num_train: Count = 16_384,
        num_test: Count = 512,
    ) -> None:
        rows = TableSet(Schema(read_item, ("image", "caption")), data) if data else None
        super().__init__(num_train=num_train, num_test=num_test, rows=rows)
        self._drawn = (seed, image_size)
        self._question = PROMPTS[prompt]

    def open(self, item: Item) -> Observation:
        shown: CaptionItem = self.row(item) or drawn_item(item.split, item.index, *self._drawn)
        image, self._references = shown
        return Observation.user(image, self._question)

    def reply(self, text: str) -> Reply:
        grade = grade_caption(text, self._references)
        info: Info = {**asdict(grade), "well_formed": not grade.reason, "reference": self._references[0]}
        return Reply(grade.score, None, info)
