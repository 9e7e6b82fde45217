"""What the generators draw with: backgrounds, colours, shapes and fonts, all from one random generator."""

from __future__ import annotations

import math
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from rl_vlm.types import UserInputError

Tone = tuple[int, int, int]
COLOURS = {
    "red": (214, 40, 40), "green": (44, 160, 60), "blue": (40, 80, 220), "yellow": (245, 215, 40), "orange": (250, 140, 20),
    "purple": (140, 60, 190), "pink": (250, 130, 190), "brown": (130, 80, 40), "black": (15, 15, 15), "white": (248, 248, 248),
    "grey": (135, 135, 135), "cyan": (60, 210, 220),
}  # fmt: skip
BRIGHT = ["red", "green", "blue", "yellow", "orange", "purple", "pink", "cyan"]
SHAPES = ["circle", "square", "triangle", "star", "cross", "diamond", "ring", "heart", "hexagon"]
SIDES = [32, 48, *[64] * 6, 96, 96, 96, 128, 128, 160, 192, 224]


@cache
def _fonts() -> list[Path]:
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts/ttf"
    names = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSansMono", "DejaVuSansMono-Bold", "STIXGeneral")
    return [folder / f"{name}.ttf" for name in names]


@cache
def font(number: int, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(_fonts()[number % len(_fonts())], size)


@cache
def photographs() -> list[Image.Image]:
    """Photographs that come with scikit-image: what stands behind a picture is seldom plain."""
    names = (
        "coffee camera astronaut gravel brick motorcycle_left hubble_deep_field moon grass rocket horse chelsea coins"
    )
    try:
        files = distribution("scikit-image").files or []
    except PackageNotFoundError as error:
        raise UserInputError("The backgrounds need scikit-image: run `pip install scikit-image`.") from error
    files = [file.locate() for file in files if file.stem in names.split()]
    return [Image.open(file).convert("RGB") for file in files]


class Brush:
    """Draws with the random numbers of one sample."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    def side(self, least: int = 32) -> int:
        return self.rng.choice([side for side in SIDES if side >= least])

    def canvas(self, width: int, height: int | None = None, plain: float = 0.7) -> Image.Image:
        """A background: plain, a gradient, noise, stripes or a part of a photograph, of low contrast."""
        rng, size, kind = self.rng, (width, height or width), self.rng.random()
        base = rng.choice([(255, 255, 255)] * 4 + [(128, 128, 128)] * 3 + [(0, 0, 0), (230, 230, 230), (40, 40, 40)])
        if rng.random() < 0.2:
            base = tuple(rng.randrange(256) for _ in range(3))
        if kind < plain:
            return Image.new("RGB", size, base)
        if kind < plain + (1 - plain) * 0.4:
            photograph = rng.choice(photographs())
            scale = rng.uniform(0.3, 1.5)
            w, h = min(photograph.width, int(size[0] / scale)), min(photograph.height, int(size[1] / scale))
            x, y = rng.randrange(photograph.width - w + 1), rng.randrange(photograph.height - h + 1)
            part = photograph.crop((x, y, x + w, y + h)).resize(size)
            return Image.blend(part, Image.new("RGB", size, base), rng.uniform(0.3, 0.7))
        numbers = np.random.default_rng(rng.getrandbits(32))
        if kind < plain + (1 - plain) * 0.7:
            noise = numbers.normal(0, rng.uniform(3, 25), (size[1], size[0], 1))
            return Image.fromarray((np.array(base) + noise).clip(0, 255).astype(np.uint8)).filter(
                ImageFilter.BoxBlur(rng.choice([0, 0, 1, 3]))
            )
        other = np.array([rng.randrange(256) for _ in range(3)])
        ramp = np.linspace(0, 0.6, size[0] if rng.random() < 0.5 else size[1])
        grid = (
            ramp[None, :, None]
            if len(ramp) == size[0] and rng.random() < 0.5
            else np.resize(ramp[:, None, None], (size[1], 1, 1))
        )
        return Image.fromarray(
            np.broadcast_to(np.array(base) * (1 - grid) + other * grid, (size[1], size[0], 3)).astype(np.uint8)
        )

    def tone(self, name: str, jitter: int = 18) -> tuple[int, int, int]:
        """A colour by its name, never twice the same."""
        return tuple(min(255, max(0, part + self.rng.randint(-jitter, jitter))) for part in COLOURS[name])  # type: ignore[return-value]

    def colours(self, count: int, image: Image.Image | None = None, among: list[str] | None = None) -> list[str]:
        """Names of different colours, none near that of the picture's middle."""
        names = list(among or COLOURS)
        if image is not None:
            mean = np.asarray(image.resize((4, 4))).reshape(-1, 3).astype(int)
            names = [n for n in names if np.abs(mean - np.array(COLOURS[n])).sum(1).min() > 90] or names
        self.rng.shuffle(names)
        return (names * count)[:count]

    def shape(
        self, image: Image.Image, kind: str, x: float, y: float, size: float, colour: str, turn: float = 0.0
    ) -> None:
        """A shape around (x, y) with that diameter, in pixels."""
        draw, fill, r = ImageDraw.Draw(image), self.tone(colour), size / 2
        edge = (0, 0, 0) if self.rng.random() < 0.25 else None
        box = (x - r, y - r, x + r, y + r)

        def ring(
            count: int, radii: tuple[float, ...] = (1.0,), start: float = -math.pi / 2
        ) -> list[tuple[float, float]]:
            angles = [start + turn + 2 * math.pi * k / count for k in range(count)]
            return [
                (x + r * radii[k % len(radii)] * math.cos(a), y + r * radii[k % len(radii)] * math.sin(a))
                for k, a in enumerate(angles)
            ]

        if kind == "circle":
            draw.ellipse(box, fill, edge)
        elif kind == "ring":
            draw.ellipse(box, None, fill, max(2, int(size / 6)))
        elif kind == "square":
            draw.polygon(ring(4, start=-math.pi / 4), fill, edge)
        elif kind == "cross":
            t = r / 3
            draw.rectangle((x - t, y - r, x + t, y + r), fill)
            draw.rectangle((x - r, y - t, x + r, y + t), fill)
        elif kind == "heart":
            draw.ellipse((x - r, y - r, x, y), fill)
            draw.ellipse((x, y - r, x + r, y), fill)
            draw.polygon([(x - r * 0.95, y - r * 0.3), (x + r * 0.95, y - r * 0.3), (x, y + r)], fill)
        else:
            count, radii = {
                "triangle": (3, (1.0,)),
                "star": (10, (1.0, 0.42)),
                "diamond": (4, (1.0, 0.62)),
                "hexagon": (6, (1.0,)),
            }[kind]
            draw.polygon(ring(count, radii), fill, edge)

    def spots(self, count: int, width: int, height: int, gap: float = 1.15) -> list[tuple[float, float, float]]:
        """Places (x, y, diameter) that do not overlap."""
        rng, found, size = self.rng, [], min(width, height) / max(2.2, 1.5 * math.sqrt(count) + 0.6)
        while len(found) < count:
            for _ in range(60):
                d = size * rng.uniform(0.65, 1.15)
                x, y = rng.uniform(d / 2 + 1, width - d / 2 - 1), rng.uniform(d / 2 + 1, height - d / 2 - 1)
                if all(math.hypot(x - a, y - b) > gap * (d + e) / 2 for a, b, e in found):
                    found.append((x, y, d))
                    break
            else:
                found, size = [], size * 0.9
        return found

    def text(
        self,
        image: Image.Image,
        words: str,
        x: float,
        y: float,
        size: int,
        colour: tuple[int, int, int],
        anchor: str = "mm",
        face: int | None = None,
    ) -> None:
        face = self.rng.randrange(6) if face is None else face
        ImageDraw.Draw(image).text((x, y), words, colour, font(face, max(7, size)), anchor)

    def ink(self, image: Image.Image) -> tuple[int, int, int]:
        """Black or white, whichever is seen on the picture."""
        return (10, 10, 10) if np.asarray(image).mean() > 120 else (245, 245, 245)
