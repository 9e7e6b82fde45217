"""Checks an environment before anybody trains on it: it is made, played and compared from outside, and what is wrong
is named."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from types import FrameType
from typing import Any, Literal

import psutil
from PIL import Image

from rl_vlm.envs.base import StepResult, VisionEnv
from rl_vlm.envs.errors import check_reset, check_step
from rl_vlm.envs.foreign.vlm_gym import forget_shared
from rl_vlm.envs.images import one_line
from rl_vlm.envs.registry import make
from rl_vlm.types import EncodedImage, Observation, Split, UserInputError, as_encoded

MAX_STEPS = 200  # of one episode; an environment without an end is cut there
COMPARED = 100  # items of each split
SLOW_S = 1.0  # a median of resets or steps above this is a warning
# A leak grows in each of the rounds by more than so many bytes; what fills up once, or comes and goes, does not.
ROUNDS, MAX_GROWTH = 3, 2**20
CALL_S, MAKE_S, CLOSE_S = 60.0, 300.0, 5.0  # how long one call, making the environment and closing it may take
SPLITS: tuple[Split, ...] = ("train", "test")
# What a policy may write. None of it may stop an environment.
HOSTILE = ("", " ", "x" * 20_000, "<tool_call>{", r"\boxed{", "NaN", "é🐼\u202e\x00", "1" * 5000, "</think>")
_AGAIN_S = 1.0  # code that catches the interruption of a deadline is interrupted again


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str


@dataclass
class Report:
    """The findings in order, the first prompt as text with its first image, and figures."""

    env_id: str
    findings: list[Finding] = field(default_factory=list)
    prompt: str = ""
    image: EncodedImage | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return all(finding.status != "fail" for finding in self.findings)

    def add(self, name: str, wrong: str, fine: str = "", status: Literal["warn", "fail"] = "fail") -> None:
        """A finding: `wrong` if it is not empty, else `fine`."""
        self.findings.append(Finding(name, status if wrong else "ok", wrong or fine))


def check_environment(
    env_id: str,
    kwargs: dict[str, Any] | None = None,
    *,
    episodes: int = 20,
    seed: int = 0,
    budget_s: float = 20.0,
    call_s: float = CALL_S,
) -> Report:
    """Make the environment and try it. What it raises becomes a finding.

    episodes: how many are played and compared. seed: of the answers, words of the prompt. budget_s: about how long each
    check that repeats something may take; it then stops and says how often it did. call_s: how long one reset or step
    may take; one that takes longer is interrupted (in the main thread, where it can be).
    """
    report = Report(env_id)
    envs: list[VisionEnv] = []

    def build() -> VisionEnv:
        forget_shared()  # a new instance is one as in another process
        envs.append(make(env_id, **(kwargs or {})))
        return envs[-1]

    checks = _Checks(report, build, episodes, seed, budget_s, call_s)
    try:
        for check in (checks.opens, checks.splits, checks.plays, checks.repeats, checks.survives, checks.memory):
            check()
    except _WrongError as error:
        report.add(error.name, str(error))
    broken: list[_WrongError] = []
    for env in envs:
        try:
            with _naming("close", "close()", CLOSE_S):
                env.close()
        except _WrongError as error:
            broken.append(error)
    if broken:
        report.add("close", str(broken[0]))
    return report


class DeadlineError(BaseException):
    """The deadline has passed. No Exception, because code of others catches these."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise DeadlineError inside the block once `seconds` have passed; in another thread than the main one there is
    no deadline."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise DeadlineError

    before = signal.signal(signal.SIGALRM, interrupt)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)


