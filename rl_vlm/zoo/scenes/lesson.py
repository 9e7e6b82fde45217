"""Lessons of the tiny model for NLVR2-v0 and Caption-v0: the content of scenes, and the form of verdicts and captions.

Questions about perception have right answers. The reply to a statement about two images gives the right counts of the
shapes that it names, and then True or False at random. A caption says nothing false, but leaves out things at random.
Reinforcement learning has to find out which verdict follows from the counts, and what makes a good caption.
"""

from __future__ import annotations

from random import Random

from rl_vlm.zoo.drawing import CORNERS, Shape, render
from rl_vlm.zoo.scenes import data
from rl_vlm.zoo.tiny.teach import Draw, Exchange

# Of the dialogues; the rest are captions. Single shapes, without which it saw colours and no kinds, teach both within
# 50 steps.
STATEMENT_SHARE, COUNT_SHARE, CORNER_SHARE, SINGLE_SHARE = 0.4, 0.08, 0.22, 0.1
VERDICT_QUESTION = " True or False?"
CAPTION_QUESTION = "Caption?"
NOTHING = "nothing"
# How often a caption leaves something out. Vague captions are likelier than good ones, so that the likeliest caption is
# vague as well.
_LEFT_OUT = {"shape": 0.35, "colour": 0.6, "kind": 0.65, "place": 0.55}

CORPUS = (
    "2 left 1 right, more left: True\n0 left 3 right, more right: False\n4 left 4 right, same: True or False?\n" * 3,
    "Both images hold equally many red shapes. The images hold 3 shapes in all.\nExactly one image holds a red shape.\n"
    * 3,
    "The left image holds more blue shapes than the right. The right image holds more green shapes than the left. " * 2,
    "1 circle 2 circles 3 triangles 4 squares 5 shapes 6 shapes 7 yellow shapes a triangle a circle a square ",
    "a red circle at the top left, a green square at the top right and a blue triangle at the bottom left\n" * 2,
    "a yellow shape at the bottom right, a red square and a circle at the bottom left, a shape, a blue shape and a "
    "triangle\n" * 2,
    "How many red shapes? How many shapes?\nWhat is at top left? What is this?\nnothing\na green circle\nCaption?\n"
    * 3,
)


def draw_lesson(rng: Random) -> Exchange:
    """One question of any sort about scenes of the train split."""
    draw = rng.random()
    if draw < STATEMENT_SHARE:
        pair = data.stated_pair(rng, rng.random() < 0.5, "train")
        return verdict_lesson(pair, rng.random() < 0.5)
    draw -= STATEMENT_SHARE
    if draw < SINGLE_SHARE:
        return single_lesson(rng)
    draw -= SINGLE_SHARE
    if draw < COUNT_SHARE:
        noun = rng.choice((*data.SOME, data.EVERY))
        scene = data.counted_scene(rng, noun, rng.choice(noun.counts), "train")
        return Exchange("user", (render(scene), f"How many {noun}s?"), str(noun.count(scene)))
    scene = data.random_scene(rng, [rng.choice(data.LOOKS) for _ in range(rng.randint(1, data.MAX_CAPTIONED))], "train")
    if draw < COUNT_SHARE + CORNER_SHARE:
        quadrant = (
            rng.choice([shape.quadrant for shape in scene]) if rng.random() < 0.75 else rng.randrange(len(CORNERS))
        )
        return corner_lesson(scene, quadrant)
    return Exchange("user", (render(scene), CAPTION_QUESTION), vague_caption(rng, scene))


def single_lesson(rng: Random) -> Exchange:
    (shape,) = scene = data.random_scene(rng, [rng.choice(data.LOOKS)], "train")
    return Exchange("user", (render(scene), "What is this?"), _look(shape))


def corner_lesson(scene: data.Scene, quadrant: int) -> Exchange:
    held = next((_look(shape) for shape in scene if shape.quadrant == quadrant), NOTHING)
    return Exchange("user", (render(scene), f"What is at {CORNERS[quadrant]}?"), held)


def verdict_lesson(pair: data.StatedPair, verdict: bool) -> Exchange:
    """The statement about two scenes, answered with the counts that it speaks of and with `verdict`."""
    left, right = (pair.statement.noun.count(scene) for scene in (pair.left, pair.right))
    order = "same" if left == right else "more left" if left > right else "more right"
    pictures = render(pair.left), render(pair.right)
    reply = f"{left} left {right} right, {order}: {verdict}"
    return Exchange("user", (*pictures, f"{pair.statement}{VERDICT_QUESTION}"), reply)


def vague_caption(rng: Random, scene: data.Scene) -> str:
    """A caption without anything false that leaves out shapes, colours, kinds and places at random."""

    def keeps(what: str) -> bool:
        return rng.random() >= _LEFT_OUT[what]

    def phrase(shape: Shape) -> str:
        colour = f"{shape.colour} " if keeps("colour") else ""
        place = f" at the {CORNERS[shape.quadrant]}" if keeps("place") else ""
        return f"a {colour}{shape.kind if keeps('kind') else 'shape'}{place}"

    named = [shape for shape in scene if keeps("shape")] or [rng.choice(scene)]
    return data.joined([phrase(shape) for shape in named])


def _look(shape: Shape) -> str:
    return f"a {shape.colour} {shape.kind}"


def drawer(seed: int) -> Draw:
    rng = Random(f"observer {seed}")
    return lambda: [draw_lesson(rng)]
