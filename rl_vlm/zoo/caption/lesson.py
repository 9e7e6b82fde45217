"""Lessons of the tiny judge: to say which of two captions fits a drawn scene better, to describe scenes, and to caption
them vaguely.

The right choice is the caption with the higher score in `grade_caption`. The judge does not see the reference: it
writes what it sees, and then its choice (it did not learn to choose at once). Captions leave out, confuse, invent and
repeat things, so that neither their length nor their words give the answer away.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from rl_vlm.types import Split
from rl_vlm.zoo.caption.grading import grade_caption
from rl_vlm.zoo.drawing import COLOURS, CORNERS, KINDS, Shape, render
from rl_vlm.zoo.scenes import lesson as sights
from rl_vlm.zoo.scenes.data import LOOKS, MAX_CAPTIONED, Scene, caption_of, joined, random_scene
from rl_vlm.zoo.tiny.teach import Draw, Exchange

QUESTION = "1 {first} 2 {second} Which fits?"
CHOICES = ("1", "2")
TWIN_SHARE = 0.5  # of the comparisons: the second caption is the first one confused
LEAST_DIFFERENCE = 0.1  # of the scores of two captions that are compared
# Of the lessons; the rest are vague captions. Single shapes teach what colours and kinds look like early.
JUDGE_SHARE, SINGLE_SHARE, CORNER_SHARE = 0.6, 0.1, 0.15

CORPUS = (
    *sights.CORPUS,
    '1 "a red circle at the top left" 2 "a blue square at the bottom right" Which fits? a red circle at the top left: '
    "1\n" * 4,
    '1 "a yellow shape and a triangle at the top right" 2 "a green triangle at the bottom left" Which fits? a green '
    "triangle at the bottom left: 2\n" * 3,
)

_SORTS = (tuple(COLOURS), KINDS, ("top", "bottom"), ("left", "right"))
_OTHERS = {word: [other for other in sort if other != word] for sort in _SORTS for word in sort}


@dataclass(frozen=True, slots=True)
class Comparison:
    scene: Scene
    captions: tuple[str, str]
    scores: tuple[float, float]

    @property
    def better(self) -> str:
        return CHOICES[self.scores[1] > self.scores[0]]


def draw_lesson(rng: Random) -> Exchange:
    """One question of any sort about a scene of the train split."""
    draw = rng.random()
    if draw < JUDGE_SHARE:
        return judge_lesson(random_comparison(rng, "train"))
    draw -= JUDGE_SHARE
    if draw < SINGLE_SHARE:
        return sights.single_lesson(rng)
    draw -= SINGLE_SHARE
    scene = _scene(rng, "train")
    if draw < CORNER_SHARE:
        return sights.corner_lesson(scene, rng.randrange(len(CORNERS)))
    return Exchange("user", (render(scene), sights.CAPTION_QUESTION), sights.vague_caption(rng, scene))


def judge_lesson(comparison: Comparison) -> Exchange:
    """The judge's question; the reply describes the scene and names the better caption."""
    first, second = (f'"{caption}"' for caption in comparison.captions)
    question = QUESTION.replace("{first}", first).replace("{second}", second)
    reply = f"{caption_of(comparison.scene)}: {comparison.better}"
    return Exchange("user", (render(comparison.scene), question), reply)


def random_comparison(rng: Random, split: Split) -> Comparison:
    """Two random captions of a random scene whose scores differ clearly.

    Half of the pairs differ in facts alone, so that a judge has to look.
    """
    scene = _scene(rng, split)
    truth = caption_of(scene)
    while True:
        first = random_caption(rng, scene)
        second = confused(rng, first) if rng.random() < TWIN_SHARE else random_caption(rng, scene)
        scores = [grade_caption(text, [truth]).score for text in (first, second)]
        if abs(scores[0] - scores[1]) >= LEAST_DIFFERENCE:
            pair = [(first, scores[0]), (second, scores[1])]
            rng.shuffle(pair)
            return Comparison(scene, (pair[0][0], pair[1][0]), (pair[0][1], pair[1][1]))


def random_caption(rng: Random, scene: Scene) -> str:
    """A caption that is good or bad in a random way, and to a random degree."""
    left_out = rng.choice((0.0, 0.15, 0.4, 0.6))
    named = [shape for shape in scene if rng.random() >= left_out] or [rng.choice(scene)]
    phrases = [_phrase(rng, shape, left_out) for shape in named]
    if rng.random() < 0.15:  # something that is not there, or something twice
        extra = rng.choice(phrases) if rng.random() < 0.5 else confused(rng, _phrase(rng, rng.choice(scene), left_out))
        phrases.insert(rng.randrange(len(phrases) + 1), extra)
    if rng.random() < 0.3:
        rng.shuffle(phrases)
    caption = joined(phrases)
    return confused(rng, caption) if rng.random() < 0.4 else caption


def confused(rng: Random, caption: str) -> str:
    """The caption with one to three of its facts replaced by others of their sort."""
    words = re.split(r"(\W+)", caption)
    facts = [place for place, word in enumerate(words) if word in _OTHERS]
    for place in rng.sample(facts, min(len(facts), rng.randint(1, 3))):
        words[place] = rng.choice(_OTHERS[words[place]])
    return "".join(words)


def _phrase(rng: Random, shape: Shape, left_out: float) -> str:
    def vaguely(fact: str, vague: str) -> str:
        return vague if rng.random() < left_out else fact

    words = (vaguely(shape.colour, ""), vaguely(shape.kind, "shape"), vaguely(f"at the {CORNERS[shape.quadrant]}", ""))
    return " ".join(filter(None, ("a", *words)))


def _scene(rng: Random, split: Split) -> Scene:
    return random_scene(rng, [rng.choice(LOOKS) for _ in range(rng.randint(1, MAX_CAPTIONED))], split)


def drawer(seed: int) -> Draw:
    rng = Random(f"judge {seed}")
    return lambda: [draw_lesson(rng)]
