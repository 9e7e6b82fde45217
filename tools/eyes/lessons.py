"""Conversations about drawn pictures: what is seen, in the form that is asked for.

Most are about the generators of `kinds.py` and `scenes.py`, answered rightly. What rl_vlm's own environments show is
answered as their lessons say: perception rightly, the task at random, so that reinforcement learning has it to learn.
"""

from __future__ import annotations

import json
from random import Random

import numpy as np
from PIL import Image
from tools.eyes.asking import Asked
from tools.eyes.kinds import seen
from tools.eyes.scenes import described, questions, scene

from rl_vlm.zoo.caption import lesson as caption
from rl_vlm.zoo.control import lesson as control
from rl_vlm.zoo.geo3k import lesson as geo3k
from rl_vlm.zoo.geospot import lesson as geospot
from rl_vlm.zoo.gridwalk import lesson as gridwalk
from rl_vlm.zoo.poles import lesson as poles
from rl_vlm.zoo.scenes import lesson as own_scenes
from rl_vlm.zoo.shapes import lesson as counting
from rl_vlm.zoo.tiny.teach import Exchange
from rl_vlm.zoo.words import lesson as forms
from rl_vlm.zoo.zoom import lesson as zoom

OWN = {counting: 3, own_scenes: 3, caption: 3, gridwalk: 2, control: 2, zoom: 2, geo3k: 2, geospot: 1, poles: 3}
OWN_CORPUS = tuple(text for module in OWN for text in module.CORPUS)
ANGLE_SHARE = 0.3  # of the poles: one alone, whose angle is asked
LISTS = forms.LISTS


def pixels_of(picture: Image.Image) -> np.ndarray:
    return np.asarray(picture.convert("RGB"))


def as_exchange(rng: Random, asked: Asked, form: forms.Form, key: str, before: str = "") -> Exchange:
    """The question, what may be answered (or not) and the form (or not), and the true reply."""
    others = rng.sample(asked.others, len(asked.others))
    listed = [asked.answer, *others[: rng.choice([1, 2, 3, 3, 5])]]
    rng.shuffle(listed)
    kind = rng.random()
    if kind < 0.30:
        text = f"{asked.question} {forms.asked_in(rng, listed, form, key)}"
    elif kind < 0.35:
        text = f"{forms.asked_in(rng, listed, form, key)} {asked.question}"
    elif kind < 0.6:
        text = f"{asked.question} {form_alone(rng, form, key)}"
    else:
        ends = ["", "", "", " Answer with one word.", " Answer briefly.", " Say only the answer."]
        form, text = str, asked.question + rng.choice(ends)
    return Exchange("user", in_some_order(rng, asked, before + text), form(asked.answer))


def in_some_order(rng: Random, asked: Asked, text: str) -> tuple[str | np.ndarray, ...]:
    pictures = [pixels_of(one) for one in asked.pictures]
    return (*pictures, text) if rng.random() < 0.8 else (text, *pictures)


def form_alone(rng: Random, form: forms.Form, key: str) -> str:
    shown = form(rng.choice(LISTS["placeholders"]).format(key))
    return f"{rng.choice(LISTS['say'])} {rng.choice(LISTS['such as'])} {shown}{rng.choice(['.', ''])}"


def scene_dialogue(rng: Random) -> list[Exchange]:
    """One picture and up to seven questions about it, at times a description."""
    picture, things = scene(rng)
    asked = questions(rng, things)[: rng.choice([2, 3, 4, 5, 6])]
    if rng.random() < 0.35:
        asked.insert(rng.randrange(len(asked) + 1), described(rng, things))
    form, key = forms.random_form(rng) if rng.random() < 0.25 else (str, "")
    (question, answer), *later = asked
    first = Asked([picture], question, answer, [])
    text = f"{question} {form_alone(rng, form, key)}" if key else question
    turns = [Exchange("user", in_some_order(rng, first, text), form(answer))]
    role = "tool" if "<tool_call>" in turns[0].reply else "user"
    return turns + [Exchange(role, (question,), form(answer)) for question, answer in later]


def true_dialogue(rng: Random) -> list[Exchange]:
    """One to three turns, each about new pictures, at times after a first turn of words alone."""
    form, key = forms.random_form(rng)
    turns: list[Exchange] = []
    if rng.random() < 0.08:
        said = rng.choice(["ok", "yes", "ready"])
        turns.append(Exchange("user", (f"{forms.random_sentence(rng)} Say {said}.",), said))
    for number in range(rng.choice([1] * 8 + [2, 3])):
        before = f"{forms.random_sentence(rng)} " if rng.random() < 0.15 else ""
        one = as_exchange(rng, seen(rng), form, key, before)
        turns.append(one._replace(role="tool") if number and "<tool_call>" in turns[-1].reply else one)
    return turns


