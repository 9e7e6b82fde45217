"""The judge: a model compares each answer of a group with a reference."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import lru_cache

from rl_vlm.asking import Answer, Question, ServedEndpoint, ask_again
from rl_vlm.asking.http import HTTPEndpoint
from rl_vlm.config import JudgeSection
from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.rewards.judged import quoted, why_not_judged
from rl_vlm.rollout.reward_parts import AnsweredGroup, PartResult, register_reward_part
from rl_vlm.safe_text import without_thoughts
from rl_vlm.types import EncodedImage, GenerationRequest, Message, SamplingParams, Trajectory, UserInputError
from rl_vlm.waiting import all_or_none

CHOICES = ("1", "2")
_DIGIT = re.compile(r"(?<![\w.])[12](?![\w.]*\w)")


AskOne = Callable[[Sequence[str | EncodedImage], tuple[str, ...]], Awaitable[Answer]]


@asynccontextmanager
async def opened_judge(answered: AnsweredGroup) -> AsyncIterator[AskOne]:
    """A function that asks what the parts of one message say, to be answered by one of some choices, within the limits
    of `env.reward.judge`. It raises EndpointError."""
    settings = answered.reward_settings.judge
    gate, elsewhere = _gate_of(settings, asyncio.get_running_loop()), settings.endpoint
    endpoint = ServedEndpoint(answered.policy, answered.text) if elsewhere is None else _http_endpoint(elsewhere)
    async with endpoint.open() as ask:

        async def ask_one(parts: Sequence[str | EncodedImage], choices: tuple[str, ...]) -> Answer:
            message = Message("user", tuple(parts))
            asked = Question((message,), settings.answer_tokens, choices=choices if settings.guided else ())
            asked = asked.with_reason() if settings.guided == "reason" else asked
            async with gate:
                return await ask_again(
                    ask,
                    lambda attempt: replace(asked, seed=attempt),
                    attempts=settings.attempts,
                    deadline_s=settings.deadline_s,
                    who="judge",
                )

        yield ask_one


def filled(question: str, texts: Mapping[str, str]) -> str:
    """The question with texts in the places of its placeholders. In one pass: a text that holds one stays as it is."""
    return re.sub("|".join(map(re.escape, texts)), lambda match: texts[match[0]], question)


async def compare(
    ask: AskOne,
    settings: JudgeSection,
    images: Sequence[EncodedImage],
    answer: str,
    reference: str,
) -> tuple[float, dict[str, float]]:
    """Ask in both orders. Returns the answer's value, which is the mean probability of its choice where
    the judge gives it, and notes."""
    ours, theirs = (quoted(text, settings.max_chars) for text in (answer, reference))
    if ours == theirs:
        return 0.5, _notes(0.5)

    async def reply(first: str, second: str) -> Answer:
        texts = {"{first}": first, "{second}": second}
        return await ask((*images, filled(settings.question, texts)), CHOICES)

    replies = await all_or_none([reply(ours, theirs), reply(theirs, ours)])
    shown_first = [_preference(one.lines) for one in replies]
    win = {(1.0, 0.0): 1.0, (0.0, 1.0): 0.0}.get((shown_first[0], shown_first[1]), 0.5)
    given, swapped = (one.probabilities if settings.probabilities else None for one in replies)
    value = (given["1"] + swapped["2"]) / 2 if given and swapped else win
    return value, _notes(win, shown_first, sum(one.prompt_tokens + one.sampled_tokens for one in replies))


def _notes(win: float, shown_first: Sequence[float] = (), tokens: int = 0) -> dict[str, float]:
    """What `judge_metrics` reads: whether the answer won, and the replies' preferences for the text shown first."""
    return {
        "judge_win": win,
        "judge_requests": float(len(shown_first)),
        "judge_first": shown_first.count(1) / len(shown_first) if shown_first else -1.0,  # -1: not asked
        "judge_contradicts": float(bool(shown_first) and win == 0.5),
        "judge_unclear": float(shown_first.count(0.5)),
        "judge_refused": 0.0,
        "judge_tokens": float(tokens),
    }


