"""Checks an environment before training: plays it from outside, in a process of its own."""

from __future__ import annotations

import hashlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from rl_vlm.envs.errors import EnvError
from rl_vlm.envs.isolation import ProcessEnv, pack_observation
from rl_vlm.types import EncodedImage, Observation, RLVLMError, Split, images_of

MAX_STEPS = 200  # of one episode; an environment without an end is cut there
COMPARED = 2000  # items of each split
REPEATED = 5  # episodes that are played again
SLOW_S = 1.0  # a median of resets or steps above this is a warning
SPLITS: tuple[Split, ...] = ("train", "test")
# What a policy may write. None of it may stop an environment.
HOSTILE = ("", " ", "x" * 20_000, "<tool_call>{", r"\boxed{", "NaN", "é🐼\u202e\x00", "1" * 5000, "</think>")


@dataclass(frozen=True)
class CheckResult:
    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str


@dataclass
class Report:
    """The findings in order, the first prompt as text with its first image, and measurements."""

    findings: list[CheckResult] = field(default_factory=list)
    prompt: str = ""
    image: EncodedImage | None = None
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(finding.status != "fail" for finding in self.findings)

    def add(self, name: str, wrong: str, fine: str = "", status: Literal["warn", "fail"] = "fail") -> None:
        """A finding: `wrong` if it is not empty, else `fine`."""
        self.findings.append(CheckResult(name, status if wrong else "ok", wrong or fine))


def check_environment(
    env_id: str,
    kwargs: dict[str, Any] | None = None,
    *,
    episodes: int = 20,
    seed: int = 0,
    budget_s: float = 20.0,
    call_s: float = 60.0,
    answers: Sequence[str] = (),
) -> Report:
    """Make the environment and try it. What it raises becomes a finding, and ends the check.

    seed: of the answers, drawn from `answers` or words of the prompt. budget_s: about how long each check that repeats
    something may take. call_s: how long one reset or step may take.
    """
    report = Report()
    with ExitStack() as closing:

        def build() -> ProcessEnv:
            env = ProcessEnv(env_id, kwargs, step_timeout_s=call_s)
            closing.callback(env.close)
            return env

        checks = _Checks(report, build, episodes, seed, budget_s, answers)
        for check in (checks.make, checks.splits, checks.play, checks.determinism, checks.answers, checks.close):
            try:
                check()
            except RLVLMError as error:
                report.add(check.__name__, str(error))
                break
    return report