def look_dialogue(rng: Random) -> list[Exchange]:
    """The picture that answers the question comes after a call, instead of nothing or of another picture."""
    asked, (form, key) = seen(rng), forms.random_form(rng)
    name = rng.choice([*LISTS["tools"], "look", "open", "show", "zoom", "next", "see"])
    call, role = rng.choice([
        (f"<tool_call>\n{json.dumps({'name': name, 'arguments': {}})}\n</tool_call>", "tool"),
        (f"<tool_call>{json.dumps({'name': name, 'arguments': {}}, separators=(',', ':'))}</tool_call>", "tool"),
        (name, "user"),
        (f"<{name}>", "user"),
        (f"[{name}]", "user"),
        (json.dumps({"action": name}), "user"),
    ])  # fmt: skip
    first = rng.choice(["First", "To look,", "To see more,", "Before that", "If you need the picture,"])
    how = f"{first} {rng.choice(LISTS['say']).lower()} {rng.choice(LISTS['such as'])} {call}. "
    then = form_alone(rng, form, key)
    then = f"Then {then[0].lower()}{then[1:]}"
    other = (pixels_of(seen(rng).pictures[0]),) if rng.random() < 0.4 else ()
    order = (asked.question, how + then) if rng.random() < 0.6 else (how + then, asked.question)
    shown = tuple(pixels_of(one) for one in asked.pictures)
    words = rng.choice([(), (), (asked.question,), (rng.choice(["Here it is.", "The picture:", "Now answer."]),)])
    return [
        Exchange("user", (*other, " ".join(order)), call),
        Exchange(role, (*shown, *words), form(asked.answer)),  # type: ignore[arg-type]
    ]


def letter_dialogue(rng: Random) -> list[Exchange]:
    """Options with letters: the reply is the letter."""
    asked, (form, key) = seen(rng), forms.random_form(rng)
    options = [asked.answer, *rng.sample(asked.others, min(3, len(asked.others)))]
    rng.shuffle(options)
    mark = rng.choice([").", ".", ":", ")"])
    lines = [f"{letter}{mark} {option}" for letter, option in zip("ABCD", options, strict=False)]
    letter = "ABCD"[options.index(asked.answer)]
    shown = form(rng.choice(LISTS["placeholders"]).format(key) if rng.random() < 0.5 else "A")
    asks = ["Answer with the letter", "Say the letter of the right option", "Reply with one letter", "Choose a letter"]
    listed = rng.choice([" ", "\n", ", "]).join(lines)
    text = f"{asked.question} {listed} {rng.choice(asks)} {rng.choice(LISTS['such as'])} {shown}"
    return [Exchange("user", in_some_order(rng, asked, text), form(letter))]


def form_dialogue(rng: Random, numbers: np.random.Generator) -> list[Exchange]:
    """A form and random answers, beside pictures of any kind."""
    turns = forms.form_dialogue(rng, numbers)[0]
    return [turns[0]._replace(parts=(pixels_of(seen(rng).pictures[0]), turns[0].text)), *turns[1:]]


class Lessons:
    """Draws conversation after conversation; the same seed gives the same ones."""

    def __init__(self, seed: int) -> None:
        self._rng, self._numbers = Random(f"eyes {seed}"), np.random.default_rng([seed, 9])
        drawers = {module: module.drawer(self._rng.getrandbits(30)) for module in OWN}
        drawers[poles] = lambda: [poles.draw_lesson(self._numbers, ANGLE_SHARE)]
        self.own = list(drawers.values())
        rng = self._rng
        shares = [  # at first, and later
            (lambda: scene_dialogue(rng), 0.55, 0.26),
            (lambda: true_dialogue(rng), 0.25, 0.33),
            (lambda: letter_dialogue(rng), 0.00, 0.04),
            (lambda: look_dialogue(rng), 0.01, 0.04),
            (lambda: form_dialogue(rng, self._numbers), 0.05, 0.09),
            (lambda: forms.repeat_dialogue(rng, self._numbers), 0.04, 0.05),
            (lambda: rng.choices(self.own, list(OWN.values()))[0](), 0.10, 0.19),
        ]
        self._draws, self._first, self._later = zip(*shares, strict=True)

    def draw(self, is_early: bool = False) -> list[Exchange]:
        """Early ones have many questions about each picture, so that seeing is learned first and soon."""
        return list(self._rng.choices(self._draws, self._first if is_early else self._later)[0]())
