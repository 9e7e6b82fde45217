"""How things stand to each other, in one picture or in several."""

from __future__ import annotations

from random import Random

from PIL import Image, ImageDraw
from tools.eyes.asking import Asked, kind, others_of
from tools.eyes.brush import BRIGHT, SHAPES, Brush


@kind
def relation(rng: Random) -> Asked:
    b = Brush(rng)
    image = b.canvas(b.side(48))
    names, shapes, (w, h) = b.colours(2, image), rng.sample(SHAPES, 2), image.size
    if rng.random() < 0.25:  # inside of a frame, or beside it
        inside, d = rng.random() < 0.5, ImageDraw.Draw(image)
        x0 = rng.choice([0.05, 0.4])
        d.rectangle((x0 * w, 0.25 * h, (x0 + 0.55) * w, 0.8 * h), None, b.tone(names[0]), max(2, w // 24))
        x = x0 + 0.27 if inside else (0.8 if x0 < 0.2 else 0.2)
        b.shape(image, shapes[1], x * w, 0.52 * h, 0.2 * w, names[1])
        asked = rng.choice(
            [f"Is the {shapes[1]} inside the box?", f"Is the {names[1]} {shapes[1]} in the {names[0]} frame?"]
        )
        return Asked([image], asked, "yes" if inside else "no", ["no" if inside else "yes"])
    across, swap = rng.random() < 0.5, rng.random() < 0.5
    low, high, side = rng.uniform(0.18, 0.3), rng.uniform(0.7, 0.82), rng.uniform(0.35, 0.65)
    for k, along in enumerate((high, low) if swap else (low, high)):
        x, y = (along, side + rng.uniform(-0.08, 0.08)) if across else (side + rng.uniform(-0.08, 0.08), along)
        b.shape(image, shapes[k], x * w, y * h, 0.3 * min(w, h), names[k])
    things = [rng.choice([shapes[k], f"{names[k]} {shapes[k]}", f"{names[k]} thing"]) for k in (0, 1)]
    words = ("to the left of", "to the right of") if across else ("above", "below")
    truth = words[1] if swap else words[0]
    if rng.random() < 0.6:
        said = rng.choice(words)
        return Asked(
            [image],
            f"Is the {things[0]} {said} the {things[1]}?",
            "yes" if said == truth else "no",
            ["no" if said == truth else "yes"],
        )
    short = [word.replace("to the ", "").replace(" of", "") for word in words]
    answer = short[words.index(truth)]
    return Asked(
        [image],
        f"Where is the {things[0]}, seen from the {things[1]}: {short[0]} or {short[1]}?",
        answer,
        others_of(answer, short),
    )


@kind
def between(rng: Random) -> Asked:
    b = Brush(rng)
    image = b.canvas(b.side(64))
    n, (w, h) = rng.choice([3, 3, 4, 5]), image.size
    names, shape, down = b.colours(n, image), rng.choice(SHAPES), rng.random() < 0.3
    for k, name in enumerate(names):
        x, y = ((k + 0.5) / n * w, h / 2) if not down else (w / 2, (k + 0.5) / n * h)
        b.shape(image, shape, x, y, 0.75 * w / n, name)
    places = ["first", "second", "third", "fourth", "fifth"][:n]
    k = rng.randrange(n)
    start = "from the top" if down else "from the left"
    if n == 3 and rng.random() < 0.5:
        asked, k = (
            rng.choice([f"Which colour is between {names[0]} and {names[2]}?", "Which colour is in the middle?"]),
            1,
        )
    elif rng.random() < 0.5:
        asked = f"Which colour is the {places[k]} {shape} {start}?"
    else:
        return Asked(
            [image], f"Which place has the {names[k]} {shape}, {start}?", places[k], others_of(places[k], places)
        )
    return Asked([image], asked, names[k], [one for one in names if one != names[k]])


@kind
def same(rng: Random) -> Asked:
    """Two things in a picture, or one in each of two."""
    b, equal, two = Brush(rng), rng.random() < 0.5, rng.random() < 0.5
    side = b.side(48)
    images = [b.canvas(side) for _ in range(2 if two else 1)]
    names, shapes, about = b.colours(2, images[0]), rng.sample(SHAPES, 2), rng.choice(["colour", "shape"])
    for k in range(2):
        image = images[k if two else 0]
        name = names[0] if about == "colour" and equal else names[k]
        shape = shapes[0] if about == "shape" and equal else shapes[k]
        if rng.random() < 0.3:
            name, shape = (name, shapes[0]) if about == "colour" else (names[0], shape)
        b.shape(
            image,
            shape,
            side * (0.5 if two else 0.27 + 0.46 * k),
            side * rng.uniform(0.4, 0.6),
            side * (0.6 if two else 0.38),
            name,
        )
    whose = rng.choice(["the two things", "both things", "the shapes"])
    if rng.random() < 0.5:
        return Asked(images, f"Do {whose} have the same {about}?", "yes" if equal else "no", ["no" if equal else "yes"])
    return Asked(
        images,
        f"Compare the {about} of {whose}: same or different?",
        "same" if equal else "different",
        ["different" if equal else "same"],
    )


@kind
def which_picture(rng: Random) -> Asked:
    b, n = Brush(rng), rng.choice([2, 2, 3])
    side, about = b.side(48), rng.choice(["count", "colour", "shape", "size"])
    images = [b.canvas(side) for _ in range(n)]
    k, places = rng.randrange(n), ["first", "second", "third"][:n]
    names, shapes = b.colours(n, images[0]), rng.sample(SHAPES, n)
    if about == "count":
        counts = rng.sample(range(1, 8), n)
        most = rng.random() < 0.6
        k = counts.index(max(counts) if most else min(counts))
        for image, number in zip(images, counts, strict=True):
            for x, y, d in b.spots(number, side, side):
                b.shape(image, shapes[0], x, y, d, names[0])
        asked = (
            f"Which picture has {'more' if n == 2 else 'the most'} {shapes[0]}s?"
            if most
            else f"Which picture has {'fewer' if n == 2 else 'the fewest'} {shapes[0]}s?"
        )
    else:
        for j, image in enumerate(images):
            d = side * (0.25 + 0.25 * j if about == "size" else rng.uniform(0.4, 0.7))
            b.shape(
                image, shapes[j if about == "shape" else 0], side / 2, side / 2, d, names[j if about == "colour" else 0]
            )
        if about == "size":
            order = rng.sample(range(n), n)
            images = [images[j] for j in order]
            k = order.index(n - 1)
        asked = {
            "colour": f"Which picture shows {names[k]}?",
            "shape": f"In which picture is a {shapes[k]}?",
            "size": f"In which picture is the {shapes[0]} {'larger' if n == 2 else 'largest'}?",
        }[about]
    return Asked(images, asked, places[k], others_of(places[k], places))


@kind
def change(rng: Random) -> Asked:
    """Two pictures of the same things: what has gone, moved or another colour."""
    b, n = Brush(rng), rng.randrange(2, 5)
    side = b.side(64)
    ground = b.canvas(side)
    names, shapes = b.colours(n + 1, ground), rng.sample(SHAPES, n)
    corners = rng.sample([(0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75)], n)
    places = {
        (0.25, 0.25): "top left",
        (0.75, 0.25): "top right",
        (0.25, 0.75): "bottom left",
        (0.75, 0.75): "bottom right",
    }
    k, what = rng.randrange(n), rng.choice(["gone", "colour"])
    images = []
    for second in (False, True):
        image = ground.copy()
        for j in range(n):
            if second and j == k and what == "gone":
                continue
            b.shape(
                image,
                shapes[j],
                corners[j][0] * side,
                corners[j][1] * side,
                0.36 * side,
                names[n] if second and j == k else names[j],
            )
        images.append(image)
    if rng.random() < 0.5:
        return Asked(
            images,
            rng.choice(["Where do the two pictures differ?", "In which corner is the difference?"]),
            places[corners[k]],
            others_of(places[corners[k]], list(places.values())),
        )
    asked = (
        "Which shape is missing in the second picture?"
        if what == "gone"
        else "Which shape has another colour in the second picture?"
    )
    return Asked(images, asked, shapes[k], others_of(shapes[k], shapes) or ["none"])


@kind
def longer(rng: Random) -> Asked:
    b, n = Brush(rng), rng.choice([2, 2, 3, 4])
    image = b.canvas(b.side(64))
    draw, names, (w, h) = ImageDraw.Draw(image), b.colours(n, image), image.size
    lengths = [0.9 - 0.2 * k - rng.uniform(0, 0.08) for k in range(n)]
    rng.shuffle(lengths)
    down, wide = rng.random() < 0.4, max(2, int(w * rng.uniform(0.03, 0.09)))
    for k, (name, length) in enumerate(zip(names, lengths, strict=True)):
        at, start = (k + 0.5) / n, rng.uniform(0.03, 0.97 - length)
        line = (
            (start * w, at * h, (start + length) * w, at * h)
            if not down
            else (at * w, start * h, at * w, (start + length) * h)
        )
        draw.line(line, b.tone(name), wide)
    most = rng.random() < 0.6
    k = lengths.index(max(lengths) if most else min(lengths))
    word = ("longest" if most else "shortest") if n > 2 else ("longer" if most else "shorter")
    if rng.random() < 0.6 or n == 4:
        return Asked([image], f"Which colour is the {word} line?", names[k], [one for one in names if one != names[k]])
    places = (
        (["top", "bottom"] if n == 2 else ["top", "middle", "bottom"])
        if not down
        else (["left", "right"] if n == 2 else ["left", "middle", "right"])
    )
    return Asked([image], f"Where is the {word} line?", places[k], others_of(places[k], places))


@kind
def brighter(rng: Random) -> Asked:
    b, two = Brush(rng), rng.random() < 0.4
    side, dark = b.side(32), rng.randrange(10, 150)
    levels = [dark, dark + rng.randrange(45, 100)]
    rng.shuffle(levels)
    tint = rng.choice([(1, 1, 1), (1, 1, 1), (1, 0.7, 0.4), (0.5, 0.7, 1)])
    fills = [tuple(int(level * one) for one in tint) for level in levels]
    if two:
        images, places = [Image.new("RGB", (side, side), one) for one in fills], ["first", "second"]
    else:
        image, down = b.canvas(side), rng.random() < 0.3
        draw = ImageDraw.Draw(image)
        for k, one in enumerate(fills):
            low, high = 0.06 + 0.5 * k, 0.44 + 0.5 * k
            draw.rectangle(
                (0.1 * side, low * side, 0.9 * side, high * side)
                if down
                else (low * side, 0.1 * side, high * side, 0.9 * side),
                one,
            )
        images, places = [image], ["top", "bottom"] if down else ["left", "right"]
    bright = rng.random() < 0.6
    k = levels.index(max(levels) if bright else min(levels))
    asked = f"Which {rng.choice(['one', 'picture' if two else 'part', 'side' if not two else 'image'])} is {rng.choice(['brighter', 'lighter']) if bright else 'darker'}?"
    return Asked(images, asked, places[k], others_of(places[k], places))


@kind
def fuller(rng: Random) -> Asked:
    """Glasses: which holds more, or how full one is."""
    b, n = Brush(rng), rng.choice([1, 2, 2, 3])
    image = b.canvas(b.side(48))
    draw, (w, h), ink = ImageDraw.Draw(image), image.size, b.ink(image)
    tone = b.tone(b.colours(1, image, BRIGHT)[0])
    tenths = rng.sample([1, 3, 5, 7, 9], n) if n > 1 else [rng.choice([0, 25, 50, 75, 100]) / 10]
    for k, level in enumerate(tenths):
        x0, x1, y0, y1 = (k + 0.2) / n * w, (k + 0.8) / n * w, 0.1 * h, 0.9 * h
        draw.rectangle((x0, y1 - level / 10 * (y1 - y0), x1, y1), tone)
        draw.rectangle((x0, y0, x1, y1), None, ink, max(1, w // 48))
    if n == 1:
        answer = f"{int(tenths[0] * 10)}"
        asked = rng.choice(
            [
                "How full is the glass, in percent?",
                "What percentage is filled: 0, 25, 50, 75 or 100?",
                "How many percent are full?",
            ]
        )
        return Asked([image], asked, answer, others_of(answer, ["0", "25", "50", "75", "100"]))
    most = rng.random() < 0.6
    k, places = (
        tenths.index(max(tenths) if most else min(tenths)),
        ["left", "right"] if n == 2 else ["left", "middle", "right"],
    )
    thing = rng.choice(["glass", "tank", "cup", "bottle"])
    word = ("fuller" if n == 2 else "fullest") if most else ("emptier" if n == 2 else "emptiest")
    return Asked(
        [image], f"Which {thing} is {word if n == 2 else 'the ' + word}?", places[k], others_of(places[k], places)
    )
