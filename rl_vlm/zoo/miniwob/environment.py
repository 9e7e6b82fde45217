"""MiniWoB-v0: the small web tasks of MiniWoB++, seen as screenshots and played by clicks and keys."""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from rl_vlm.envs.base import Count, EpisodeEnv, Info, Item, Reply, Seconds
from rl_vlm.envs.errors import EnvError
from rl_vlm.types import EncodedImage, Observation, UserInputError
from rl_vlm.zoo.miniwob.actions import FORMS, Coordinates, Frame, NoActionError, parse_action, perform
from rl_vlm.zoo.miniwob.browser import Browser, Page, PageLostError

WIDTH, HEIGHT = 160, 210  # of every task, in the page's pixels
_WINDOW = 500, 320  # beside the task stands what people see of it: rewards and time
MAX_SCALE = 8
NOT_SOLVED = -1.0  # what the pages themselves give when time is up
RULES = (
    "You see a web page. Carry out the task by actions; after each you see the page again. x runs from 0 to {x} and "
    "y from 0 at the top to {y}. In each of at most {turns} turns end your answer with one of: {actions}. "
)
_START = """
core.setDataMode({split!r}); Math.seedrandom({seed!r}); core.startEpisodeReal(); core.EPISODE_MAX_TIME / 1000
"""
_TASK = "(said => said.utterance || said)(core.getUtterance())"
_STATE = "[WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL, WOB_REWARD_REASON]"


@cache
def folder() -> Path:
    """The pages of the package `miniwob`, which is not imported. Raises UserInputError without it."""
    found = importlib.util.find_spec("miniwob")
    if found is None or not found.submodule_search_locations:
        # With its dependencies it would replace Gymnasium by a version that RLlib does not take.
        raise UserInputError("MiniWoB-v0 needs the package miniwob: run `pip install --no-deps miniwob==1.1.0`.")
    return Path(found.submodule_search_locations[0]) / "html" / "miniwob"


def all_tasks() -> list[str]:
    """The names of the package's tasks."""
    return sorted(path.stem for path in folder().glob("*.html"))


class MiniWoBEnv(EpisodeEnv):
    """Carry out a small web task in Chromium by actions in words: `click(x, y)`, `type("text")`, `key(Enter)` and more.

    tasks: names such as click-test-2, of which items take turns; by default all. A name that ends with `.html` is a
    page of your own that uses MiniWoB's core.js. coordinates: what x and y count: "pixels" of the picture, or its width
    and height as 1 ("unit") or 1000 ("thousandths"). scale: the picture is so many times as large as the page of
    160 x 210. turn_seconds: how far the page's clock runs in a turn; it stands still while the policy thinks, so that
    the time limit of a task (7 to 30 seconds) is one of turns. max_turns: a further limit. deadline_s: real seconds
    after which a page that does not answer has hung. seed: which set of items.

    The reward is the task's own without its discount for time, from -1 to 1; -1 for an episode that ends otherwise.
    An answer without an action gets a reminder and still costs a turn. `info` holds `task`, `correct` (a reward above
    0), `outcome` ("solved", "failed", "done", "turns", "playing", or what became of the page: "hung", "crashed",
    "dialog", "window" or "navigated") and `well_formed`.
    """

    name = "MiniWoB-v0"

    def __init__(
        self,
        tasks: str | Sequence[str] | None = None,
        *,
        coordinates: Coordinates = "pixels",
        scale: Annotated[int, Field(ge=1, le=MAX_SCALE)] = 2,
        turn_seconds: Annotated[float, Field(gt=0, le=30)] = 1.0,
        max_turns: Count = 30,
        deadline_s: Seconds = 30.0,
        seed: int = 0,
        num_train: Count = 4096,
        num_test: Count = 512,
    ) -> None:
        super().__init__(num_train=num_train, num_test=num_test, max_turns=max_turns)
        self.tasks = [tasks] if isinstance(tasks, str) else list(all_tasks() if tasks is None else tasks)
        self._files = [Path(one).resolve() if one.endswith(".html") else folder() / f"{one}.html" for one in self.tasks]
        unknown = [task for task, file in zip(self.tasks, self._files, strict=True) if not file.is_file()]
        if unknown or not self.tasks:
            known = ", ".join(all_tasks())
            raise UserInputError(f"MiniWoB-v0: env.kwargs.tasks names {unknown[:1] or 'nothing'}: choose from {known}.")
        self._frame = Frame(WIDTH, HEIGHT, scale, coordinates)
        self._turn_seconds, self._deadline_s, self._seed = turn_seconds, deadline_s, seed
        self._browser: Browser | None = None
        self.page: Page | None = None

    def open(self, item: Item) -> tuple[Observation, Info]:
        if self._browser is not None and not self._browser.alive:
            self.close()
        self._close_page()
        self._browser = self._browser or Browser.shared()
        number = item.index % len(self.tasks)
        self._task = self.tasks[number]
        try:
            page = self.page = Page(self._browser, self._deadline_s)
            page.load(self._files[number].as_uri(), *_WINDOW)
            start = _START.format(split=item.split, seed=f"{self._seed}/{item.split}/{item.index}")
            limit = math.ceil(page.evaluate(start) / self._turn_seconds)
            page.advance(min(0.1, self._turn_seconds / 2))
            self._words = str(page.evaluate(_TASK)).strip()
            self._turns = min(limit, self.max_turns or limit)
            x, y = self._frame.ends
            actions = ", ".join(word + form for word, form in FORMS.items())
            rules = RULES.format(x=x, y=y, turns=self._turns, actions=actions)
            return self._show(page, rules), {"task": self._task}
        except PageLostError as error:
            self._close_page()
            raise EnvError(f"MiniWoB-v0: the page of {self._task} did not open ({error}).") from error

    def reply(self, text: str) -> Reply:
        assert self.page is not None  # the episode is open
        info: Info = {"task": self._task, "correct": False, "outcome": "playing", "well_formed": True}
        try:
            return self._play(self.page, text, info)
        except PageLostError as error:
            return self._end(info, NOT_SOLVED, str(error))

    def _play(self, page: Page, text: str, info: Info) -> Reply:
        problem = ""
        try:
            action = parse_action(text, self._frame)
        except NoActionError as error:
            problem = f"That was no action: {error}. "
            info["well_formed"] = False
        else:
            if action.word == "done":
                return self._end(info, NOT_SOLVED, "done")
            perform(page, action)
        page.advance(self._turn_seconds)
        ended, reward, reason = page.evaluate(_STATE)
        if ended:
            outcome = "turns" if reason == "timed out" else "solved" if reward > 0 else "failed"
            return self._end(info, min(max(float(reward), -1.0), 1.0), outcome)
        if self.turn >= self._turns:
            return self._end(info, NOT_SOLVED, "turns")
        return Reply(0.0, self._show(page, problem), info)

    def _end(self, info: Info, reward: float, outcome: str) -> Reply:
        self._close_page()
        return Reply(reward, None, {**info, "correct": reward > 0, "outcome": outcome})

    def _show(self, page: Page, before: str) -> Observation:
        png = page.screenshot(WIDTH, HEIGHT, self._frame.scale)
        image = EncodedImage(hashlib.sha256(png).hexdigest(), png, *self._frame.picture)
        return Observation.user(image, f"{before}Task: {self._words}")

    def _close_page(self) -> None:
        if self.page is not None:
            self.page.close()
            self.page = None

    def close(self) -> None:
        self._close_page()
        if self._browser is not None:
            self._browser.give_back()
            self._browser = None
