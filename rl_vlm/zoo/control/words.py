"""The words of Control-v0 and the actions of the environment that they stand for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, Space

from rl_vlm.safe_text import without_thoughts
from rl_vlm.types import UserInputError

Words = Mapping[str, Any]
# MetaWorld's actions are the hand's velocity in x, y and z, and how firmly the gripper closes.
METAWORLD: dict[str, tuple[float, ...]] = {
    "left": (-1, 0, 0, 0), "right": (1, 0, 0, 0), "forward": (0, 1, 0, 0), "back": (0, -1, 0, 0), "up": (0, 0, 1, 0),
    "down": (0, 0, -1, 0), "grip": (0, 0, 0, 1), "release": (0, 0, 0, -1),
}  # fmt: skip


def choose_words(
    env: Any, given: Mapping[str, Any] | Sequence[str] | None, default: Words | None = None
) -> dict[str, Any]:
    """The environment's action for each word. Raises UserInputError if they do not fit its action space.

    given: a mapping from words to actions; a choice of the known words; a word for each action of a discrete space; or
    None for all known words. Known are `default`, the environment's own names (`get_action_meanings()`, or an
    enumeration `actions`), and the numbers of a discrete space.
    """
    space = env.action_space
    known = dict(default) if default is not None else _own_words(env)
    if isinstance(given, Mapping):
        chosen = {str(word): action for word, action in given.items()}
    elif given is None:
        chosen = known
    elif {str(word).lower() for word in given} <= set(known):
        chosen = {word.lower(): known[word.lower()] for word in given}
    elif isinstance(space, Discrete) and len(given) == space.n:
        chosen = {word: number + int(space.start) for number, word in enumerate(given)}
    else:
        about = f"some of {', '.join(known)}" if known else "a mapping from words to actions"
        raise UserInputError(f"env.kwargs.actions {list(given)} do not fit {space}: name {about}.")
    if not chosen:
        raise UserInputError(f"env.kwargs.actions must map words to actions: those of {space} have no names.")
    return {clean(word): _fit(space, word, action) for word, action in chosen.items()}


def read_word(text: str, words: Words) -> str | None:
    """The word that the text ends with, in any case; None if it ends with none of them.

    The text before it is the policy's reasoning. If one word is the end of another, the longer one counts.
    """
    answer = clean(without_thoughts(text)[-200:])
    for word in sorted(words, key=len, reverse=True):
        if answer == word or answer.endswith(f" {word}"):
            return word
    return None


def clean(text: str) -> str:
    """Lower case, single spaces, without punctuation at the end or tags and quotes around words."""
    return " ".join(re.sub(r"<[^<>]*>|[\"'`*]", " ", text).lower().split()).rstrip(".!")


def _own_words(env: Any) -> dict[str, Any]:
    inner, space = env.unwrapped, env.action_space
    if not isinstance(space, Discrete):
        return {}
    first = int(space.start)
    if callable(getattr(inner, "get_action_meanings", None)):
        return {str(name).lower(): first + number for number, name in enumerate(inner.get_action_meanings())}
    members = getattr(inner, "actions", None)
    if isinstance(members, type) and hasattr(members, "__members__"):
        return {name.lower(): int(member) for name, member in members.__members__.items() if int(member) in space}
    return {str(first + number): first + number for number in range(int(space.n))}


def _fit(space: Space[Any], word: str, action: Any) -> Any:
    fitted = action
    if isinstance(space, Discrete) and isinstance(action, int | np.integer):
        fitted = np.int64(action)
    elif isinstance(space, Box):
        fitted = np.asarray(action, space.dtype)
    if fitted not in space:
        raise UserInputError(f"env.kwargs.actions: {action!r}, for the word {word!r}, is no action of {space}.")
    return fitted
