"""Judges without a reference: propositions about an answer or an episode, a choice among a group, and progress."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
from pydantic import ValidationError

from rl_vlm.asking import Answer
from rl_vlm.config import PropositionSection
from rl_vlm.config.complaints import explain
from rl_vlm.rewards.judged import quoted, repeats, why_not_judged
from rl_vlm.rollout.judge import AskOne, filled, opened_judge
from rl_vlm.rollout.reward_parts import AnsweredGroup, PartResult, register_reward_part
from rl_vlm.safe_text import without_thoughts
from rl_vlm.types import EncodedImage, Trajectory, UserInputError
from rl_vlm.waiting import all_or_none

LETTERS = "ABCDEFGHIJKLMNOPQRST"  # of answers; as many as endpoints give probabilities of
_Shown = list[str | EncodedImage]


@register_reward_part("rubric")
async def rubric(answered: AnsweredGroup) -> PartResult:
    """The weighted share of propositions that a model finds true, each by its probability: the sum of weight times
    probability, divided by the sum of the positive weights.

    An answer that is malformed, speaks to the judge or repeats a proposition earns 0 unseen. `info["rubric_judged"]`
    gets each proposition with its probability. Raises UserInputError without propositions, EndpointError.
    """
    settings, members = answered.reward_settings.rubric, answered.group.trajectories
    most = answered.reward_settings.judge.max_chars
    values, notes = [0.0] * len(members), [dict[str, Any]() for _ in members]

    async def judge(ask: AskOne, place: int) -> None:
        one, said = members[place], [without_thoughts(text) for text in answered.answers[place]]
        stated = _propositions(answered, one)
        if not one.turns[-1].well_formed or any(_is_rejected(text, most, stated) for text in said):
            notes[place]["rubric_rejected"] = 1.0
            return
        shown: _Shown = [*one.images, f"Answer: {quoted(said[-1], most)}\n"]
        if settings.sees == "episode":
            shown = _episode(answered, one, said, most)

        async def likely(text: str) -> float:
            question = filled(settings.question, {"{proposition}": text})
            return _probability(await ask((*shown, question), ("yes", "no")), "yes")

        async def share_of(proposition: PropositionSection) -> float:
            opposite = [likely(proposition.opposite)] if proposition.opposite else []
            share, *against = await all_or_none([likely(proposition.text), *opposite])
            return (share + 1 - against[0]) / 2 if against else share

        shares = await all_or_none([share_of(proposition) for proposition in stated])
        judged = [
            {"text": proposition.text, "weight": proposition.weight, "probability": round(share, 4)}
            for proposition, share in zip(stated, shares, strict=True)
        ]
        values[place] = sum(proposition.weight * share for proposition, share in zip(stated, shares, strict=True))
        values[place] /= sum(max(one.weight, 0.0) for one in stated)
        notes[place] |= {"rubric_judged": judged, "rubric_rejected": 0.0}

    async with opened_judge(answered) as ask:
        await all_or_none([judge(ask, place) for place in range(len(members))])
    return PartResult(values, notes)


def _propositions(answered: AnsweredGroup, one: Trajectory) -> list[PropositionSection]:
    """Those of the configuration and of the item. An episode that was cut off has the item's of another one."""
    settings = answered.reward_settings.rubric
    infos = [one.info, *(other.info for other in answered.group.trajectories)]
    given: Any = next((info[settings.key] for info in infos if settings.key in info), [])
    try:
        own = type(settings).model_validate({"propositions": given}).propositions
    except (ValidationError, TypeError) as error:
        why = explain(error, type(settings)) if isinstance(error, ValidationError) else "it is no list"
        raise UserInputError(f"The info's {settings.key!r} is no list of propositions: {why}") from error
    found = [*settings.propositions, *own]
    if not any(one.weight > 0 for one in found):
        raise UserInputError(
            "The reward part rubric has no proposition with a positive weight: set env.reward.rubric.propositions, or "
            f"let the environment give info[{settings.key!r}]."
        )
    return found


def _is_rejected(text: str, most: int, stated: Sequence[PropositionSection]) -> bool:
    sentences = [part for one in stated for part in (one.text, one.opposite) if part]
    return bool(why_not_judged(text, most)) or any(repeats(text, sentence) for sentence in sentences)


def _episode(answered: AnsweredGroup, one: Trajectory, said: Sequence[str], most: int) -> _Shown:
    """Its pictures and answers in turn, as a list of parts of one message."""
    shown: _Shown = []
    seen = 0
    for number, (turn, text) in enumerate(zip(one.turns, said, strict=True), 1):
        until = _images_before(answered, one, turn.start)
        shown += [*one.placed_images[seen:until], f"Answer {number}: {quoted(text, most)}\n"]
        seen = until
    return shown