@dataclass
class _Checks:
    """The checks, in the order in which they run. What the environment raises passes through."""

    report: Report
    build: Callable[[], ProcessEnv]
    num_episodes: int
    seed: int
    budget_s: float
    given: Sequence[str]
    resets: list[float] = field(default_factory=list)  # seconds, each of an item that was not open before
    unread: bool = False  # an info's `correct` is text

    def make(self) -> None:
        """It can be made, and opens with a prompt that shows something."""
        started = time.perf_counter()
        self.env = self.build()
        seconds = time.perf_counter() - started
        self.report.add("make", "", f"in {seconds:.2f} s")
        self.sizes = {split: self.env.num_items(split) for split in SPLITS}
        self.report.numbers |= {"make_s": round(seconds, 4), "num_items": self.sizes}
        for split, size in self.sizes.items():
            if size is not None and size < 1:
                raise EnvError(f"the split {split} is empty")
        observation = self._reset("train", 0)
        images = images_of(observation.messages)
        self.report.prompt = as_text(observation)
        self.report.image = images[0] if images else None
        shown = f"{len(self.report.prompt)} characters and {len(images)} image{'s' * (len(images) != 1)}"
        blind = "" if images else f"{shown}: there is nothing to see before the answer"
        self.report.add("prompt", blind, shown, "warn")

    def splits(self) -> None:
        """No item is in both splits."""
        seen: dict[Split, dict[str, int]] = {split: {} for split in SPLITS}
        for split in SPLITS:
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
        counts = " and ".join(f"{len(prompts)} {split}" for split, prompts in seen.items())
        self.report.add("splits", wrong, f"{sizes}; of {counts} prompts none is in both")

    def play(self) -> None:
        """Episodes end, with rewards that are numbers; how long resets and steps take."""
        played = [self._episode(index) for index in self._within_budget(self.num_episodes)]
        turns = [len(seconds) for _, seconds in played]
        rewards = [sum(reward for _, reward, *_ in shown[1:]) for shown, _ in played]
        endless = sum(not any(shown[-1][2:]) for shown, _ in played)
        wrong = f"{endless} of {len(turns)} episodes did not end in {MAX_STEPS} turns" if endless else ""
        self.report.add("ends", wrong, f"{len(turns)} episodes of {min(turns)} to {max(turns)} turns")
        reset = statistics.median(self.resets)
        step = statistics.median(seconds for _, taken in played for seconds in taken)
        self.report.numbers |= {"reset_ms": round(1000 * reset, 3), "step_ms": round(1000 * step, 3)}
        self.report.numbers |= {"turns": [min(turns), max(turns)], "rewards": [min(rewards), max(rewards)]}
        cost = f"reset {1000 * reset:.2f} ms, step {1000 * step:.2f} ms"
        self.report.add("cost", f"{cost}: more than {SLOW_S:g} s" if max(reset, step) > SLOW_S else "", cost, "warn")
        said = "the answers given" if self.given else "words of the prompt"
        alike = "" if self.given or min(rewards) < max(rewards) else "; name answers that are rewarded with --answers"
        fine = f"from {min(rewards):g} to {max(rewards):g} for {said}"
        wrong = f"always {min(rewards):g} for {said}{alike}" if min(rewards) == max(rewards) else ""
        self.report.add("reward", wrong, fine, "warn")
        if self.unread:
            self.report.add("correct", "info['correct'] is text: a reward of at least 1 counts as correct", "", "warn")

    def determinism(self) -> None:
        """The same index, seed and answers give the same episode, in this instance and in another one."""
        other = self.build()
        wrong, compared = "", 0
        for index in self._within_budget(min(self.num_episodes, REPEATED)):
            first, _ = self._episode(index)
            for which, env in (("the same instance", self.env), ("a new instance", other)):
                again, _ = self._episode(index, env)
                turn = next((n for n, (a, b) in enumerate(zip(first, again, strict=False)) if a != b), 0)
                if first != again:
                    wrong = wrong or f"item {index} with seed {self.seed} differs in {which}, from turn {turn} on"
            compared += 1
        self.report.add("determinism", wrong, f"{compared} episodes are the same again, also in a new instance")

    def answers(self) -> None:
        """No text of the policy makes it raise."""
        for text in HOSTILE:
            self._reset("train", 0)
            self.env.step(text)
        self.report.add("answers", "", f"{len(HOSTILE)} hostile answers are answered")

    def close(self) -> None:
        """It closes."""
        self.env.ask_to_close()
        self.report.add("close", "", "without an error")

    def _within_budget(self, count: int) -> Iterator[int]:
        """The numbers below `count`, until the time is used up."""
        started = time.perf_counter()
        for number in range(count):
            yield number
            if time.perf_counter() - started > self.budget_s:
                return

    def _reset(self, split: Split, index: int, env: ProcessEnv | None = None) -> Observation:
        index %= self.sizes[split] or index + 1
        try:
            return (env or self.env).reset(seed=self.seed, options={"index": index, "split": split})[0]
        except EnvError as error:
            raise EnvError(f"{split} item {index}: {error}") from error

    def _episode(self, index: int, env: ProcessEnv | None = None) -> tuple[list[Any], list[float]]:
        """What an episode shows and rewards, and the seconds of its steps.

        The answers are drawn from those given, or from the words of the last observation; always the same.
        """
        observation = self._reset("train", index, env)
        generator, words = random.Random(f"{self.seed}-{index}"), [""]
        shown: list[Any] = [digest(observation)]
        seconds: list[float] = []
        for _ in range(MAX_STEPS):
            said = " ".join(message.text for message in observation.messages).split()
            words = [word.strip(".,:;!?()") for word in said] or words
            answer, started = generator.choice(self.given or words), time.perf_counter()
            observation, reward, terminated, truncated, info = (env or self.env).step(answer)
            self.unread |= isinstance(info.get("correct"), str)
            seconds.append(time.perf_counter() - started)
            shown.append((digest(observation), reward, terminated, truncated))
            if terminated or truncated:
                break
        return shown, seconds


def digest(observation: Observation) -> str:
    """A hash of every role, text and image."""
    packed, images = pack_observation(observation)
    return hashlib.sha256(b"".join((repr(packed).encode(), *images))).hexdigest()


def as_text(observation: Observation) -> str:
    """The messages as a person reads them: "[user] [image 64x64] What is this?"."""
    lines = []
    for message in observation.messages:
        parts = (part if isinstance(part, str) else f"[image {part.width}x{part.height}]" for part in message.parts)
        lines.append(f"[{message.role}] {' '.join(parts)}")
    return "\n".join(lines)
