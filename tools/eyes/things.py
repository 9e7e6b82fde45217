"""Single things and groups of them: colour, shape, number, size and place."""

from __future__ import annotations

from random import Random

from PIL import ImageDraw
from tools.eyes.asking import LETTERS, Asked, counted, kind, others_of
from tools.eyes.brush import COLOURS, SHAPES, Brush


@kind
def colour(rng: Random) -> Asked:
    b = Brush(rng)
    image = b.canvas(b.side())
    (name,) = b.colours(1, image)
    shape, w = rng.choice(SHAPES), image.width
    d = w * rng.uniform(0.3, 0.8)
    b.shape(image, shape, rng.uniform(d / 2, w - d / 2), rng.uniform(d / 2, w - d / 2), d, name)
    asked = rng.choice(
        [
            f"What colour is the {shape}?",
            "Which colour is the shape?",
            "What colour do you see?",
            "Name the colour.",
            "colour?",
        ]
    )
    return Asked([image], asked, name, others_of(name, list(COLOURS)))


@kind
def what_shape(rng: Random) -> Asked:
    b = Brush(rng)
    image = b.canvas(b.side())
    (name,), shape, w = b.colours(1, image), rng.choice(SHAPES), image.width
    d = w * rng.uniform(0.35, 0.85)
    b.shape(
        image,
        shape,
        rng.uniform(d / 2, w - d / 2),
        rng.uniform(d / 2, w - d / 2),
        d,
        name,
        rng.choice([0, 0, rng.uniform(0, 1)]),
    )
    asked = rng.choice(
        [
            "Which shape is this?",
            "What shape do you see?",
            f"What is the {name} thing?",
            "Name the shape.",
            "What is drawn here?",
        ]
    )
    return Asked([image], asked, shape, others_of(shape, SHAPES))


@kind
def count(rng: Random) -> Asked:
    b, n = Brush(rng), rng.randrange(0, 10)
    image = b.canvas(b.side(48), plain=0.8)
    (name,), shape = b.colours(1, image), rng.choice(SHAPES)
    for x, y, d in b.spots(n, *image.size) if n else []:
        b.shape(image, shape, x, y, d, name)
    thing = rng.choice([f"{shape}s", f"{name} {shape}s", "things", "objects", "items"])
    asked = rng.choice(
        [
            f"How many {thing} are there?",
            f"Count the {thing}.",
            f"What is the number of {thing}?",
            f"How many {thing} can you see?",
        ]
    )
    return counted(rng, [image], asked, n, 0, 9)


@kind
def count_by(rng: Random) -> Asked:
    """Of things of several kinds, those of one colour or one shape."""
    b = Brush(rng)
    image = b.canvas(b.side(64), plain=0.85)
    names, shapes, total = b.colours(3, image), rng.sample(SHAPES, 3), rng.randrange(2, 10)
    drawn = [(rng.choice(names), rng.choice(shapes)) for _ in range(total)]
    for (x, y, d), (name, shape) in zip(b.spots(total, *image.size), drawn, strict=True):
        b.shape(image, shape, x, y, d, name)
    if rng.random() < 0.6:
        name = rng.choice(names)
        n, thing = (
            sum(one == name for one, _ in drawn),
            rng.choice([f"{name} things", f"{name} shapes", f"{name} ones"]),
        )
    else:
        shape = rng.choice(shapes)
        n, thing = sum(one == shape for _, one in drawn), f"{shape}s"
    asked = rng.choice([f"How many {thing} are there?", f"Count the {thing}.", f"How many {thing}?"])
    return counted(rng, [image], asked, n, 0, 9)


@kind
def size(rng: Random) -> Asked:
    b = Brush(rng)
    image = b.canvas(b.side(48))
    n = rng.choice([2, 2, 3])
    names, w, h = b.colours(n, image), *image.size
    sizes = [0.32, 0.18, 0.1][:n] if n == 3 else [0.4, rng.uniform(0.15, 0.29)]
    order = rng.sample(range(n), n)
    shape = rng.choice(SHAPES[:6])
    across = rng.random() < 0.7
    for place, k in enumerate(order):
        middle = (place + 0.5) / n
        x, y = (middle * w, rng.uniform(0.35, 0.65) * h) if across else (rng.uniform(0.35, 0.65) * w, middle * h)
        b.shape(image, shape, x, y, sizes[k] * min(w, h) * (1.9 if n == 2 else 1.0), names[k])
    big = rng.random() < 0.5
    k = 0 if big else n - 1
    word = (
        rng.choice(["largest", "biggest"] if big else ["smallest"])
        if n == 3
        else rng.choice(["larger", "bigger"] if big else ["smaller"])
    )
    if rng.random() < 0.6:
        return Asked(
            [image],
            rng.choice([f"Which colour is the {word} {shape}?", f"The {word} one is which colour?"]),
            names[k],
            [x for x in names if x != names[k]],
        )
    sides = (
        (["left", "right"] if n == 2 else ["left", "middle", "right"])
        if across
        else (["top", "bottom"] if n == 2 else ["top", "middle", "bottom"])
    )
    return Asked(
        [image], f"Where is the {word} {shape}?", sides[order.index(k)], others_of(sides[order.index(k)], sides)
    )


