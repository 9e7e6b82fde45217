"""Lessons of the tiny model for environments of one's own: to answer in the form that a prompt asks for.

A prompt names some answers and a form, in one of many ways. The reply is a random one of the answers in that form, so
the form is learned and no task is. Other lessons are words to repeat, and what Shapes-v0 shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import numpy as np

from rl_vlm.zoo.shapes import environment as shapes
from rl_vlm.zoo.shapes import lesson as counting
from rl_vlm.zoo.tiny.teach import Draw, Exchange

FORMS_SHARE, REPEAT_SHARE = 0.60, 0.12  # of the conversations; the rest are those of Shapes-v0

LISTS = json.loads(Path(__file__).with_name("lists.json").read_text(encoding="utf-8"))
WORDS: list[str] = LISTS["words"]
_COMMON = [word for word in WORDS if word.isalpha() and word.islower() and len(word) > 1]
_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_MARKS = " .,:;!?()[]{}<>/\\\"'=+-*_#"

CORPUS = tuple(
    form.format(word)
    for word in WORDS
    for form in ("x {0} {0}", "({0}", ">{0}", '"{0}', "{0}")
) + tuple(f"({key.capitalize()}: <{key}>x</{key}>" for key in LISTS["keys"])  # fmt: skip

Form = Callable[[str], str]


def _answers(rng: Random) -> list[str]:
    """What may be answered."""
    kind, count, start = rng.random(), rng.choice([2, 2, 3, 3, 3, 4, 4, 5]), rng.choice([0, 1, 1, 1, 2, 3, 5])
    if kind < 0.30:
        return list(rng.choice(LISTS["answers"]))
    if kind < 0.45:
        return rng.sample(_COMMON, count)
    if kind < 0.55:
        verb = rng.choice(LISTS["verbs"] + LISTS["keys"])
        return [f"{verb} {number}" for number in range(start, start + count)]
    if kind < 0.63:
        verb = rng.choice(LISTS["verbs"])
        return [f"{verb} {word}" for word in rng.sample(_COMMON, count)]
    if kind < 0.78:
        return [str(number) for number in range(start, start + count)]
    if kind < 0.83:
        return [str(rng.randrange(100)) for _ in range(count)]
    if kind < 0.88:
        return [f"{rng.randrange(10)}, {rng.randrange(10)}" for _ in range(count)]
    if kind < 0.95:
        return [" ".join(rng.sample(_COMMON, 2)) for _ in range(count)]
    return ["".join(rng.choices(_CHARACTERS, k=rng.randrange(1, 5))) for _ in range(count)]


def _value(answer: str) -> str | int:
    return int(answer) if answer.isdigit() and str(int(answer)) == answer else answer


def random_form(rng: Random) -> tuple[Form, str]:
    """How an answer is written, and the name that it goes by."""
    key = rng.choice(LISTS["keys"]) if rng.random() < 0.6 else rng.choice(_COMMON)
    title = key.capitalize() if rng.random() < 0.7 else key
    other, said, tool = rng.choice(_COMMON), rng.choice(_COMMON), rng.choice(LISTS["tools"])
    spaced, digit = rng.random() < 0.6, rng.randrange(10)
    thought = " ".join(rng.sample(_COMMON, rng.randrange(1, 5)))

    def call(answer: str) -> str:
        content = {"name": tool, "arguments": {key: _value(answer)}}
        if not spaced:
            return f"<tool_call>{json.dumps(content, separators=(',', ':'))}</tool_call>"
        return f"<tool_call>\n{json.dumps(content)}\n</tool_call>"

    forms: list[tuple[float, Form]] = [
        (22, lambda answer: answer),
        (20, lambda answer: f"<{key}>{answer}</{key}>"),
        (2, lambda answer: f"<{key}> {answer} </{key}>"),
        (8, lambda answer: json.dumps({key: _value(answer)})),
        (3, lambda answer: json.dumps({other: said, key: _value(answer)})),
        (3, lambda answer: json.dumps({key: _value(answer), other: digit})),
        (8, lambda answer: f"{title}: {answer}"),
        (4, lambda answer: f"\\boxed{{{answer}}}"),
        (2, lambda answer: f"Answer: \\boxed{{{answer}}}"),
        (2, lambda answer: f"[{answer}]"),
        (2, lambda answer: f"({answer})"),
        (2, lambda answer: f"**{answer}**"),
        (4, lambda answer: f"The {key} is {answer}."),
        (3, lambda answer: f"I choose {answer}."),
        (2, lambda answer: f"{key}({answer})"),
        (2, lambda answer: f"{key}={answer}"),
        (10, call),
        (4, lambda answer: f"<think>{thought}</think>\n<{key}>{answer}</{key}>"),
        (3, lambda answer: f"<think>{thought}</think><{key}>{answer}</{key}>"),
    ]
    weights, choices = zip(*forms, strict=True)
    return rng.choices(choices, weights)[0], key


def _listed(rng: Random, texts: Sequence[str]) -> str:
    gap = rng.choice([", ", ", ", " / ", "; ", " | "])
    kind = rng.random()
    if kind < 0.15:
        return "\n" + "\n".join(f"- {text}" for text in texts)
    if kind < 0.25:
        return " ".join(f"{letter}) {text}" for letter, text in zip("ABCDE", texts, strict=False))
    return f"{gap.join(texts[:-1])}{rng.choice([' or ', ' or ', ' and ', gap])}{texts[-1]}"


def asked_in(rng: Random, answers: Sequence[str], form: Form, key: str) -> str:
    """Says which answers there are, and in which form."""
    named, say, such_as = list(answers), rng.choice(LISTS["say"]), rng.choice(LISTS["such as"])
    if rng.random() < 0.3:
        rng.shuffle(named)
    name, kind = rng.choice(LISTS["placeholders"]).format(key), rng.random()
    shown, listed = form(name if rng.random() < 0.6 else rng.choice(named)), _listed(rng, named)
    if "".join(answers) in "ABCDE" and rng.random() < 0.7:  # letters of options
        listed = " ".join(f"{letter}{rng.choice(').:')} {rng.choice(_COMMON)}" for letter in answers)
    if kind < 0.32:
        text = (
            f"{say} {rng.choice(LISTS['one of'])} {_listed(rng, [form(one) for one in named])}{rng.choice(['.', ''])}"
        )
    elif kind < 0.52:
        text = f"{listed}{rng.choice(['?', '.', ''])} {say} {such_as} {shown}{rng.choice(['.', '', ''])}"
    elif kind < 0.70:
        ways, verbs = ["where", "with", "in which"], ["is one of", "is", "can be", "is either"]
        text = f"{say} {such_as} {shown}, {rng.choice(ways)} {name} {rng.choice(verbs)} {listed}."
    elif kind < 0.80:
        before, *after = (part.strip() for part in form("\0").split("\0"))
        inside, gap = rng.choice(["between", "inside", "in"]), rng.choice([" and ", "", "..."])
        there = f"{inside} {before}{gap}{after[0]}" if before and len(after) == 1 else f"{such_as} {shown}"
        text = f"{rng.choice(['Put', 'Write', 'Give'])} {listed} {there}."
    elif kind < 0.92:
        lead = rng.choice(["Options:", "Choices:", "Actions:", "Words:", "You may say", "Possible:", "Allowed:"])
        text = f"{lead} {listed}.{rng.choice([' ', chr(10)])}{say} {such_as} {shown}"
    else:
        says = ["is how you answer", "is the format", "shows the form"]
        text = f"{shown} {rng.choice(says)}. {rng.choice(['Choose', 'Use', 'Pick'])} {listed}."
    return " ".join(part for part in text.split(" ") if part)


def random_sentence(rng: Random, most: int = 12) -> str:
    """Something beside the point."""
    text = " ".join(rng.choices(_COMMON, k=rng.randrange(2, most)))
    return text.capitalize() + rng.choice(["", f" {rng.randrange(20)}"]) + rng.choice("..?!:")


def _picture(numbers: np.random.Generator) -> np.ndarray:
    return shapes.draw(numbers, int(numbers.integers(1, 5)), "train")[1]


def form_dialogue(rng: Random, numbers: np.random.Generator) -> tuple[list[Exchange], set[str]]:
    """A conversation of up to three turns about a form, and the first replies that would be well formed."""
    answers, (form, key) = _answers(rng), random_form(rng)
    about = " ".join(random_sentence(rng) for _ in range(rng.choice([0, 1, 1, 1, 2, 2, 3])))
    asked = asked_in(rng, answers, form, key)
    text = f"{about} {asked}" if rng.random() < 0.85 else f"{asked} {about}"
    pictures = [_picture(numbers) for _ in range(rng.choice([1, 1, 1, 1, 2]))]
    turns = [Exchange("user", (*pictures, text.strip()), form(rng.choice(answers)))]
    while rng.random() < 0.25 and len(turns) < 3:
        role = "tool" if "<tool_call>" in turns[0].reply else "user"
        turns.append(Exchange(role, (random_sentence(rng, 6),), form(rng.choice(answers))))  # type: ignore[arg-type]
    return turns, {form(one) for one in answers}


def repeat_dialogue(rng: Random, numbers: np.random.Generator) -> list[Exchange]:
    """Words, or any characters, to be repeated: every row of the head is set apart from the others."""
    if rng.random() < 0.7:
        said = " ".join(rng.choices(WORDS, k=rng.choice([1, 1, 1, 1, 2, 2, 3, 4, 6])))
    else:
        said = "".join(rng.choices(_CHARACTERS + _MARKS, k=rng.randrange(1, 8))).strip() or "a"
    lead = rng.choice(["Say:", "Repeat:", "Write:", "Copy:", "Say", "Write", "Answer with", "Reply with", "Echo:"])
    before = f"{random_sentence(rng, 6)} " if rng.random() < 0.4 else ""
    return [Exchange("user", (_picture(numbers), f"{before}{lead} {said}"), said)]


def drawer(seed: int) -> Draw:
    rng, numbers, count = Random(f"words {seed}"), np.random.default_rng([seed, 9]), counting.drawer(seed)

    def draw() -> Sequence[Exchange]:
        kind = rng.random()
        if kind < FORMS_SHARE:
            return form_dialogue(rng, numbers)[0]
        return repeat_dialogue(rng, numbers) if kind < FORMS_SHARE + REPEAT_SHARE else count()

    return draw
