"""Digits, letters, words, prices, tables, dice, cards and faces."""

from __future__ import annotations

from random import Random

from PIL import Image, ImageDraw
from tools.eyes.asking import LETTERS, Asked, kind, near, others_of
from tools.eyes.brush import COLOURS, SHAPES, Brush, Tone


def _written(rng: Random, words: str, asked: str, others: list[str], least: int = 32) -> Asked:
    b = Brush(rng)
    side = max(b.side(least), min(224, 16 * len(words)))
    image = b.canvas(side, side if rng.random() < 0.5 else max(32, side // 2 // 32 * 32), plain=0.8)
    points = int(min(image.height * 0.8, image.width * 1.35 / max(1, len(words))) * rng.uniform(0.6, 1.0))
    tone = b.ink(image) if rng.random() < 0.5 else b.tone(b.colours(1, image)[0])
    b.text(image, words, image.width * rng.uniform(0.45, 0.55), image.height * rng.uniform(0.45, 0.55), points, tone)
    return Asked([image], asked, words, others)


@kind
def digit(rng: Random) -> Asked:
    n = rng.choice([rng.randrange(10), rng.randrange(10), rng.randrange(10, 100), rng.randrange(100, 1000)])
    others = [str(rng.randrange(10 ** (len(str(n)) - 1) * (n > 9), 10 ** len(str(n)))) for _ in range(5)]
    asked = rng.choice(
        [
            "Which number is this?",
            "Read the number.",
            "Which number do you see?",
            "What number is written here?",
            "Which digit is shown?" if n < 10 else "What does it say?",
        ]
    )
    return _written(rng, str(n), asked, others_of(str(n), others))


@kind
def letter(rng: Random) -> Asked:
    one = rng.choice(LETTERS)
    asked = rng.choice(
        ["Which letter is this?", "Read the letter.", "What letter do you see?", "Which letter is shown?"]
    )
    return _written(rng, one, asked, others_of(one, rng.sample(LETTERS, 5)))


WORDS = [*COLOURS, *SHAPES, *["stop", "go", "yes", "no", "open", "close", "left", "right", "up", "down", "start", "end", "on", "off", "save", "cancel", "ok", "next", "back", "home", "play", "pause", "help", "buy", "sell", "new", "old", "hot", "cold", "sun", "moon", "star", "tree", "fish", "bird", "cat", "dog", "house", "car", "milk", "bread", "tea", "salt", "apple", "door", "key", "book", "hat", "shoe", "cup", "ball", "lamp", "ship", "king", "queen", "push", "pull", "in", "out", "exit", "enter", "send", "sign", "menu", "search", "login", "price", "sale", "free", "total", "low", "high", "full", "empty", "ready", "wait", "error", "done"]]  # fmt: skip


@kind
def word(rng: Random) -> Asked:
    one = rng.choice(WORDS)
    shown = rng.choice([one, one.upper(), one.capitalize()])
    asked = rng.choice(["What does it say?", "Read the word.", "Which word is this?", "What is written here?"])
    found = _written(rng, shown, asked, others_of(one, rng.sample(WORDS, 5)))
    return found._replace(answer=one, question=asked + rng.choice([" In small letters.", " Use lower case.", ""]))


@kind
def price(rng: Random) -> Asked:
    number = f"{rng.choice([rng.randrange(1, 10), rng.randrange(1, 100)])}.{rng.choice(['00', '50', '99', '95', f'{rng.randrange(100):02}'])}"
    found = _written(rng, rng.choice(["${}", "{}", "{} €", "£{}"]).format(number), "", [], 64)
    others = [f"{rng.randrange(1, 100)}.{rng.choice(['00', '50', '99'])}" for _ in range(4)]
    return found._replace(
        question=rng.choice(
            ["What is the price?", "How much does it cost?", "Read the price tag.", "Which amount is written here?"]
        ),
        answer=number,
        others=others_of(number, others),
    )


@kind
def table(rng: Random) -> Asked:
    b, rows, columns = Brush(rng), rng.randrange(2, 4), rng.randrange(2, 4)
    side = b.side(96)
    image = Image.new("RGB", (side, side), rng.choice([(255, 255, 255), (245, 245, 230)]))
    draw = ImageDraw.Draw(image)
    cells = [[str(rng.randrange(rng.choice([10, 100]))) for _ in range(columns)] for _ in range(rows)]
    for r in range(rows):
        for c in range(columns):
            box = (c / columns * side, r / rows * side, (c + 1) / columns * side - 1, (r + 1) / rows * side - 1)
            draw.rectangle(box, None, (120, 120, 120))
            b.text(
                image,
                cells[r][c],
                (box[0] + box[2]) / 2,
                (box[1] + box[3]) / 2,
                int(side / max(rows, columns) * 0.5),
                (10, 10, 10),
                face=rng.choice([0, 1, 3]),
            )
    r, c = rng.randrange(rows), rng.randrange(columns)
    asked = rng.choice(
        [f"What is in row {r + 1}, column {c + 1} of the table?", f"Read the cell in column {c + 1} and row {r + 1}."]
    )
    return Asked([image], asked, cells[r][c], others_of(cells[r][c], [one for row in cells for one in row]) or ["0"])


PIPS = {
    1: [(1, 1)],
    2: [(0, 0), (2, 2)],
    3: [(0, 0), (1, 1), (2, 2)],
    4: [(0, 0), (0, 2), (2, 0), (2, 2)],
    5: [(0, 0), (0, 2), (2, 0), (2, 2), (1, 1)],
    6: [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1), (2, 2)],
}
DIE_TONES = [((250, 250, 250), (20, 20, 20)), ((200, 30, 30), (255, 255, 255)), ((30, 60, 160), (255, 255, 255))]


def draw_die(image: Image.Image, face: int, x: float, y: float, size: float, tones: tuple[Tone, Tone]) -> None:
    """Around (x, y), in the tones of the die and of its pips."""
    draw, left, top = ImageDraw.Draw(image), x - size / 2, y - size / 2
    draw.rounded_rectangle((left, top, left + size, top + size), size / 6, tones[0], (0, 0, 0))
    for c, r in PIPS[face]:
        px, py, q = left + (0.22 + 0.28 * c) * size, top + (0.22 + 0.28 * r) * size, size * 0.09
        draw.ellipse((px - q, py - q, px + q, py + q), tones[1])


@kind
def dice(rng: Random) -> Asked:
    b, n = Brush(rng), rng.choice([1, 1, 2, 2, 3])
    side = b.side(48)
    image = b.canvas(min(224, side * (n if side < 100 else 1)), side)
    faces, size = [rng.randrange(1, 7) for _ in range(n)], 0.8 * min(image.width / n, image.height)
    tones = rng.choice(DIE_TONES)
    for k, face in enumerate(faces):
        draw_die(image, face, (k + 0.5) / n * image.width, image.height / 2, size, tones)
    if n == 1:
        return Asked(
            [image],
            rng.choice(["Which number does the die show?", "How many pips are there?", "What was rolled?"]),
            str(faces[0]),
            near(faces[0], 1, 6),
        )
    if rng.random() < 0.6:
        return Asked(
            [image],
            rng.choice(["What is the sum of the dice?", "Add up the dice.", "How many pips are there in all?"]),
            str(sum(faces)),
            near(sum(faces), n, 6 * n),
        )
    most = rng.random() < 0.6
    return Asked(
        [image],
        f"What is the {'highest' if most else 'lowest'} number on the dice?",
        str(max(faces) if most else min(faces)),
        [str(k) for k in range(1, 7) if k != (max(faces) if most else min(faces))],
    )


@kind
def card(rng: Random) -> Asked:
    b = Brush(rng)
    side = b.side(64)
    image = b.canvas(side)
    draw = ImageDraw.Draw(image)
    draw.rounded_rectangle(
        (0.22 * side, 0.08 * side, 0.78 * side, 0.92 * side), side * 0.06, (252, 252, 250), (40, 40, 40)
    )
    ranks = [*map(str, range(2, 11)), "J", "Q", "K", "A"]
    suits = {
        "hearts": ("heart", "red"),
        "diamonds": ("diamond", "red"),
        "stars": ("star", "black"),
        "crosses": ("cross", "black"),
    }
    rank, suit = rng.choice(ranks), rng.choice(list(suits))
    shape, name = suits[suit]
    b.text(image, rank, 0.36 * side, 0.24 * side, int(side * 0.2), COLOURS[name], face=1)
    b.shape(image, shape, 0.54 * side, 0.62 * side, 0.3 * side, name)
    if rng.random() < 0.5:
        return Asked(
            [image],
            rng.choice(
                ["Which rank has the card?", "Which letter or number is on the card?", "What is the value of the card?"]
            ),
            rank,
            others_of(rank, ranks),
        )
    return Asked(
        [image],
        rng.choice(
            [
                "Which suit is it: hearts, diamonds, stars or crosses?",
                "What is the suit of this card (hearts, diamonds, stars, crosses)?",
            ]
        ),
        suit,
        others_of(suit, list(suits)),
    )


@kind
def face(rng: Random) -> Asked:
    b = Brush(rng)
    side = b.side(48)
    image = b.canvas(side)
    draw, mood = ImageDraw.Draw(image), rng.choice(["happy", "sad", "neutral"])
    draw.ellipse(
        (0.1 * side, 0.1 * side, 0.9 * side, 0.9 * side), b.tone(rng.choice(["yellow", "orange", "pink"])), (30, 30, 30)
    )
    for x in (0.36, 0.64):
        draw.ellipse((x * side - 0.05 * side, 0.33 * side, x * side + 0.05 * side, 0.44 * side), (20, 20, 20))
    wide = max(2, side // 22)
    if mood == "neutral":
        draw.line((0.33 * side, 0.68 * side, 0.67 * side, 0.68 * side), (20, 20, 20), wide)
    else:
        box = (
            0.3 * side,
            (0.42 if mood == "happy" else 0.62) * side,
            0.7 * side,
            (0.76 if mood == "happy" else 0.96) * side,
        )
        draw.arc(box, *((20, 160) if mood == "happy" else (200, 340)), (20, 20, 20), wide)
    return Asked(
        [image],
        rng.choice(["Is the face happy, sad or neutral?", "Which mood has the face? (happy, sad, neutral)"]),
        mood,
        others_of(mood, ["happy", "sad", "neutral"]),
    )