@kind
def where(rng: Random) -> Asked:
    """Halves, or nine parts."""
    b = Brush(rng)
    image = b.canvas(b.side())
    (name,), shape, (w, h) = b.colours(1, image), rng.choice(SHAPES), image.size
    way = rng.choice(["across", "down", "corner", "nine"])
    if way == "nine":
        rows, columns = ["top", "middle", "bottom"], ["left", "middle", "right"]
        r, c = rng.randrange(3), rng.randrange(3)
        names = {
            (i, j): "middle"
            if i == j == 1
            else rows[i]
            if j == 1
            else columns[j]
            if i == 1
            else f"{rows[i]} {columns[j]}"
            for i in range(3)
            for j in range(3)
        }
        answer, others = names[r, c], list(names.values())
        x, y, d = (c + rng.uniform(0.4, 0.6)) / 3, (r + rng.uniform(0.4, 0.6)) / 3, rng.uniform(0.15, 0.3)
    else:
        x, y, d = rng.choice([0.25, 0.75]), rng.choice([0.25, 0.75]), rng.uniform(0.15, 0.4)
        across, down = ("left" if x < 0.5 else "right"), ("top" if y < 0.5 else "bottom")
        answer = {"across": across, "down": down, "corner": f"{down} {across}"}[way]
        others = {
            "across": ["left", "right"],
            "down": ["top", "bottom"],
            "corner": ["top left", "top right", "bottom left", "bottom right"],
        }[way]
    b.shape(image, shape, x * w, y * h, d * min(w, h), name)
    thing = rng.choice([shape, "shape", f"{name} {shape}", "thing"])
    asked = rng.choice(
        [f"Where is the {thing}?", f"In which part of the picture is the {thing}?", f"Where do you see the {thing}?"]
    )
    return Asked([image], asked, answer, others_of(answer, others))


@kind
def coordinates(rng: Random) -> Asked:
    """The cell of a grid that a thing is in: a column and a row, from 0 or from 1, or fractions of the sides."""
    b, n = Brush(rng), rng.randrange(2, 8)
    image = b.canvas(b.side(64), plain=0.85)
    (name,), w = b.colours(1, image), image.width
    x, y, cell = rng.randrange(n), rng.randrange(n), w / n
    lines = rng.random() < 0.6
    if lines:
        draw, ink = ImageDraw.Draw(image), b.ink(image)
        for k in range(n + 1):
            draw.line((k * cell, 0, k * cell, w), ink)
            draw.line((0, k * cell, w, k * cell), ink)
    b.shape(image, rng.choice(SHAPES[:6]), (x + 0.5) * cell, (y + 0.5) * cell, cell * rng.uniform(0.4, 0.75), name)
    form, first = rng.choice(["column", "row", "pair", "fraction"]), rng.choice([0, 1])
    if form in ("column", "row"):
        k = (x if form == "column" else y) + first
        asked = f"The picture is a grid of {n} by {n} cells. In which {form} is the {name} thing? Count from {first}."
        return Asked([image], asked, str(k), [str(one + first) for one in range(n) if one + first != k])
    if form == "pair":
        asked = f"The {n}x{n} grid counts from {first} at the top left. Give column, row of the {name} thing."
        pairs = [f"{rng.randrange(n) + first}, {rng.randrange(n) + first}" for _ in range(5)]
        return Asked([image], asked, f"{x + first}, {y + first}", others_of(f"{x + first}, {y + first}", pairs))
    asked = rng.choice(
        [
            f"Where is the centre of the {name} thing, as x, y from 0 to 1?",
            f"Click on the {name} thing: x, y as fractions of width and height.",
        ]
    )
    pairs = [f"{rng.randrange(1, 10) / 10}, {rng.randrange(1, 10) / 10}" for _ in range(4)]
    answer = f"{round((x + 0.5) / n, 1)}, {round((y + 0.5) / n, 1)}"
    return Asked([image], asked, answer, others_of(answer, pairs))


