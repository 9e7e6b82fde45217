"""Arrows, mazes, maps and the pictures of control tasks."""

from __future__ import annotations

import math
from random import Random

from PIL import Image, ImageDraw
from tools.eyes.asking import LETTERS, Asked, kind, near, others_of
from tools.eyes.brush import BRIGHT, Brush, Tone

WAYS = {
    "up": 90,
    "down": 270,
    "left": 180,
    "right": 0,
    "up left": 135,
    "up right": 45,
    "down left": 225,
    "down right": 315,
}


def draw_arrow(image: Image.Image, way: str, x: float, y: float, radius: float, tone: Tone, wide: int) -> None:
    """Around (x, y), with a shaft that is `wide` pixels wide."""
    draw, angle = ImageDraw.Draw(image), math.radians(WAYS[way])
    px, py = math.sin(angle), math.cos(angle)
    dx, dy, t = radius * py, -radius * px, 0.45 * radius
    draw.line((x - dx, y - dy, x + 0.6 * dx, y + 0.6 * dy), tone, wide)
    head = [(x + dx, y + dy), *((x + 0.3 * dx + k * px, y + 0.3 * dy + k * py) for k in (t, -t))]
    draw.polygon(head, tone)


@kind
def arrow(rng: Random) -> Asked:
    b = Brush(rng)
    image = b.canvas(b.side())
    w = image.width
    ways = list(WAYS) if rng.random() < 0.35 else list(WAYS)[:4]
    way = rng.choice(ways)
    r, x, y = w * rng.uniform(0.25, 0.42), w * rng.uniform(0.42, 0.58), w * rng.uniform(0.42, 0.58)
    tone, wide = b.tone(b.colours(1, image)[0]), max(2, int(w * rng.uniform(0.05, 0.12)))
    draw_arrow(image, way, x, y, r, tone, wide)
    asked = rng.choice(
        [
            "Where does the arrow point?",
            "Which way does the arrow point?",
            "In which direction does it point?",
            "Follow the arrow: which way?",
        ]
    )
    if len(ways) == 4 and rng.random() < 0.2:
        compass = {"up": "north", "down": "south", "left": "west", "right": "east"}
        return Asked([image], asked + " North is up.", compass[way], others_of(compass[way], list(compass.values())))
    return Asked([image], asked, way, others_of(way, ways))


@kind
def maze(rng: Random) -> Asked:
    """An agent and a goal among walls: the direction of the goal, and whether a step is free."""
    b, n = Brush(rng), rng.randrange(3, 8)
    image = Image.new("RGB", ((side := b.side(64)),) * 2, rng.choice([(255, 255, 255), (200, 200, 200), (20, 20, 20)]))
    cell, draw = side / n, ImageDraw.Draw(image)
    cells = [(x, y) for x in range(n) for y in range(n)]
    rng.shuffle(cells)
    agent, goal, *rest = cells
    walls = rest[: int(len(rest) * rng.uniform(0, 0.3))]
    names = b.colours(3, image)
    if rng.random() < 0.6:
        for k in range(n + 1):
            draw.line((k * cell, 0, k * cell, side), (120, 120, 120))
            draw.line((0, k * cell, side, k * cell), (120, 120, 120))
    for x, y in walls:
        draw.rectangle((x * cell, y * cell, (x + 1) * cell, (y + 1) * cell), b.tone(names[2], 5))
    for (x, y), shape, name in (
        (agent, rng.choice(["circle", "triangle"]), names[0]),
        (goal, rng.choice(["square", "star", "diamond"]), names[1]),
    ):
        b.shape(image, shape, (x + 0.5) * cell, (y + 0.5) * cell, 0.72 * cell, name)
    if walls and rng.random() < 0.3:
        way, (dx, dy) = rng.choice([("left", (-1, 0)), ("right", (1, 0)), ("up", (0, -1)), ("down", (0, 1))])
        to = (agent[0] + dx, agent[1] + dy)
        free = to in cells and to not in walls
        return Asked(
            [image],
            f"Walls are {names[2]}. Can the {names[0]} one go {way}?",
            "yes" if free else "no",
            ["no" if free else "yes"],
        )
    dx, dy = goal[0] - agent[0], goal[1] - agent[1]
    ways = [way for way, true in (("left", dx < 0), ("right", dx > 0), ("up", dy < 0), ("down", dy > 0)) if true]
    if rng.random() < 0.3:
        axis, answer = ("columns", abs(dx)) if rng.random() < 0.5 else ("rows", abs(dy))
        return Asked(
            [image],
            f"How many {axis} are between {names[0]} and {names[1]}, the last one counted? 0 if it is the same.",
            str(answer),
            near(answer, 0, n - 1),
        )
    answer = (
        ways[0]
        if len(ways) == 1
        else max(
            (("left" if dx < 0 else "right", abs(dx)), ("up" if dy < 0 else "down", abs(dy))),
            key=lambda one: one[1] + 0.1 * (one[0] in ("left", "right")),
        )[0]
    )
    asked = (
        rng.choice(
            [
                f"Which way is {names[1]} from {names[0]}, on the longer side?",
                f"The {names[0]} one wants to reach {names[1]}: along which direction is it farther?",
            ]
        )
        if len(ways) > 1
        else f"Which way must {names[0]} go to reach {names[1]}?"
    )
    return Asked([image], asked, answer, others_of(answer, ["left", "right", "up", "down"]))


