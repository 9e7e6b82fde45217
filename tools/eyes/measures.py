"""Charts, gauges, clocks and levels."""

from __future__ import annotations

import math
from random import Random

from PIL import ImageDraw
from tools.eyes.asking import LETTERS, Asked, kind, near, others_of
from tools.eyes.brush import BRIGHT, COLOURS, Brush


@kind
def bars(rng: Random) -> Asked:
    b, n = Brush(rng), rng.randrange(3, 7)
    image = b.canvas(b.side(64), plain=0.9)
    draw, (w, h), ink = ImageDraw.Draw(image), image.size, b.ink(image)
    names = b.colours(n, image) if rng.random() < 0.6 else [b.colours(1, image)[0]] * n
    values = rng.sample(range(1, 11), n)
    labels = list(LETTERS[:n]) if rng.random() < 0.5 else [str(k + 1) for k in range(n)]
    lettered, base = len(set(names)) == 1 or rng.random() < 0.6, 0.82 * h
    for k, value in enumerate(values):
        x0, x1 = (k + 0.15) / n * w, (k + 0.85) / n * w
        draw.rectangle((x0, base - value / 10 * 0.75 * h, x1, base), b.tone(names[k]))
        if lettered:
            b.text(image, labels[k], (x0 + x1) / 2, 0.91 * h, max(9, int(min(w / n * 0.7, h * 0.14))), ink)
    draw.line((0, base, w, base), ink)
    most = rng.random() < 0.65
    k = values.index(max(values) if most else min(values))
    word = rng.choice(["tallest", "highest", "longest", "largest"] if most else ["shortest", "lowest", "smallest"])
    if lettered:
        return Asked(
            [image],
            rng.choice(
                [f"Which bar is the {word}?", f"Which is the {word} bar?", f"What is the label of the {word} bar?"]
            ),
            labels[k],
            others_of(labels[k], labels),
        )
    if rng.random() < 0.5:
        return Asked([image], f"Which colour is the {word} bar?", names[k], [one for one in names if one != names[k]])
    number = [str(one + 1) for one in range(n)]
    return Asked(
        [image], f"Which bar is the {word}? Count from the left, from 1.", number[k], others_of(number[k], number)
    )