@kind
def odd_one(rng: Random) -> Asked:
    b, n = Brush(rng), rng.randrange(3, 6)
    image = b.canvas(b.side(64))
    names, shapes, k, (w, h) = b.colours(2, image), rng.sample(SHAPES, 2), rng.randrange(n), image.size
    by = rng.choice(["colour", "shape", "size"])
    labels = rng.choice([None, list(LETTERS[:n]), [str(one + 1) for one in range(n)]])
    for place in range(n):
        odd = place == k
        x = (place + 0.5) / n * w
        b.shape(
            image,
            shapes[odd and by == "shape"],
            x,
            h * 0.45,
            w / n * (0.75 if not (odd and by == "size") else 0.4),
            names[odd and by == "colour"],
        )
        if labels:
            b.text(image, labels[place], x, h * 0.85, max(9, w // 9), b.ink(image))
    if labels is None:
        labels = [str(one + 1) for one in range(n)]
        asked = rng.choice(
            [
                "Which one is different? Count from the left, from 1.",
                "One does not fit. Which, counted from 1 at the left?",
            ]
        )
    else:
        asked = rng.choice(
            ["Which one is different?", "Which one is the odd one out?", "One is not like the others: which?"]
        )
    return Asked([image], asked, labels[k], others_of(labels[k], labels))


@kind
def nothing(rng: Random) -> Asked:
    """Whether something is there, and what is not there."""
    b = Brush(rng)
    image = b.canvas(b.side(48))
    n, (w, h) = rng.randrange(1, 4), image.size
    names, shapes = b.colours(n + 2, image), rng.sample(SHAPES, n + 2)
    for (x, y, d), name, shape in zip(b.spots(n, w, h), names, shapes, strict=False):
        b.shape(image, shape, x, y, d, name)
    there, by_colour = rng.random() < 0.5, rng.random() < 0.5
    k = rng.randrange(n) if there else n
    thing = f"a {shapes[k]}" if not by_colour else f"something {names[k]}"
    if rng.random() < 0.75:
        return Asked(
            [image],
            rng.choice([f"Is there {thing}?", f"Do you see {thing}?", f"Does the picture show {thing}?"]),
            "yes" if there else "no",
            ["no" if there else "yes"],
        )
    answer = names[k] if there else rng.choice(["none"])
    return Asked(
        [image],
        f"Which colour is the {shapes[k]}? Say none if there is none.",
        answer,
        others_of(answer, [*names, "none"]),
    )


@kind
def in_front(rng: Random) -> Asked:
    b = Brush(rng)
    side = b.side(48)
    image = b.canvas(side)
    names, shapes = b.colours(2, image), [rng.choice(SHAPES[:3]) for _ in range(2)]
    x = rng.uniform(0.3, 0.4)
    b.shape(image, shapes[0], x * side, 0.5 * side, 0.5 * side, names[0])
    b.shape(image, shapes[1], (x + rng.uniform(0.18, 0.3)) * side, rng.uniform(0.45, 0.6) * side, 0.5 * side, names[1])
    front = rng.random() < 0.5
    return Asked(
        [image],
        f"Which colour is {rng.choice(['in front', 'on top']) if front else rng.choice(['behind', 'covered in part'])}?",
        names[front],
        [names[not front]],
    )


@kind
def pattern(rng: Random) -> Asked:
    b, names = Brush(rng), ["stripes", "dots", "checks", "plain"]
    side, one = b.side(48), rng.choice(names)
    image = b.canvas(side, plain=1)
    draw, tone, step = ImageDraw.Draw(image), b.tone(b.colours(1, image)[0]), max(5, side // rng.randrange(4, 9))
    for k in range(0, side, step):
        if one == "stripes":
            draw.rectangle(
                (k, 0, k + step // 2, side) if rng.random() < 2 and side % 2 == 0 else (0, k, side, k + step // 2), tone
            )
        for j in range(0, side, step):
            if one == "dots":
                draw.ellipse((k + step * 0.2, j + step * 0.2, k + step * 0.75, j + step * 0.75), tone)
            elif one == "checks" and (k // step + j // step) % 2:
                draw.rectangle((k, j, k + step - 1, j + step - 1), tone)
    if one == "stripes" and rng.random() < 0.5:
        image = image.rotate(90)
    return Asked(
        [image],
        rng.choice(
            [
                "Which pattern is it: stripes, dots, checks or plain?",
                "What is the pattern? (stripes, dots, checks, plain)",
            ]
        ),
        one,
        others_of(one, names),
    )
