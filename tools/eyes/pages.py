"""Buttons, lamps, ticks and switches, as on a page or a panel."""

from __future__ import annotations

from random import Random

from PIL import Image, ImageDraw
from tools.eyes.asking import Asked, counted, kind, others_of
from tools.eyes.brush import BRIGHT, COLOURS, Brush
from tools.eyes.signs import WORDS


@kind
def buttons(rng: Random) -> Asked:
    """Boxes with words, as on a page: where one is, what one says, which colour it has."""
    b, n = Brush(rng), rng.randrange(2, 5)
    side = b.side(96)
    image = Image.new("RGB", (side, side), rng.choice([(255, 255, 255), (240, 240, 245), (30, 30, 36)]))
    draw, words, names = ImageDraw.Draw(image), rng.sample(WORDS[21:], n), b.colours(n, image, BRIGHT)
    across = n == 2 and rng.random() < 0.5
    slots, boxes = rng.sample(range(4), n) if not across else list(range(n)), []
    for k, slot in enumerate(slots):
        bw, bh = (0.42, 0.25) if across else (rng.uniform(0.45, 0.8), 0.19)
        x, y = (
            ((0.05 + 0.48 * slot), rng.uniform(0.1, 0.6))
            if across
            else (rng.uniform(0.03, 0.95 - bw), 0.03 + 0.24 * slot)
        )
        boxes.append((x + bw / 2, y + bh / 2))
        draw.rounded_rectangle(
            (x * side, y * side, (x + bw) * side, (y + bh) * side), side * 0.03, b.tone(names[k]), (90, 90, 90)
        )
        b.text(
            image,
            words[k],
            boxes[-1][0] * side,
            boxes[-1][1] * side,
            int(min(bh * side * 0.62, bw * side * 1.5 / len(words[k]))),
            (10, 10, 10) if sum(COLOURS[names[k]]) > 330 else (250, 250, 250),
            face=rng.choice([0, 1]),
        )
    k, way = rng.randrange(n), rng.choice(["colour", "word", "click", "order"])
    if way == "colour":
        return Asked(
            [image],
            rng.choice([f"Which colour is the button {words[k]}?", f'What colour has the button "{words[k]}"?']),
            names[k],
            [one for one in names if one != names[k]],
        )
    if way == "word":
        return Asked(
            [image],
            rng.choice([f"What does the {names[k]} button say?", f"Which word is on the {names[k]} button?"]),
            words[k],
            others_of(words[k], words),
        )
    if way == "click":
        answer = f"{boxes[k][0]:.1f}, {boxes[k][1]:.1f}"
        return Asked(
            [image],
            rng.choice(
                [
                    f"Click on {words[k]}: x, y from 0 to 1.",
                    f"Where is the middle of the {names[k]} button, as fractions x, y?",
                ]
            ),
            answer,
            others_of(answer, [f"{x:.1f}, {y:.1f}" for x, y in boxes]),
        )
    order = sorted(range(n), key=lambda j: boxes[j][0] if across else boxes[j][1])
    place = rng.randrange(n)
    return Asked(
        [image],
        f"Which word is on button {place + 1}, counted from the {'left' if across else 'top'}?",
        words[order[place]],
        others_of(words[order[place]], words),
    )


@kind
def switches(rng: Random) -> Asked:
    """Lamps, ticks and switches: which one is on."""
    b, n = Brush(rng), rng.randrange(1, 6)
    image = b.canvas(b.side(64), plain=0.9)
    draw, (w, h), ink = ImageDraw.Draw(image), image.size, b.ink(image)
    style, lit = rng.choice(["lamp", "tick", "switch"]), [rng.random() < 0.5 for _ in range(n)]
    if n > 1 and rng.random() < 0.6:
        k = rng.randrange(n)
        lit = [j == k for j in range(n)]
    on = b.tone(rng.choice(["yellow", "green", "red", "orange"]))
    for k, true in enumerate(lit):
        x, y, r = (k + 0.5) / n * w, h * 0.45, min(0.36 * w / n, 0.36 * h)
        if style == "lamp":
            draw.ellipse((x - r, y - r, x + r, y + r), on if true else (90, 90, 90), ink)
        elif style == "tick":
            draw.rectangle((x - r, y - r, x + r, y + r), (250, 250, 250), (60, 60, 60), max(1, int(r / 8)))
            if true:
                draw.line(
                    (x - 0.6 * r, y, x - 0.1 * r, y + 0.55 * r, x + 0.7 * r, y - 0.6 * r),
                    (10, 110, 10),
                    max(2, int(r / 4)),
                )
        else:
            draw.rounded_rectangle((x - r, y - r / 2, x + r, y + r / 2), r / 2, on if true else (150, 150, 150))
            cx = x + (0.5 if true else -0.5) * r
            draw.ellipse((cx - r * 0.42, y - r * 0.42, cx + r * 0.42, y + r * 0.42), (255, 255, 255))
    thing, word = (
        {"lamp": "lamp", "tick": "box", "switch": "switch"}[style],
        {"lamp": rng.choice(["lit", "on"]), "tick": rng.choice(["ticked", "checked"]), "switch": "on"}[style],
    )
    if n == 1:
        return Asked([image], f"Is the {thing} {word}?", "yes" if lit[0] else "no", ["no" if lit[0] else "yes"])
    if sum(lit) == 1 and rng.random() < 0.7:
        places = (
            [str(k + 1) for k in range(n)]
            if n > 3 or rng.random() < 0.5
            else (["left", "right"] if n == 2 else ["left", "middle", "right"])
        )
        k = lit.index(True)
        return Asked(
            [image],
            f"Which {thing} is {word}?" + (" Count from 1 at the left." if places[0] == "1" else ""),
            places[k],
            others_of(places[k], places),
        )
    return counted(
        rng, [image], f"How many {thing}{'es' if thing in ('box', 'switch') else 's'} are {word}?", sum(lit), 0, n
    )
