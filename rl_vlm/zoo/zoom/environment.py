"""Zoom-v0: a question about a detail that is lost in a small overview of a picture; a tool shows parts enlarged."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Annotated, ClassVar, Literal

import numpy as np
from PIL import Image
from pydantic import Field

from rl_vlm.envs.base import Count, EpisodeEnv, Info, Item, Reply
from rl_vlm.envs.data import DataSource, Row, Schema, TableSet
from rl_vlm.envs.rows import BadRowError
from rl_vlm.envs.tools import ToolCallError, parse_tool_call
from rl_vlm.rewards.text import ReadAnswer, behind_thought
from rl_vlm.types import EncodedImage, Message, Observation, Split, UserInputError
from rl_vlm.zoo.drawing import IMAGE_SIZE, KINDS, MAX_SHAPES, Shape, render, split_of_content, stable_random

MAX_CHARS = 8000
# `Answer: x` to the end of its line or on the line below, `<answer>x</answer>`, `\boxed{x}`, and a heading `# Answer`
# above x.
_MARKED = re.compile(
    r"(?:(?<![^\W_])answer[\"'*_`]{0,3}\s*[:：]|答案\s*[:：]|^#{1,6}[ *_]*(?:final )?answer[ "
    r"*_]*$)[*_`\s]*(?P<line>[^\n]*)|<answer>(?P<tag>[^<>]*)</answer>|\\(?:boxed|fbox)\s?\{(?P<box>[^{}]*)\}",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE = re.compile(
    r"(?:(?:so|thus|therefore|hence),? )?(?:the |my )?(?:final |right |correct )?answer is\b:?(?P<value>.+)",
    re.IGNORECASE,
)
_BOXED = re.compile(r"\\(?:boxed|fbox)\s?\{([^{}]*)\}|<answer>([^<>]*)</answer>", re.IGNORECASE)
_FONT = re.compile(r"\\(?:text|textbf|mathrm)\s?\{([^{}]*)\}")
_ARTICLE = re.compile(r"(?:a|an|the)\s+(?=\S)")
_DECORATION = " \t\r\n*_`~#>\"'“”‘’()[]{}.!,:;-–—|\\$"
# A number, also one of LaTeX whose backslash is decoration. What is stripped before it may hold its sign and its point.
_QUANTITY = re.compile(r"\d|[€£¥√]|[dt]?frac\b|sqrt\b")
_SIGN = re.compile(r"−|[-–](?=\S*$)")
_POINT = re.compile(r"(?<!\.)\.$")


def normalized(text: str) -> str:
    """What answers are compared by: lower case, single spaces, no article before it, no marks around it.

    A number keeps its sign, as "-", and its point, as "0.": "–.5" is "-0.5".
    """
    bare = text.strip(_DECORATION)
    number = bare.lstrip(_DECORATION + "−")
    if _QUANTITY.match(number):
        before = text[: text.find(number)]
        sign = "-" if _SIGN.search(before) else ""
        point = "0." if _POINT.search(before) and number[0].isdigit() else ""
        bare = f"{sign}{point}{number}"
    return _ARTICLE.sub("", " ".join(bare.casefold().split()), count=1)


def read_answer(text: str) -> ReadAnswer:
    """The answer of a text, which is compared as a whole: a list of answers is none of them.

    The answer is marked by `Answer:`, `<answer>` or `\\boxed{}` and ends the text; marks that name different answers
    name none. Without a mark a last line "The answer is x" says x, and a text of one line is the answer itself.

    Reasons: those of `behind_thought`, empty, several (marked answers that differ), misplaced (text follows the marked
    answer), unmarked (many lines, none of which is marked as the answer).
    """
    said, reason = behind_thought(text, MAX_CHARS)
    if reason:
        return ReadAnswer(None, reason)
    said = _FONT.sub(r"\1", said)
    marks = list(_MARKED.finditer(said))
    if not marks:
        lines = [line for line in said.splitlines() if line.strip(_DECORATION)]
        if lines and (sentence := _SENTENCE.fullmatch(lines[-1].strip(_DECORATION))):
            return _answer(sentence["value"])
        return _answer(lines[0]) if len(lines) == 1 else ReadAnswer(None, "unmarked" if lines else "empty")
    if said[marks[-1].end() :].strip(_DECORATION):
        return ReadAnswer(None, "misplaced")
    values = {_answer(mark["line"] or mark["tag"] or mark["box"] or "") for mark in marks}
    return values.pop() if len(values) == 1 else ReadAnswer(None, "several")


def _answer(text: str) -> ReadAnswer:
    value = normalized(_BOXED.sub(lambda box: box[1] or box[2] or "", text))
    return ReadAnswer(value) if value else ReadAnswer(None, "empty")


TOOL = "crop"
WHOLE = 1000  # coordinates are thousandths of the picture's width and height, as Qwen3-VL writes them
MIN_SIDE = 10  # thousandths
MAX_RATIO = 10  # of a crop's sides in pixels: image processors refuse very narrow images
_BRIEF = re.compile(r"(?:.*\s)?zoom (top|bottom) (left|right)[\s.]*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Crop:
    """A part of a picture: left, top, width and height in thousandths of the picture's width and height."""

    x: float
    y: float
    w: float
    h: float


