"""Zoom-v0: a question about a detail that is lost in a small overview of a picture; a tool shows parts enlarged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, Literal

from PIL import Image
from pydantic import Field

from rl_vlm.envs.base import Count, EpisodeEnv, Info, Item, Reply
from rl_vlm.envs.data import Row, Schema, TableSet
from rl_vlm.envs.rows import BadRowError
from rl_vlm.envs.sources import DataSource
from rl_vlm.envs.tool_forms import ToolCallError
from rl_vlm.types import EncodedImage, Message, Observation, UserInputError
from rl_vlm.zoo.drawing import IMAGE_SIZE
from rl_vlm.zoo.zoom.answers import normalized, read_answer
from rl_vlm.zoo.zoom.crops import TOOL, WHOLE, cut, overview, read_crop
from rl_vlm.zoo.zoom.flags import EASY, HARD, FlagScene, flag_item, render_scene

QUESTION = (
    "Which pattern has the red and white flag: rows (horizontal stripes), columns (vertical stripes), checks (a "
    "chessboard), bricks (horizontal stripes that change colour every two fields) or stairs (stripes that run down in "
    "steps)?"
)


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
        raise BadRowError(f"no answer can equal {answer[:80]!r}, which is {read_answer(answer).reason}.")
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
            **self._counted(correct), "answer": answer.value, "reason": answer.reason,
            "well_formed": answer.value is not None, "truth": self._item.answer,
        }  # fmt: skip
        return Reply(float(correct), None, info)

    def _counted(self, correct: bool = False) -> Info:
        info: Info = {"calls": self._calls, "call_errors": self._call_errors, "correct": correct}
        if self._item.difficulty:
            info |= {f"{name}_{self._item.difficulty}": info[name] for name in ("calls", "correct")}
        return info | {"difficulty": self._item.difficulty, "crops": self._crops}
