"""Zoom-v0: a question about a detail that the overview of a picture may be too small to show; a tool shows parts of it enlarged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from PIL import Image

from rl_vlm.envs.base import Info, StepResult
from rl_vlm.envs.one_shot import OneShotEnv, check_integers, question_of
from rl_vlm.envs.rows import BadRowError
from rl_vlm.envs.tables import DataSource, RowTable, cell_text
from rl_vlm.envs.tools import ToolCallError
from rl_vlm.types import EncodedImage, Message, Observation, Split, UserInputError
from rl_vlm.zoo.drawing import IMAGE_SIZE
from rl_vlm.zoo.zoom.answer import normalized, read_answer
from rl_vlm.zoo.zoom.crops import TOOL, cut, overview, read_crop
from rl_vlm.zoo.zoom.data import EASY, HARD, QUESTION, FlagScene, flag_item, render_scene

NAME = "Zoom-v0"
MIN_VIEW_SIZE, MAX_VIEW_SIZE = 64, 2048
MIN_TURNS, MAX_TURNS = 2, 16
BRIEF = "Which pattern?"  # in place of the question of drawn pictures
# After the question. "brief" is for the tiny model, whose every token costs.
PROMPTS = {
    "full": (
        "\nYou see the picture reduced, so that small things may be lost. To look closer, call {tool} with the left and top edge, width and "
        "height of a part, in thousandths of the picture:\n<tool_call>\n"
        '{{"name": "{tool}", "arguments": {{"x": 250, "y": 0, "w": 500, "h": 500}}}}\n</tool_call>\n'
        "and end your turn; you then get that part enlarged. A call costs {cost:g} of the reward of 1 for the right answer, so call only where "
        "you must. You have {turns} turns. When you know, end with a line such as\nAnswer: word"
    ),
    "brief": "",
}
_SHOWN = "The part at {sides}. Call again, or end with a line Answer: ..."
_LAST = " This is your last turn: answer now."


@dataclass(frozen=True, slots=True)
class ZoomItem:
    """A picture (encoded, or to be painted), the question, its answer and, of drawn ones, easy or hard."""

    source: EncodedImage | FlagScene
    question: str
    answer: str
    difficulty: str = ""


class ZoomTable(RowTable[ZoomItem]):
    """Rows of `image`, `question` and `answer`: a few words that are compared as a whole (see `zoo/zoom/answer.py`)."""

    COLUMNS = ("image", "question", "answer")

    def _read(self, row: int) -> tuple[tuple[str, str], list[Any]]:
        values, where = self._rows.row(row), self._rows.where(row)
        question, answer = cell_text(values["question"]), normalized(cell_text(values["answer"]))
        for name, text in (("question", question), ("answer", answer)):
            if not text:
                raise BadRowError(f"{where}: the {name} is empty or not text.")
        return (question, answer), [values["image"]]

    def _make(self, fields: tuple[str, str], images: tuple[EncodedImage, ...], where: str) -> ZoomItem:
        return ZoomItem(images[0], *fields)


def drawn_item(split: Split, index: int, seed: int, view_size: int) -> ZoomItem:
    """A drawn item. It is painted when it is looked at: the pictures are large."""
    scene = flag_item(split, index, seed, view_size)
    return ZoomItem(scene, QUESTION, scene.flag.pattern, HARD if scene.flag.hard else EASY)


@lru_cache(maxsize=8)
def picture_of(source: EncodedImage | FlagScene, zoom: int) -> Image.Image:
    """The whole picture; cached, because an episode looks at it several times."""
    return source.to_pil() if isinstance(source, EncodedImage) else Image.fromarray(render_scene(source, zoom))


@lru_cache(maxsize=128)
def overview_of(source: EncodedImage | FlagScene, zoom: int, view_size: int) -> EncodedImage:
    """What is shown first; cached, because all copies of a group ask for the same one."""
    return overview(picture_of(source, zoom), view_size)


class ZoomEnv(OneShotEnv[ZoomItem]):
    """A question about a picture that is shown reduced. The tool `crop` shows a part of it enlarged; the last turn answers.

    data: a data set with the columns `image`, `question`, `answer`; without it, drawn pictures with a flag whose pattern is asked
        for. Every other one is hard: its cloth is too fine for the overview, which is the same for every pattern.
    view_size: pixels of the longer side of what is shown, overview and parts. zoom: how much larger a drawn picture is.
    call_cost: what each call takes from the reward, well formed or not. max_turns: turns, calls and answer, 2 to 16.
    prompt: "full" explains the tool; "brief", for the tiny model, asks in two words and also takes "zoom top left" as a call.
    seed: which set of drawn pictures; num_train and num_test: how many it holds.

    The reward is 1 for the right answer, 0 for any other, less the price of the calls. The reply to a call that cannot be carried
    out says what was wrong. `info` of a step: `calls`, `call_errors` (of them), `correct`, `difficulty` and, of drawn pictures, `calls_easy` or
    `calls_hard`, and `correct_easy` or `correct_hard`; of the answer `answer` (as it was read, or None), `reason` (why there is
    none; see `zoo/zoom/answer.py`), `well_formed`, `truth`.
    """

    metrics: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "calls": (),
        "call_errors": (),
        **{f"{name}_{difficulty}": () for name in ("calls", "correct") for difficulty in (EASY, HARD)},
    }

    def __init__(
        self,
        data: DataSource | None = None,
        *,
        view_size: int = IMAGE_SIZE,
        zoom: int = 4,
        call_cost: float = 0.05,
        max_turns: int = 4,
        prompt: str = "full",
        seed: int = 0,
        num_train: int = 16_384,
        num_test: int = 512,
    ) -> None:
        super().__init__(
            NAME, ZoomTable, data, lambda split, index: drawn_item(split, index, seed, view_size), num_train, num_test
        )
        check_integers(
            NAME,
            seed=(seed, None, None),
            view_size=(view_size, MIN_VIEW_SIZE, MAX_VIEW_SIZE),
            zoom=(zoom, 2, 16),
            max_turns=(max_turns, MIN_TURNS, MAX_TURNS),
        )
        if data is None and (view_size % IMAGE_SIZE or zoom % 2):
            raise UserInputError(
                f"{NAME}: env.kwargs.view_size must be a multiple of {IMAGE_SIZE} and zoom even for drawn pictures, not {view_size} and {zoom}."
            )
        if isinstance(call_cost, bool) or not isinstance(call_cost, int | float) or not 0 <= call_cost <= 1:
            raise UserInputError(f"{NAME}: env.kwargs.call_cost must be a number from 0 to 1, not {call_cost!r}.")
        self._instructions = question_of(NAME, PROMPTS, prompt).format(tool=TOOL, cost=call_cost, turns=max_turns)
        self._brief = prompt == "brief"
        self._view_size, self._zoom, self._call_cost, self._max_turns = view_size, zoom, call_cost, max_turns
        self._turns = self._calls = self._call_errors = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Show the overview of item `options["index"]` of `options["split"]`. Raises BadRowError if the row cannot be used."""
        super().reset(seed=seed)
        item, info = self.open_item(options)
        self._turns = self._calls = self._call_errors = 0
        image = overview_of(item.source, self._zoom, self._view_size)
        return Observation.user(image, self._asked(item)), {**info, **self._counted(item)}

    def step(self, action: str) -> StepResult:
        """Carry out a call, or grade the answer."""
        item = self.current_item()
        self._turns += 1
        try:
            crop = read_crop(action, self._brief)
            if crop is None:
                return self._graded(item, action)
            image = cut(picture_of(item.source, self._zoom), crop, self._view_size)
        except ToolCallError as error:
            self._call_errors += 1
            return self._after_call(item, (f"The call could not be carried out: {error}.",))
        return self._after_call(item, (image,) if self._brief else (image, _SHOWN.format(sides=crop.sides)))

    def _asked(self, item: ZoomItem) -> str:
        if self._brief:
            return BRIEF if item.difficulty else item.question
        return item.question + self._instructions

    def _after_call(self, item: ZoomItem, parts: tuple[EncodedImage | str, ...]) -> StepResult:
        self._calls += 1
        info = self._counted(item)
        if self._turns == self._max_turns:
            self.close_item()
            return Observation(), -self._call_cost, False, True, {**info, "reason": "out_of_turns"}
        warning = (_LAST,) if self._turns == self._max_turns - 1 and not self._brief else ()
        return Observation((Message("tool", (*parts, *warning)),)), -self._call_cost, False, False, info

    def _graded(self, item: ZoomItem, action: str) -> StepResult:
        self.close_item()
        answer = read_answer(action)
        correct = answer.value == normalized(item.answer)
        info: Info = {
            **self._counted(item, correct),
            "answer": answer.value,
            "reason": answer.reason,
            "well_formed": answer.value is not None,
            "truth": item.answer,
        }
        return Observation(), float(correct), True, False, info

    def _counted(self, item: ZoomItem, correct: bool = False) -> Info:
        info: Info = {"calls": self._calls, "call_errors": self._call_errors, "correct": correct}
        if item.difficulty:
            info |= {f"{name}_{item.difficulty}": info[name] for name in ("calls", "correct")}
        return info | {"difficulty": item.difficulty}