def _images_before(answered: AnsweredGroup, one: Trajectory, end: int) -> int:
    """How many of `placed_images` stand before a token."""
    text = answered.text
    before = text.collapse(one.token_ids[:end], one.placed_images)
    return int((before == text.codec.image_token_id).sum())


@register_reward_part("group_judge")
async def group_judge(answered: AnsweredGroup) -> PartResult:
    """A model chooses the best answer of the group, in several random orders; an answer earns its rank by the mean
    logarithm of its probability, between 0 and 1 (as RULER of OpenPipe's ART compares a group in one question).

    Equal answers are shown once and earn the same. Answers that are malformed or speak to the judge earn 0 unseen.
    Raises UserInputError for a group of more than 20 answers, EndpointError.
    """
    settings, members = answered.reward_settings.group_judge, answered.group.trajectories
    most = answered.reward_settings.judge.max_chars
    said = [without_thoughts(texts[-1]) for texts in answered.answers]
    shown = [
        quoted(text, most) if one.turns[-1].well_formed and not why_not_judged(text, most) else ""
        for one, text in zip(members, said, strict=True)
    ]
    texts = sorted({text for text in shown if text})
    if len(texts) > len(LETTERS):
        raise UserInputError(f"group_judge compares at most {len(LETTERS)} answers: set rollout.group_size.")
    if len(texts) < 2:
        return PartResult([float(bool(text)) / 2 for text in shown], [{} for _ in members])

    async def ask_in_order(ask: AskOne, number: int) -> np.ndarray:
        """Log-probabilities of the texts, in their order here."""
        order = Random(f"{answered.group.group_id} {number}").sample(range(len(texts)), len(texts))
        lines = "\n".join(f"{letter}: {texts[place]}" for letter, place in zip(LETTERS, order, strict=False))
        letters = tuple(LETTERS[: len(texts)])
        question = filled(settings.question, {"{answers}": lines})
        answer = await ask((*members[0].images, question), letters)
        found = np.zeros(len(texts))
        for letter, place in zip(letters, order, strict=True):
            found[place] = math.log(max(_probability(answer, letter), 1e-6))
        return found

    async with opened_judge(answered) as ask:
        scores = np.mean(await all_or_none([ask_in_order(ask, number) for number in range(settings.orders)]), axis=0)
    worse = (scores[None] < scores[:, None]).sum(1) + ((scores[None] == scores[:, None]).sum(1) - 1) / 2
    rank = dict(zip(texts, (worse + 0.5) / len(texts), strict=True))
    return PartResult([float(rank.get(text, 0.0)) for text in shown], [{"group_judge_shown": bool(t)} for t in shown])


@register_reward_part("progress")
async def progress(answered: AnsweredGroup) -> PartResult:
    """How much likelier a model finds the task done at the last picture of an episode than at the first: log P(True),
    from -1 to 1 after division by its range over the episode, whose values are in `info["progress"]` (TOPReward, arXiv
    2602.19313). 0 where nothing changes. Raises UserInputError without a task, EndpointError."""
    settings, members = answered.reward_settings.progress, answered.group.trajectories
    task = settings.task or next((str(one.info["task"]) for one in members if "task" in one.info), "")
    if not task:
        raise UserInputError("The reward part progress needs to know the task: set env.reward.progress.task.")
    question = filled(settings.question, {"{task}": task})

    async def likely(ask: AskOne, images: Sequence[EncodedImage]) -> float:
        chosen = np.linspace(0, len(images) - 1, min(settings.pictures, len(images))).round().astype(int)
        answer = await ask((*(images[place] for place in chosen), question), ("True", "False"))
        return math.log(max(_probability(answer, "True"), 1e-6))

    async def along(ask: AskOne, one: Trajectory) -> list[float]:
        return await all_or_none([likely(ask, one.images[: count + 1]) for count in range(len(one.images))])

    async with opened_judge(answered) as ask:
        films = await all_or_none([along(ask, one) for one in members])
    values = [(film[-1] - film[0]) / (np.ptp(film) or 1.0) if film else 0.0 for film in films]
    return PartResult(values, [{"progress": [round(value, 3) for value in film]} for film in films])


def _probability(answer: Answer, choice: str) -> float:
    """Of a choice; 1 or 0 by the text where the judge gives none."""
    if answer.probabilities is not None:
        return answer.probabilities[choice]
    words = re.findall(r"\w+", answer.lines.strip().rpartition("\n")[2].lower())
    return float(words[-1:] == [choice.lower()])