@kind
def pin(rng: Random) -> Asked:
    """A mark on a map: the part of the land, and which town is nearest."""
    b, n = Brush(rng), rng.randrange(2, 4)
    side = b.side(96)
    image = Image.new("RGB", (side, side), (150, 200, 235))
    draw = ImageDraw.Draw(image)
    edge = [
        (
            side * (0.5 + rng.uniform(0.36, 0.48) * math.cos(k * 0.52)),
            side * (0.5 + rng.uniform(0.36, 0.48) * math.sin(k * 0.52)),
        )
        for k in range(12)
    ]
    draw.polygon(edge, (190, 220, 150), (90, 120, 70))
    spots = rng.sample([(0.28, 0.28), (0.7, 0.28), (0.28, 0.7), (0.7, 0.7)], n)
    labels = rng.sample(LETTERS[:8], n)
    for (x, y), name in zip(spots, labels, strict=True):
        draw.rectangle((x * side - 2, y * side - 2, x * side + 2, y * side + 2), (20, 20, 20))
        b.text(image, name, x * side + side * 0.07, y * side, max(9, side // 10), (20, 20, 20), face=1)
    k = rng.randrange(n)
    x, y = spots[k][0] + rng.uniform(-0.06, 0.06), spots[k][1] + rng.choice([-1, 1]) * rng.uniform(0.08, 0.11)
    b.shape(image, "circle", x * side, y * side, side * 0.08, "red")
    if rng.random() < 0.5:
        return Asked(
            [image],
            rng.choice(["Which town is nearest to the red pin?", "Next to which letter is the red mark?"]),
            labels[k],
            others_of(labels[k], labels),
        )
    answer = f"{'north' if y < 0.5 else 'south'}{'west' if x < 0.5 else 'east'}"
    return Asked(
        [image],
        "In which part of the land is the red pin? North is up.",
        answer,
        others_of(answer, ["northwest", "northeast", "southwest", "southeast"]),
    )


@kind
def wire(rng: Random) -> Asked:
    """Lines from letters to numbers."""
    b, n = Brush(rng), rng.choice([2, 3])
    side = b.side(96)
    image = b.canvas(side, plain=1)
    draw, ink, names, order = ImageDraw.Draw(image), b.ink(image), b.colours(n, image, BRIGHT), rng.sample(range(n), n)
    for k in range(n):
        y0, y1 = (k + 0.5) / n * side, (order[k] + 0.5) / n * side
        draw.line((0.2 * side, y0, 0.5 * side, (y0 + y1) / 2, 0.8 * side, y1), b.tone(names[k]), max(2, side // 40))
        b.text(image, LETTERS[k], 0.1 * side, y0, max(10, side // 8), ink, face=1)
        b.text(image, str(k + 1), 0.9 * side, (k + 0.5) / n * side, max(10, side // 8), ink, face=1)
    k = rng.randrange(n)
    return Asked(
        [image],
        rng.choice(
            [f"To which number does the line from {LETTERS[k]} lead?", f"{LETTERS[k]} is joined to which number?"]
        ),
        str(order[k] + 1),
        [str(j + 1) for j in range(n) if j != order[k]],
    )


@kind
def pole(rng: Random) -> Asked:
    """A pole on a cart, or a pendulum: which way it leans, and how far."""
    b, two = Brush(rng), rng.random() < 0.3
    side, angles = b.side(48), [rng.choice([-1, 1]) * rng.uniform(6, 60) for _ in range(2 if True else 1)]
    if abs(abs(angles[0]) - abs(angles[1])) < 12:
        angles[1] = math.copysign(abs(angles[0]) + 20, angles[1])
    images = []
    for angle in angles[: 2 if two else 1]:
        image = b.canvas(side, plain=0.9)
        draw, ink = ImageDraw.Draw(image), b.ink(image)
        x, y, r = side * rng.uniform(0.4, 0.6), side * 0.75, side * rng.uniform(0.45, 0.6)
        draw.line((0, y + side * 0.06, side, y + side * 0.06), ink)
        draw.rectangle(
            (x - 0.14 * side, y - 0.06 * side, x + 0.14 * side, y + 0.06 * side), b.tone(b.colours(1, image)[0])
        )
        a = math.radians(angle)
        draw.line((x, y, x + r * math.sin(a), y - r * math.cos(a)), b.tone(b.colours(1, image)[0]), max(2, side // 18))
        images.append(image)
    if two:
        more = rng.random() < 0.5
        k = [abs(one) for one in angles].index((max if more else min)(abs(one) for one in angles))
        return Asked(
            images,
            rng.choice(
                [
                    f"In which picture does the pole lean {'more' if more else 'less'}?",
                    f"Which picture has the pole {'farther from' if more else 'nearer to'} upright?",
                ]
            ),
            ["first", "second"][k],
            ["second" if k == 0 else "first"],
        )
    answer = "left" if angles[0] < 0 else "right"
    return Asked(
        images,
        rng.choice(
            ["Which way does the pole lean?", "To which side does the stick fall?", "Does the pole lean left or right?"]
        ),
        answer,
        others_of(answer, ["left", "right"]),
    )


@kind
def arm(rng: Random) -> Asked:
    """A hand and a target: which way, and whether it has arrived."""
    b = Brush(rng)
    side = b.side(64)
    image = b.canvas(side, plain=0.9)
    draw, ink, names = ImageDraw.Draw(image), b.ink(image), b.colours(2, image, BRIGHT)
    a, c = rng.uniform(0, 2 * math.pi), rng.uniform(0, 2 * math.pi)
    x, y, bone = side / 2, side / 2, side * 0.22
    ex, ey = x + bone * math.cos(a), y + bone * math.sin(a)
    hx, hy = ex + bone * math.cos(c), ey + bone * math.sin(c)
    draw.line((x, y, ex, ey, hx, hy), ink, max(2, side // 20))
    arrived = rng.random() < 0.3
    tx, ty = (hx, hy) if arrived else (rng.uniform(0.1, 0.9) * side, rng.uniform(0.1, 0.9) * side)
    near = math.hypot(tx - hx, ty - hy) < 0.12 * side
    b.shape(image, "circle", tx, ty, side * 0.14, names[0])
    b.shape(image, "circle", hx, hy, side * 0.09, names[1])
    if near or rng.random() < 0.4:
        return Asked(
            [image],
            rng.choice([f"Has the arm reached the {names[0]} target?", f"Does the hand touch the {names[0]} circle?"]),
            "yes" if near else "no",
            ["no" if near else "yes"],
        )
    dx, dy = tx - hx, ty - hy
    answer = ("right" if dx > 0 else "left") if abs(dx) > abs(dy) else ("down" if dy > 0 else "up")
    return Asked(
        [image],
        f"From the {names[1]} hand, in which direction is the {names[0]} target, mostly?",
        answer,
        others_of(answer, ["left", "right", "up", "down"]),
    )