QUADRANTS = {
    f"{row} {column}": Crop(x, y, WHOLE // 2, WHOLE // 2)
    for row, y in (("top", 0), ("bottom", WHOLE // 2))
    for column, x in (("left", 0), ("right", WHOLE // 2))
}


def read_crop(text: str, brief: bool = False) -> Crop | None:
    """The crop that a turn asks for; None if it calls no tool. Raises ToolCallError if it cannot be carried out.

    With `brief` a turn that ends with "zoom top left" (or another corner) asks for that quarter as well.
    """
    call = parse_tool_call(text)
    if call is None:
        named = _BRIEF.fullmatch(text) if brief and len(text) < 1000 else None
        return QUADRANTS[f"{named[1]} {named[2]}"] if named else None
    if call.name != TOOL:
        raise ToolCallError(f"there is no tool {call.name!r}, the only one is {TOOL}")
    if call.arguments.keys() != {"x", "y", "w", "h"}:
        raise ToolCallError(f"{TOOL} takes exactly the arguments x, y, w and h")
    values = list(call.arguments.values())
    if any(isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > WHOLE for value in values):
        raise ToolCallError(f"x, y, w and h must be numbers from 0 to {WHOLE}, thousandths of the picture")
    crop = Crop(*(float(call.arguments[name]) for name in ("x", "y", "w", "h")))
    if min(crop.w, crop.h) < MIN_SIDE:
        raise ToolCallError(f"w and h must be at least {MIN_SIDE} thousandths")
    if min(crop.x, crop.y) < 0 or max(crop.x + crop.w, crop.y + crop.h) > WHOLE:
        raise ToolCallError(
            f"the crop leaves the picture: x + w and y + h must be at most {WHOLE}, and x and y at least 0"
        )
    return crop


def overview(picture: Image.Image, size: int) -> EncodedImage:
    """The whole picture, its longer side `size` pixels; as it is where it is smaller."""
    if max(picture.size) <= size:
        return EncodedImage.from_pil(picture)
    return EncodedImage.from_pil(_scaled(picture, (0, 0, picture.width, picture.height), size))


def cut(picture: Image.Image, crop: Crop, size: int) -> EncodedImage:
    """The part, its longer side `size` pixels. Raises ToolCallError for a part that is very narrow in pixels."""
    left, top = crop.x * picture.width / WHOLE, crop.y * picture.height / WHOLE
    box = (left, top, left + crop.w * picture.width / WHOLE, top + crop.h * picture.height / WHOLE)
    width, height = box[2] - box[0], box[3] - box[1]
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ToolCallError(f"one side of the crop is more than {MAX_RATIO} times as long as the other")
    return EncodedImage.from_pil(_scaled(picture, box, size))


def _scaled(picture: Image.Image, box: tuple[float, float, float, float], size: int) -> Image.Image:
    """Where it gets smaller, each pixel is the mean of those that fall on it: nothing finer comes through."""
    width, height = box[2] - box[0], box[3] - box[1]
    scale = size / max(width, height)
    resampling = Image.Resampling.BOX if scale <= 1 else Image.Resampling.BICUBIC
    box = (box[0], box[1], min(box[2], picture.width), min(box[3], picture.height))  # rounding may lead beyond
    return picture.resize((max(1, round(width * scale)), max(1, round(height * scale))), resampling, box=box)


# A drawing is `zoom` times as wide and high as its overview. The cloth of a hard flag has fields of half a pixel of
# the overview: each pixel there is the mean of two red and two white fields, so the overviews of all patterns are
# equal in every byte. The hash of a layout, without the pattern, is its split: no test overview is trained on.

RED, WHITE = (230, 30, 30), (250, 250, 250)  # their mean is exact in 8 bits
PLAIN_COLOURS = ("green", "blue", "yellow")  # of the shapes around the flag
QUESTION = (
    "Which pattern has the red and white flag: rows (horizontal stripes), columns (vertical stripes), checks (a "
    "chessboard), bricks (horizontal stripes that change colour every two fields) or stairs (stripes that run down in "
    "steps)?"
)
# Whether the field in row i and column j is red. In every two by two fields two are, whatever the pattern.
_RED_FIELDS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "rows": lambda i, j: (i + 0 * j) % 2 == 0,
    "columns": lambda i, j: (0 * i + j) % 2 == 0,
    "checks": lambda i, j: (i + j) % 2 == 0,
    "bricks": lambda i, j: (i + j // 2) % 2 == 0,
    "stairs": lambda i, j: np.where((i // 2 + j // 2) % 2 == 0, i, j) % 2 == 0,
}
PATTERNS = tuple(_RED_FIELDS)
_CLOTH = np.array((WHITE, RED), dtype=np.uint8)
EASY, HARD = "easy", "hard"
# Sides of flags, in pixels of an overview of 64 pixels; hard ones keep this size in larger overviews.
_EASY_SIZES, _HARD_SIZES = (16, 26), (6, 9)
_PLAIN_SIZES = (6, 22)


@dataclass(frozen=True, slots=True)
class Flag:
    """A square flag: quadrant 0-3, its corner and side in pixels of the overview, the pattern of its cloth."""

    quadrant: int
    x: int
    y: int
    size: int
    hard: bool
    pattern: str


@dataclass(frozen=True, slots=True)
class FlagScene:
    """A flag and, in other quadrants, plain shapes; view_size: pixels per side of the overview."""

    flag: Flag
    shapes: tuple[Shape, ...]
    view_size: int = IMAGE_SIZE

    def split(self) -> Split:
        flag = self.flag
        content: list[object] = [self.view_size, flag.x, flag.y, flag.size, flag.hard]
        content += [(shape.kind, shape.colour, shape.x, shape.y, shape.size) for shape in self.shapes]
        return split_of_content(content)


def random_scene(rng: Random, pattern: str, hard: bool, split: Split, view_size: int = IMAGE_SIZE) -> FlagScene:
    """A flag with this pattern and one to three shapes, each in a quadrant of its own."""
    half, unit = view_size // 2, view_size // IMAGE_SIZE
    while True:
        quadrant, *others = rng.sample(range(MAX_SHAPES), rng.randint(2, MAX_SHAPES))
        size = rng.randint(*_HARD_SIZES) if hard else rng.randint(*_EASY_SIZES) * unit
        x, y = (rng.randint(1, half - size - 1) for _ in range(2))
        flag = Flag(quadrant, x + quadrant % 2 * half, y + quadrant // 2 * half, size, hard, pattern)
        scene = FlagScene(flag, tuple(_plain(rng, other) for other in sorted(others)), view_size)
        if scene.split() == split:
            return scene


def flag_item(split: Split, index: int, seed: int = 0, view_size: int = IMAGE_SIZE) -> FlagScene:
    """Task instance `index`: every other one is hard, and of ten neighbours two have each pattern."""
    rng = stable_random("zoom", split, index, seed)
    return random_scene(rng, PATTERNS[index // 2 % len(PATTERNS)], bool(index % 2), split, view_size)


def render_scene(scene: FlagScene, zoom: int) -> np.ndarray:
    """Paint the whole picture: uint8 [view_size · zoom, view_size · zoom, 3]. `zoom` is even."""
    pixels = render(scene.shapes, scene.view_size * zoom)
    flag = scene.flag
    field = zoom // 2 if flag.hard else 2 * zoom * scene.view_size // IMAGE_SIZE
    # The cloth is cut from a roll that covers the picture, so that fields begin at the same places for every flag.
    rows, columns = (np.arange(start * zoom, (start + flag.size) * zoom) // field for start in (flag.y, flag.x))
    red = _RED_FIELDS[flag.pattern](rows[:, None], columns[None, :])
    area = pixels[flag.y * zoom : (flag.y + flag.size) * zoom, flag.x * zoom : (flag.x + flag.size) * zoom]
    area[:] = _CLOTH[red.view(np.uint8)]
    return pixels


def _plain(rng: Random, quadrant: int) -> Shape:
    half, size = IMAGE_SIZE // 2, rng.randint(*_PLAIN_SIZES)
    x, y = (rng.randint(1, half - size - 1) for _ in range(2))
    x, y = x + quadrant % 2 * half, y + quadrant // 2 * half
    return Shape(quadrant, rng.choice(KINDS), rng.choice(PLAIN_COLOURS), x, y, size)


MIN_VIEW_SIZE, MAX_VIEW_SIZE = 64, 2048
MAX_CACHED_PIXELS = 16_000_000  # of a whole picture, 48 MB; the largest one would take 192
MIN_TURNS, MAX_TURNS = 2, 16
BRIEF = "Which pattern?"  # in place of the question of drawn pictures
# After the question. "brief" is for the tiny model, whose every token costs.
PROMPTS = {
    "full": (
        "\nYou see the picture reduced, so that small things may be lost. To look closer, call {tool} with the left "
        "and top edge, width and height of a part, in thousandths of the picture:\n<tool_call>\n"
        '{{"name": "{tool}", "arguments": {{"x": 250, "y": 0, "w": 500, "h": 500}}}}\n</tool_call>\n'
        "and end your turn; you then get that part enlarged. A call costs {cost:g} of the reward of 1 for the right "
        "answer, so call only where "
        "you must. You have {turns} turns. When you know, end with a line such as\nAnswer: word"
    ),
    "brief": "",
}
_SHOWN = "The part at x {0.x:g}, y {0.y:g}, w {0.w:g}, h {0.h:g}. Call again, or end with a line Answer: ..."
_LAST = " This is your last turn: answer now."


@dataclass(frozen=True, slots=True)
class ZoomItem:
    """A picture (encoded, or to be painted), the question, its answer and, of drawn ones, easy or hard."""

    source: EncodedImage | FlagScene
    question: str
    answer: str
    difficulty: str = ""


def read_item(row: Row) -> ZoomItem:
    answer = row.truth("answer")
    if (value := read_answer(answer).value) is None:
        raise BadRowError(f"nobody can give the answer {answer[:80]!r}: it is {read_answer(answer).reason}.")
    return ZoomItem(row.image(row.cells["image"]), row.text("question"), value)


def picture_of(source: EncodedImage | FlagScene, zoom: int) -> Image.Image:
    """The whole picture; cached unless it is huge, because an episode looks at it several times."""
    if isinstance(source, EncodedImage) and source.width * source.height > MAX_CACHED_PIXELS:
        return source.to_pil()
    return _cached_picture(source, zoom)


@lru_cache(maxsize=8)
def _cached_picture(source: EncodedImage | FlagScene, zoom: int) -> Image.Image:
    return source.to_pil() if isinstance(source, EncodedImage) else Image.fromarray(render_scene(source, zoom))


@lru_cache(maxsize=128)
def overview_of(source: EncodedImage | FlagScene, zoom: int, view_size: int) -> EncodedImage:
    """What is shown first; cached for the copies of a group."""
    return overview(picture_of(source, zoom), view_size)


class ZoomEnv(EpisodeEnv):
    """A question about a picture that is shown reduced.

    The tool `crop` shows a part of it enlarged; the last turn answers. The reward is 1 for the right answer, 0 for any
    other, less `call_cost` for each call, also one that cannot be carried out.

    data: a data set with the columns `image`, `question`, `answer`; without it pictures with a flag are drawn. Every
    other one is hard: its cloth is too fine for the overview, which is the same for every pattern. view_size: pixels of
    the longer side of what is shown. docs/environments_acting.md lists the other arguments and what `info` holds.
    """

    name = "Zoom-v0"
    metrics: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "calls": (),
        "call_errors": (),
        **{f"{name}_{difficulty}": () for name in ("calls", "correct") for difficulty in (EASY, HARD)},
    }

    def __init__(
        self,
        data: DataSource | None = None,
        *,
        view_size: Annotated[int, Field(ge=MIN_VIEW_SIZE, le=MAX_VIEW_SIZE)] = IMAGE_SIZE,
        zoom: Annotated[int, Field(ge=2, le=16)] = 4,
        call_cost: Annotated[float, Field(ge=0, le=1)] = 0.05,
        max_turns: Annotated[int, Field(ge=MIN_TURNS, le=MAX_TURNS)] = 4,
        prompt: Literal["full", "brief"] = "full",
        seed: int = 0,
        num_train: Count = 16_384,
        num_test: Count = 512,
    ) -> None:
        rows = TableSet(Schema(read_item, ("image", "question", "answer")), data) if data else None
        super().__init__(num_train=num_train, num_test=num_test, max_turns=max_turns, rows=rows)
        if data is None and (view_size % IMAGE_SIZE or zoom % 2):
            raise UserInputError(
                f"Zoom-v0: env.kwargs.view_size must be a multiple of {IMAGE_SIZE} and zoom even for drawn pictures, "
                f"not {view_size} and {zoom}."
            )
        self._instructions = PROMPTS[prompt].format(tool=TOOL, cost=call_cost, turns=max_turns)
        self._brief = prompt == "brief"
        self._seed, self._view_size, self._zoom, self._call_cost = seed, view_size, zoom, call_cost

    def open(self, item: Item) -> tuple[Observation, Info]:
        found = self.row(item)
        if found is None:  # it is painted when it is looked at: the pictures are large
            scene = flag_item(item.split, item.index, self._seed, self._view_size)
            found = ZoomItem(scene, QUESTION, scene.flag.pattern, HARD if scene.flag.hard else EASY)
        self._item: ZoomItem = found
        self._calls = self._call_errors = 0
        self._crops: list[Info] = []
        image = overview_of(found.source, self._zoom, self._view_size)
        question = BRIEF if self._brief and found.difficulty else found.question + self._instructions
        return Observation.user(image, question), self._counted()

    def reply(self, text: str) -> Reply:
        try:
            crop = read_crop(text, self._brief)
            if crop is None:
                return self._graded(text)
            image = cut(picture_of(self._item.source, self._zoom), crop, self._view_size)
        except ToolCallError as error:
            self._call_errors += 1
            return self._after_call((f"The call could not be carried out: {error}.",))
        box = [round(side / WHOLE, 4) for side in (crop.x, crop.y, crop.x + crop.w, crop.y + crop.h)]
        self._crops.append({"picture": len(self._crops) + 1, "of": 0, "box": box})
        return self._after_call((image,) if self._brief else (image, _SHOWN.format(crop)))

    def _after_call(self, parts: tuple[EncodedImage | str, ...]) -> Reply:
        self._calls += 1
        info = self._counted()
        if self.is_last_turn:
            return Reply(-self._call_cost, None, {**info, "reason": "out_of_turns"}, truncated=True)
        warning = (_LAST,) if self.turn + 1 == self.max_turns and not self._brief else ()
        return Reply(-self._call_cost, Observation((Message("tool", (*parts, *warning)),)), info)

    def _graded(self, text: str) -> Reply:
        answer = read_answer(text)
        correct = answer.value == normalized(self._item.answer)
        info: Info = {
            **self._counted(correct),
            "answer": answer.value,
            "reason": answer.reason,
            "well_formed": answer.value is not None,
            "truth": self._item.answer,
        }
        return Reply(float(correct), None, info)

    def _counted(self, correct: bool = False) -> Info:
        info: Info = {"calls": self._calls, "call_errors": self._call_errors, "correct": correct}
        if self._item.difficulty:
            info |= {f"{name}_{self._item.difficulty}": info[name] for name in ("calls", "correct")}
        return info | {"difficulty": self._item.difficulty, "crops": self._crops}