@kind
def line_chart(rng: Random) -> Asked:
    b = Brush(rng)
    image = b.canvas(b.side(64), plain=0.9)
    draw, (w, h), ink = ImageDraw.Draw(image), image.size, b.ink(image)
    n, way = rng.randrange(4, 9), rng.choice(["rises", "falls", "stays the same"])
    slope = {"rises": 1, "falls": -1, "stays the same": 0}[way]
    ys = [
        0.5 - slope * 0.35 * (2 * k / (n - 1) - 1) + rng.uniform(-0.06, 0.06) * (1 if slope else 0.4) for k in range(n)
    ]
    draw.line((0.08 * w, 0.95 * h, 0.95 * w, 0.95 * h), ink)
    draw.line((0.08 * w, 0.05 * h, 0.08 * w, 0.95 * h), ink)
    draw.line(
        [(w * (0.1 + 0.85 * k / (n - 1)), h * y) for k, y in enumerate(ys)],
        b.tone(b.colours(1, image)[0]),
        max(2, w // 40),
    )
    words = {"rises": ["rises", "up"], "falls": ["falls", "down"], "stays the same": ["stays the same", "flat"]}
    j = rng.randrange(2)
    asked = [
        "Does the line rise, fall or stay the same? (rises, falls, stays the same)",
        "Which way does the curve go: up, down or flat?",
    ][j]
    return Asked([image], asked, words[way][j], [words[one][j] for one in words if one != way])


@kind
def pie(rng: Random) -> Asked:
    b, n = Brush(rng), rng.randrange(2, 5)
    image = b.canvas(b.side(64), plain=0.9)
    draw, w = ImageDraw.Draw(image), image.width
    names, shares = b.colours(n, image), {2: [0.67, 0.33], 3: [0.52, 0.31, 0.17], 4: [0.43, 0.27, 0.18, 0.12]}[n][:]
    rng.shuffle(shares)
    at = rng.uniform(0, 360)
    for name, share in zip(names, shares, strict=True):
        draw.pieslice((0.08 * w, 0.08 * w, 0.92 * w, 0.92 * w), at, at + 360 * share, b.tone(name), (30, 30, 30))
        at += 360 * share
    most = rng.random() < 0.6
    k = shares.index(max(shares) if most else min(shares))
    word = ("larger" if most else "smaller") if n == 2 else rng.choice(["largest", "biggest"] if most else ["smallest"])
    return Asked(
        [image],
        rng.choice([f"Which colour has the {word} part?", f"Which slice is {'the ' if n > 2 else ''}{word}?"]),
        names[k],
        [one for one in names if one != names[k]],
    )


@kind
def dial(rng: Random) -> Asked:
    """A gauge with a needle."""
    b = Brush(rng)
    image = b.canvas(b.side(64), plain=0.9)
    draw, w, ink = ImageDraw.Draw(image), image.width, b.ink(image)
    steps = rng.choice([3, 4, 5, 10])
    value = rng.randrange(steps + 1)
    r, x, y = 0.42 * w, 0.5 * w, 0.6 * w
    angle = math.pi * (1 - value / steps)
    draw.arc((x - r, y - r, x + r, y + r), 180, 360, ink, max(2, w // 40))
    for k in range(steps + 1):
        a = math.pi * (1 - k / steps)
        draw.line(
            (x + r * math.cos(a), y - r * math.sin(a), x + 0.85 * r * math.cos(a), y - 0.85 * r * math.sin(a)),
            ink,
            max(1, w // 64),
        )
    draw.line(
        (x, y, x + 0.8 * r * math.cos(angle), y - 0.8 * r * math.sin(angle)),
        b.tone(b.colours(1, image, BRIGHT)[0]),
        max(2, w // 26),
    )
    if rng.random() < 0.5:
        b.text(image, "0", x - r, y + 0.1 * w, max(8, w // 10), ink)
        b.text(image, str(steps), x + r, y + 0.1 * w, max(8, w // 10), ink)
    if (rng.random() < 0.25 and steps % 2 == 0) or steps == 3:
        names = ["low", "medium", "high"]
        share = value / steps
        answer = names[0] if share < 0.34 else names[2] if share > 0.66 else names[1]
        return Asked(
            [image],
            rng.choice(["Is the value of the gauge low, medium or high?", "Read the gauge: low, medium or high?"]),
            answer,
            others_of(answer, names),
        )
    asked = rng.choice(
        [
            f"The gauge goes from 0 to {steps}. What does it show?",
            f"Read the dial (0 to {steps}).",
            f"To which number does the needle point, from 0 at the left to {steps} at the right?",
        ]
    )
    return Asked([image], asked, str(value), near(value, 0, steps))


@kind
def clock(rng: Random) -> Asked:
    b = Brush(rng)
    image = b.canvas(b.side(64), plain=0.9)
    draw, w, ink = ImageDraw.Draw(image), image.width, b.ink(image)
    hour, half = rng.randrange(1, 13), rng.random() < 0.4
    r, x = 0.45 * w, 0.5 * w
    draw.ellipse((x - r, x - r, x + r, x + r), (250, 250, 250) if ink[0] < 100 else (30, 30, 30), ink, max(1, w // 48))
    if rng.random() < 0.7:
        for k in range(1, 13):
            a = math.radians(30 * k - 90)
            if w >= 96 and rng.random() < 0.95:
                b.text(
                    image, str(k), x + 0.83 * r * math.cos(a), x + 0.83 * r * math.sin(a), max(8, w // 13), ink, face=0
                )
            else:
                draw.line(
                    (x + r * math.cos(a), x + r * math.sin(a), x + 0.88 * r * math.cos(a), x + 0.88 * r * math.sin(a)),
                    ink,
                )
    for turn, length, wide in ((hour + 0.5 * half, 0.5, 18), (6 * half, 0.8, 32)):
        a = math.radians(30 * turn - 90)
        draw.line((x, x, x + length * r * math.cos(a), x + length * r * math.sin(a)), ink, max(1, w // wide))
    if rng.random() < 0.5 or half:
        answer = f"{hour}:{'30' if half else '00'}"
        times = [f"{rng.randrange(1, 13)}:{rng.choice(['00', '30'])}" for _ in range(5)]
        return Asked(
            [image],
            rng.choice(["What time is it?", "Read the clock.", "Which time does the clock show?"]),
            answer,
            others_of(answer, times),
        )
    return Asked(
        [image],
        rng.choice(["Which hour does the clock show?", "To which hour does the short hand point?"]),
        str(hour),
        [str(k) for k in range(1, 13) if k != hour],
    )


@kind
def level(rng: Random) -> Asked:
    """Batteries, thermometers and traffic lights."""
    b = Brush(rng)
    side, what = b.side(48), rng.choice(["battery", "lights", "thermometer"])
    image = b.canvas(side, plain=0.9)
    draw, ink = ImageDraw.Draw(image), b.ink(image)
    if what == "lights":
        k, names = rng.randrange(3), ["red", "yellow", "green"]
        draw.rounded_rectangle((0.3 * side, 0.04 * side, 0.7 * side, 0.96 * side), side * 0.06, (40, 40, 40))
        for j in range(3):
            y = (0.19 + 0.31 * j) * side
            draw.ellipse(
                (0.37 * side, y - 0.13 * side, 0.63 * side, y + 0.13 * side),
                COLOURS[names[j]] if j == k else (80, 80, 80),
            )
        if rng.random() < 0.5:
            answer = ["stop", "wait", "go"][k]
            return Asked(
                [image],
                "What does the traffic light say: stop, wait or go?",
                answer,
                others_of(answer, ["stop", "wait", "go"]),
            )
        return Asked([image], "Which light is on?", names[k], others_of(names[k], names))
    if what == "battery":
        k = rng.randrange(5)
        draw.rectangle((0.1 * side, 0.3 * side, 0.85 * side, 0.7 * side), None, ink, max(1, side // 32))
        draw.rectangle((0.85 * side, 0.43 * side, 0.92 * side, 0.57 * side), ink)
        for j in range(k):
            draw.rectangle(
                ((0.14 + 0.175 * j) * side, 0.35 * side, (0.28 + 0.175 * j) * side, 0.65 * side),
                (30, 170, 60) if k > 1 else (210, 40, 40),
            )
        return Asked(
            [image],
            rng.choice(["How many bars has the battery, of 4?", "How many parts of the battery are full?"]),
            str(k),
            near(k, 0, 4),
        )
    k = rng.randrange(0, 11)
    top = (0.8 - 0.07 * k) * side
    draw.rounded_rectangle((0.44 * side, 0.06 * side, 0.56 * side, 0.85 * side), side * 0.05, (250, 250, 250), ink)
    draw.rectangle((0.46 * side, top, 0.54 * side, 0.85 * side), (210, 30, 30))
    draw.ellipse((0.38 * side, 0.76 * side, 0.62 * side, 0.98 * side), (210, 30, 30))
    for j in range(11):
        draw.line((0.58 * side, (0.8 - 0.07 * j) * side, 0.66 * side, (0.8 - 0.07 * j) * side), ink)
    if rng.random() < 0.5:
        answer = "cold" if k < 4 else "hot" if k > 6 else "warm"
        return Asked([image], "Is it cold, warm or hot?", answer, others_of(answer, ["cold", "warm", "hot"]))
    return Asked(
        [image],
        rng.choice(["The thermometer goes from 0 to 10. What does it show?", "Read the thermometer (0 to 10)."]),
        str(k),
        near(k, 0, 10),
    )