class _WrongError(Exception):
    """The environment raised, so what follows cannot be checked."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


@contextmanager
def _naming(name: str, what: str, seconds: float) -> Iterator[None]:
    """What is raised, and what takes longer than `seconds`, is what is wrong with `name`."""
    try:
        with deadline(seconds):
            yield
    except DeadlineError as error:
        raise _WrongError(name, f"{what} hangs: it did not return in {seconds:g} s") from error
    except (SystemExit, Exception) as error:  # whatever the environment raises
        kind = "" if isinstance(error, UserInputError) else f"{type(error).__name__}: "
        raise _WrongError(name, f"{what}: {kind}{one_line(error)}") from error


@dataclass
class _Checks:
    """The checks, in the order in which they run."""

    report: Report
    build: Callable[[], VisionEnv]
    episodes: int
    seed: int
    budget_s: float
    call_s: float
    sizes: dict[Split, int | None] = field(default_factory=dict)
    resets: list[float] = field(default_factory=list)  # seconds, each of an item that was not open before

    def opens(self) -> None:
        """It can be made, opens with a prompt, and what it returns and takes is in its spaces."""
        started = time.perf_counter()
        with _naming("make", "It cannot be made", MAKE_S):
            self.env = self.build()
        seconds = time.perf_counter() - started
        self.report.add("make", "", f"{type(self.env).__name__}, in {seconds:.2f} s")
        with _naming("splits", "num_items() fails", self.call_s):
            self.sizes = {split: self.env.num_items(split) for split in SPLITS}
        self.report.figures |= {"make_s": round(seconds, 4), "num_items": dict(self.sizes)}
        if self._is_empty("train"):
            raise _WrongError("splits", "the split train is empty")
        observation = self._reset("train", 0)
        images = [image for message in observation.messages for image in message.images]
        self.report.prompt = as_text(observation)
        self.report.image = as_encoded(images)[0] if images else None
        shown = f"{len(self.report.prompt)} characters and {len(images)} images"
        blind = "" if images else f"{shown}: there is nothing to see before the answer"
        self.report.add("prompt", blind, shown, "warn")
        with _naming("spaces", "observation_space and action_space", self.call_s):
            inside = {
                "observation_space": self.env.observation_space.contains(observation),
                "action_space": self.env.action_space.contains("text"),
            }
        names = " and ".join(name for name, fits in inside.items() if not fits)
        self.report.add("spaces", f"{names} does not hold what is used" if names else "", "observation, text")

    def splits(self) -> None:
        """Both splits have items, and none is in both."""
        seen: dict[Split, dict[str, int]] = {split: {} for split in SPLITS}
        for split in SPLITS:
            if self._is_empty(split):
                self.report.add("splits", f"the split {split} is empty")
                return
            for index in self._within_budget(min(self.sizes[split] or COMPARED, COMPARED)):
                started = time.perf_counter()
                observation = self._reset(split, index)
                self.resets.append(time.perf_counter() - started)
                seen[split].setdefault(digest(observation), index)
        shared = sorted((index, seen["train"][one]) for one, index in seen["test"].items() if one in seen["train"])
        wrong = f"{len(shared)} of {len(seen['test'])} test prompts are also in train" if shared else ""
        if shared:
            wrong += f": test item {shared[0][0]} is train item {shared[0][1]}"
        sizes = ", ".join(f"{split} {'without end' if size is None else size}" for split, size in self.sizes.items())
        self.report.add("splits", wrong, f"{sizes}; no prompt of the first {COMPARED} in both")

    def plays(self) -> None:
        """Episodes end, with rewards that are numbers; how long resets and steps take."""
        played = [self._episode(index) for index in self._within_budget(self.episodes)]
        steps = [seconds for _, taken in played for seconds in taken]
        turns = [len(taken) for _, taken in played]
        rewards = [sum(reward for _, reward, *_ in shown[1:]) for shown, _ in played]
        endless = sum(not any(shown[-1][2:]) for shown, _ in played)
        wrong = f"{endless} of {len(turns)} episodes did not end in {MAX_STEPS} turns" if endless else ""
        self.report.add("ends", wrong, f"{len(turns)} episodes of {min(turns)} to {max(turns)} turns")
        medians = {"reset": statistics.median(self.resets), "step": statistics.median(steps)}
        self.report.figures |= {f"{name}_ms": round(1000 * median, 3) for name, median in medians.items()}
        self.report.figures |= {"turns": [min(turns), max(turns)], "rewards": [min(rewards), max(rewards)]}
        cost = "; ".join(
            f"{name} {1000 * medians[name]:.2f} ms, at most {1000 * max(taken):.1f}"
            for name, taken in (("reset", self.resets), ("step", steps))
        )
        slow = max(medians.values()) > SLOW_S
        self.report.add("cost", f"{cost}: more than {SLOW_S:g} s" if slow else "", cost, "warn")
        self.report.add("reward", "", f"from {min(rewards):g} to {max(rewards):g} for words of the prompt")

    def repeats(self) -> None:
        """The same index, seed and answers give the same episode, in this instance and in another one."""
        with _naming("determinism", "A second instance cannot be made", MAKE_S):
            other = self.build()
        wrong, compared = "", 0
        for index in self._within_budget(min(self.episodes, 5)):
            first, _ = self._episode(index)
            for which, env in (("the same instance", self.env), ("a new instance", other)):
                again, _ = self._episode(index, env)
                turn = next((n for n, (a, b) in enumerate(zip(first, again, strict=False)) if a != b), 0)
                if first != again:
                    wrong = wrong or f"item {index} with seed {self.seed} differs in {which}, from turn {turn} on"
            compared += 1
        self.report.add("determinism", wrong, f"{compared} episodes are the same again, also in a new instance")

    def survives(self) -> None:
        """No text of the policy makes it raise."""
        for text in HOSTILE:
            self._reset("train", 0)
            self._step(text)
        self.report.add("answers", "", f"{len(HOSTILE)} hostile answers are answered")

    def memory(self) -> None:
        """Memory does not grow with the episodes: the same few items are opened and answered again and again."""
        process, played = psutil.Process(), 0

        def run(count: int) -> int:
            nonlocal played
            for number in self._within_budget(count, self.budget_s / (ROUNDS + 1)):
                self._reset("train", number % 5)
                self._step("no")
                played += 1
            gc.collect()
            with suppress(AttributeError, OSError):  # another C library than glibc
                ctypes.CDLL(None).malloc_trim(0)  # a leak would fill what was freed before, and not show
            return int(process.memory_info().rss)

        marks, played = [run(60)], 0
        marks += [run(20 * self.episodes) for _ in range(ROUNDS)]
        growth = marks[-1] - marks[0]
        self.report.figures["memory_growth_bytes"] = growth
        said = f"{growth / 2**20:.1f} MiB over {played} episodes"
        leaks = min(after - before for before, after in pairwise(marks)) > MAX_GROWTH
        self.report.add("memory", f"it grows by {said}, steadily" if leaks else "", said)

    def _is_empty(self, split: Split) -> bool:
        size = self.sizes[split]
        return size is not None and size < 1

    def _within_budget(self, count: int, budget_s: float | None = None) -> Iterator[int]:
        """The numbers up to `count`, until the time is used up."""
        started = time.perf_counter()
        for number in range(count):
            yield number
            if time.perf_counter() - started > (budget_s or self.budget_s):
                return

    def _reset(self, split: Split, index: int, env: VisionEnv | None = None) -> Observation:
        index %= self.sizes[split] or index + 1
        with _naming("reset", f"reset() of {split} item {index}", self.call_s):
            options = {"index": index, "split": split}
            return check_reset((env or self.env).reset(seed=self.seed, options=options))[0]

    def _step(self, text: str, env: VisionEnv | None = None) -> StepResult:
        shown = text if len(text) <= 40 else f"{text[:40]}…"
        with _naming("step", f"step({shown!r})", self.call_s):
            return check_step((env or self.env).step(text))

    def _episode(self, index: int, env: VisionEnv | None = None) -> tuple[list[Any], list[float]]:
        """What an episode shows and rewards, and the seconds of its steps.

        The answers are random words of what the policy was last told, often one of the choices, and the same every
        time.
        """
        observation = self._reset("train", index, env)
        generator, words = random.Random(f"{self.seed}-{index}"), [""]
        shown: list[Any] = [digest(observation)]
        seconds: list[float] = []
        for _ in range(MAX_STEPS):
            said = " ".join(message.text for message in observation.messages).split()
            words = [word.strip(".,:;!?()") for word in said] or words
            answer, started = generator.choice(words), time.perf_counter()
            observation, reward, terminated, truncated, _ = self._step(answer, env)
            seconds.append(time.perf_counter() - started)
            shown.append((digest(observation), reward, terminated, truncated))
            if terminated or truncated:
                break
        return shown, seconds


def digest(observation: Observation) -> str:
    """A hash of every role, text and pixel file of an observation."""
    content = hashlib.sha256()
    for message in observation.messages:
        content.update(f"\0{message.role}".encode())
        for part in message.parts:
            shown = part if isinstance(part, str) else as_encoded([part])[0].sha256
            content.update(f"\0{type(part) is str}{shown}".encode())
    return content.hexdigest()


def as_text(observation: Observation) -> str:
    """The messages as a person reads them: "[user] [image 64x64] What is this?"."""
    lines = []
    for message in observation.messages:
        parts = (
            f"[image {part.width}x{part.height}]" if isinstance(part, Image.Image | EncodedImage) else part
            for part in message.parts
        )
        lines.append(f"[{message.role}] {' '.join(parts)}")
    return "\n".join(lines)
