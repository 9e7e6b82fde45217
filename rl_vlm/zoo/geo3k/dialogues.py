"""Geometry dialogues for the tiny model's warm start: the real environment, generated questions, random answers.

They teach the form of tool calls and of turns after a reply. Numbers and drawings are random, so nothing about geometry
can be learned.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

from rl_vlm.types import Observation, as_encoded
from rl_vlm.zoo import drawing
from rl_vlm.zoo.geo3k.environment import Geo3kEnv
from rl_vlm.zoo.shapes import environment as shapes_data
from rl_vlm.zoo.tiny.teach import Dialogue, Exchange

NUM_QUESTIONS = 64
_RIGHT_CALL = 0.15  # of the calls; their replies are followed by the same value in a box
_ANSWER_AT_ONCE = (0.35, 0.5, 0.9)  # by turn: how often the reply is a boxed answer and no call


class GeometryDialogues:
    """Runs `Geo3kEnv` with brief prompts on generated questions."""

    def __init__(self, seed: int) -> None:
        self._folder = tempfile.TemporaryDirectory()  # of the generated questions; it goes with this object
        rng = drawing.stable_rng("geometry", seed)
        self._answers = [_number(rng) for _ in range(NUM_QUESTIONS)]
        rows = {
            "problem": ["<image>" + _problem(rng) for _ in self._answers],
            "answer": self._answers,
            "images": [[{"bytes": _png(line_drawing(rng))}] for _ in self._answers],
        }
        path = Path(self._folder.name) / "train.parquet"
        pq.write_table(pa.table(rows), path)
        # The settings of the tiny model's runs: whole figures, small grey squares, and without the tool.
        self._envs = [
            Geo3kEnv(str(path), prompt="brief"),
            Geo3kEnv(str(path), prompt="brief", image_size=64, square=True),
            Geo3kEnv(str(path), prompt="brief", image_size=64, square=True, scoring_tool=False),
        ]
        self._pixels: dict[str, np.ndarray] = {}  # decoded images by hash

    def draw(self, rng: np.random.Generator) -> Dialogue:
        """One dialogue of one to three turns."""
        which = int(rng.choice(3, p=(0.3, 0.5, 0.2)))
        index = int(rng.integers(NUM_QUESTIONS))
        env = self._envs[which]
        observation, _ = env.reset(options={"index": index, "split": "train"})
        pixels = self._decoded(observation)
        confirmed: str | None = None
        exchanges: list[Exchange] = []
        while observation.messages:
            message = observation.messages[-1]
            answer = confirmed or _number(rng)
            if which == 2 or confirmed or rng.random() < _ANSWER_AT_ONCE[len(exchanges)]:
                reply = f"Answer: \\boxed{{{answer}}}"
            else:
                if rng.random() < _RIGHT_CALL:
                    answer = confirmed = self._answers[index]
                reply = shapes_data.format_call(answer)
            exchanges.append(Exchange(message.role, message.text, reply))
            observation = env.step(reply)[0]
        return Dialogue((pixels,), tuple(exchanges))

    def _decoded(self, observation: Observation) -> np.ndarray:
        (image,) = as_encoded(observation.messages[-1].images)
        if image.sha256 not in self._pixels:
            self._pixels[image.sha256] = np.asarray(image.to_pil())
        return self._pixels[image.sha256]


def line_drawing(rng: np.random.Generator) -> Image.Image:
    """A few dark lines and perhaps a circle on white, 100 to 400 pixels a side."""
    width, height = (int(side) for side in rng.integers(100, 401, size=2))
    picture = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(picture)
    corners = [(int(x * width), int(y * height)) for x, y in rng.random((int(rng.integers(3, 6)), 2))]
    pen.line([*corners, corners[0]], fill="black", width=2)
    if rng.random() < 0.3:
        radius = min(width, height) // 3
        box = (width // 2 - radius, height // 2 - radius, width // 2 + radius, height // 2 + radius)
        pen.ellipse(box, outline="black", width=2)
    return picture


def _number(rng: np.random.Generator) -> str:
    """Mostly two digits, some one or three, some with a decimal."""
    whole = int(rng.integers(1, 100)) if rng.random() < 0.85 else int(rng.integers(100, 180))
    return str(whole) if rng.random() < 0.85 else f"{whole}.{int(rng.integers(1, 10))}"


def _problem(rng: np.random.Generator) -> str:
    letters = "".join(chr(ord("A") + number) for number in rng.permutation(26)[:3])
    first, second = rng.integers(1, 90, size=2)
    problems = (
        "Find x.",
        "Find y. Round to the nearest tenth.",
        f"Find the measure of angle {letters}.",
        f"Find the length of {letters[:2]}.",
        f"{letters[:2]} = {first} and {letters[1:]} = {second}. Find the area of triangle {letters}.",
        f"The measure of angle {letters} is {first} degrees. Find the measure of arc {letters[:2]}.",
        f"{letters} is a triangle. The radius of the circle is {first}. Find x. Give the answer in simplest form.",
    )
    return problems[rng.integers(len(problems))]


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()
