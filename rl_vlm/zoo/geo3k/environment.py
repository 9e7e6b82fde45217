"""Geo3k-v0: geometry questions with a figure and a tool that scores a value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from rl_vlm.envs.base import Count, EpisodeEnv, Info, Item, Reply
from rl_vlm.envs.data import TableSet
from rl_vlm.envs.images import fit
from rl_vlm.envs.questions import QUESTIONS, ImageQuestion
from rl_vlm.envs.sources import DataSource
from rl_vlm.envs.tool_forms import ToolCallError
from rl_vlm.envs.tools import parse_tool_call
from rl_vlm.rewards.boxes import extract_boxed
from rl_vlm.rewards.math import grade_turns, is_equal
from rl_vlm.safe_text import without_thoughts
from rl_vlm.types import EncodedImage, Message, Observation, UserInputError
from rl_vlm.zoo.drawing import MAX_IMAGE_SIZE
from rl_vlm.zoo.geo3k.drawn import IMAGE_SIZE, LEAST_SIZE, AngleStep, Level, drawn_problem

TOOLS = ("calc_score", "calc_geo3k_reward")  # the second is an alias
MAX_ECHO = 80  # characters of the policy's answer that a reply repeats

Prompt = Literal["auto", "full", "brief", "none"]
# Text of instructions, which no geometry problem holds: a data set with it has instructions of its own.
_INSTRUCTIONS = re.compile(r"\\(?:boxed|fbox)\b|<tool_call>|" + "|".join(TOOLS))

_FULL = (
    "You solve geometry problems that come with a figure. First reason step by step: what the figure and the text "
    "give, which theorem applies, what follows from it. End with the line\nAnswer: \\boxed{...}\nwhere the box holds "
    "the bare value, such as 42, 4\\sqrt{2} or \\frac{3}{5}."
)
_FULL_TOOL = (
    "\n\nYou have one tool. calc_score compares a value with the reference and tells you whether it is right. Call it "
    "at least once before you finish, with the bare value as digits or LaTeX:\n"
    '<tool_call>\n{"name": "calc_score", "arguments": {"answer": "42"}}\n</tool_call>\n'
    "The message with the call also holds the line Answer: \\boxed{42}. If the value was wrong, find the mistake and "
    "try again. If it was right, repeat the Answer line without a call. You have %d messages in all."
)
_BRIEF = r"Answer: \boxed{x}"
_BRIEF_TOOL = r'<tool_call>{"name": "calc_score", "arguments": {"answer": "x"}}</tool_call> or '

_LAST_TURN = r" Your next message is the last one: give your final Answer: \boxed{...} in it, without a call."
_FINISH = r"Now finish with Answer: \boxed{...} and no tool call."


class Geo3kEnv(EpisodeEnv):
    r"""One geometry question, up to `max_turns` answers.

    A turn with a tool call gets a reply of role "tool"; a turn without one ends the episode. The reward, 1 or 0, is
    given at the end for the last `\boxed{}` that the policy itself wrote, whatever the tool said before.

    data: questions (see `QUESTIONS`); without them problems are drawn. `scoring_tool=False` withholds the tool, which
    checks answers and so must be off where accuracy without help is measured. docs/environments.md lists the
    other arguments and what `info` holds.
    """

    name = "Geo3k-v0"

    def __init__(
        self,
        data: DataSource | None = None,
        max_turns: Count = 3,
        scoring_tool: bool = True,
        tool_cost: float = 0.0,
        format_bonus: float = 0.0,
        image_size: Count | None = None,
        square: bool = False,
        prompt: Prompt = "auto",
        level: Level | Annotated[Sequence[Level], Field(min_length=1)] | None = None,
        angle_step: AngleStep = 1,
        seed: int = 0,
        num_train: Count = 16_384,
        num_test: Count = 512,
    ) -> None:
        rows = TableSet(QUESTIONS, data) if data else None
        super().__init__(num_train=num_train, num_test=num_test, max_turns=max_turns, rows=rows)
        if data and level is not None:
            raise UserInputError("Geo3k-v0: env.kwargs.level is of drawn problems; the rows of env.data have none.")
        if square and image_size is None:
            raise UserInputError("Geo3k-v0: env.kwargs.square needs env.kwargs.image_size, in pixels.")
        if not data:
            levels = (1,) if level is None else (level,) if isinstance(level, int) else tuple(level)
            size = IMAGE_SIZE if image_size is None else image_size
            least = max(LEAST_SIZE[level] for level in levels)
            if not least <= size <= MAX_IMAGE_SIZE:
                raise UserInputError(
                    f"Geo3k-v0: env.kwargs.image_size at level {max(levels)} must be from {least} to {MAX_IMAGE_SIZE}, "
                    f"not {size}."
                )
            self._drawn, self._seed = (levels, angle_step, size), seed
        self._scoring_tool, self._tool_cost, self._format_bonus = scoring_tool, tool_cost, format_bonus
        self._image_size, self._square, self._prompt = image_size, square, prompt

    def open(self, item: Item) -> tuple[Observation, Info]:
        question = self.row(item)
        if question is None:
            problem, picture = drawn_problem(*self._drawn, item.split, item.index, self._seed)
            where = f"drawn {item.split} item {item.index}"
            question = ImageQuestion(problem.text, problem.answer, (picture,), where, problem.kind)
        self._question: ImageQuestion = question
        self._turns: list[str] = []
        self._tool_calls = self._tool_errors = 0
        self._bonus_given = False
        return self._opening(question), {"where": question.where}

    def reply(self, text: str) -> Reply:
        self._turns.append(text)
        truth, reward = self._question.answer, 0.0
        called = self._answer_call(text, truth)
        truncated = called is not None and self.is_last_turn
        if called is not None:
            said, well_formed = called
            status = "out_of_turns" if truncated else "running"
            self._tool_calls += 1
            self._tool_errors += not well_formed
            reward = self._format_bonus * (well_formed and not self._bonus_given) - self._tool_cost
            self._bonus_given |= well_formed
        elif extract_boxed(without_thoughts(text)) is not None:
            status, said = "answered", "Answer received."
        else:
            status, said = "no_answer", r"No tool call and no \boxed{} answer: the episode ends here."
        info: Info = {
            "turn": self.turn, "status": status, "tool_calls": self._tool_calls, "tool_errors": self._tool_errors,
            "answer": None, "correct": False, "reply": said, "kind": self._question.kind,
        }  # fmt: skip
        if status == "running":
            return Reply(reward, Observation((Message.of("tool", said),)), info)
        grade = grade_turns(self._turns, truth)
        info |= {"answer": grade.answer, "correct": grade.correct, "reason": grade.reason, "truth": truth}
        return Reply(reward + float(grade.correct), None, info, truncated)

    def _answer_call(self, text: str, truth: str) -> tuple[str, bool] | None:
        """The reply to the turn's tool call, and whether the call could be carried out; None without a call."""
        warning = _LAST_TURN if self.turn + 1 == self.max_turns else ""
        try:
            call = parse_tool_call(text)
        except ToolCallError as error:
            return f"Your tool call could not be read: {error}.{warning}", False
        if call is None:
            return None
        if not self._scoring_tool:
            return f"Unknown tool {call.name!r}: there are no tools. {_FINISH}", False
        if call.name not in TOOLS:
            return f"Unknown tool {call.name!r}: the only tool is {TOOLS[0]}.{warning}", False
        answer = call.arguments.get("answer")
        if isinstance(answer, int | float) and not isinstance(answer, bool):
            answer = str(answer)
        if not isinstance(answer, str) or not answer.strip():
            return f'Missing answer: {call.name} needs the argument "answer", your value as text.{warning}', False
        shown = answer if len(answer) <= MAX_ECHO else answer[:MAX_ECHO] + "..."
        boxed = extract_boxed(answer)
        if is_equal(answer if boxed is None else boxed, truth):
            return f"Score: 1. The answer {shown} is right. {_FINISH}", True
        return f"Score: 0. The answer {shown} is wrong.{warning or ' Look for the mistake.'}", True

    def _opening(self, question: ImageQuestion) -> Observation:
        size = self._image_size
        parts = tuple(
            fit(part, size, self._square) if size is not None and isinstance(part, EncodedImage) else part
            for part in question.parts()
        )
        own = self._prompt == "auto" and _INSTRUCTIONS.search(question.problem)
        if own or self._prompt == "none":
            return Observation.user(*parts)
        if self._prompt == "brief":
            tool = _BRIEF_TOOL if self._scoring_tool else ""
            return Observation.user(*parts, f"\n{tool}{_BRIEF}")
        instructions = _FULL + (_FULL_TOOL % self.max_turns if self._scoring_tool else "")
        return Observation((Message.of("system", instructions), Message("user", parts)))