def _preference(text: str) -> float:
    """1 if the reply's last line names the text shown first, 0 for the second, 0.5 where it names neither or both."""
    named = set(_DIGIT.findall(text.strip().rpartition("\n")[2]))
    return float(named == {"1"}) if len(named) == 1 else 0.5


@register_reward_part("judge")
async def judge(answered: AnsweredGroup) -> PartResult:
    """A model compares each answer with a reference, in both orders. By default it is the base model of the very
    replicas that serve the policy.

    An answer that is preferred in both orders wins (1), one that is preferred in neither loses (0), and where the
    orders contradict each other the judge has looked at the place and not at the text (0.5). Answers that are malformed
    or speak to the judge lose without a question. Raises UserInputError without a reference, EndpointError where the
    judge gives no reply in time.
    """
    settings, members = answered.reward_settings.judge, answered.group.trajectories
    started = time.monotonic()
    texts = [without_thoughts(said[-1]) for said in answered.answers]
    asked = [
        place
        for place, (one, text) in enumerate(zip(members, texts, strict=True))
        if one.turns[-1].well_formed and not why_not_judged(text, settings.max_chars)
    ]
    values, notes = [0.0] * len(members), [_notes(0.0) | {"judge_refused": 1.0} for _ in members]
    if asked:
        reference, cost = await _reference(answered)
        async with opened_judge(answered) as ask:
            opinions = await all_or_none(
                [compare(ask, settings, members[place].images, texts[place], reference) for place in asked]
            )
        for place, opinion in zip(asked, opinions, strict=True):
            values[place], notes[place] = opinion
        # The group's one question for a reference is counted with its first answer.
        notes[0]["judge_requests"] += cost > 0
        notes[0]["judge_tokens"] += cost
    seconds = time.monotonic() - started
    return PartResult(values, [{**one, "judge_seconds": seconds} for one in notes])


async def _reference(answered: AnsweredGroup) -> tuple[str, int]:
    """The text that the group's answers are compared with, and how many tokens it cost."""
    settings, members = answered.reward_settings.judge, answered.group.trajectories
    if settings.against == "start":
        return await _start(answered, members[0], settings.start_tokens)
    # An episode that was cut off never got its reference, and the others of the group have the same.
    for one in members:
        if isinstance(text := one.info.get(settings.key), str) and text.strip():
            return text, 0
    raise UserInputError(
        f"The environment's info has no text under {settings.key!r} to compare answers with: name the key that has one "
        "in env.reward.judge.key, or set env.reward.judge.against to start."
    )


async def _start(answered: AnsweredGroup, one: Trajectory, max_new_tokens: int) -> tuple[str, int]:
    """The base model's greedy answer to the prompt of an episode, and its tokens."""
    if len(one.turns) > 1:
        raise UserInputError(
            f"env.reward.judge.against: start compares answers to one prompt, and this episode had {len(one.turns)} "
            "turns: use against: reference."
        )
    codec = answered.text.codec
    prompt = answered.text.collapse(one.token_ids[: one.turns[0].start], one.images)
    shown = one.images[: int((prompt == codec.image_token_id).sum())]
    sampling = SamplingParams(max_new_tokens, temperature=0.0)
    request = GenerationRequest(f"{one.trajectory_id}:start", prompt, sampling, shown, BASE_MODEL)
    completion = await answered.policy.generate(request)
    said = completion.samples[0].token_ids
    return without_thoughts(codec.decode(said)), len(completion.prompt_ids) + len(said)


# One for all groups: it remembers how the server wants choices to be enforced.
_http_endpoint = lru_cache(maxsize=16)(HTTPEndpoint)


@lru_cache(maxsize=16)
def _gate_of(settings: JudgeSection, loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
    """One for all groups of a worker, whose loop it is."""
    elsewhere = settings.endpoint and settings.endpoint.max_in_flight
    return asyncio.Semaphore(min(settings.max_in_flight, elsewhere or settings.max_in_flight))
