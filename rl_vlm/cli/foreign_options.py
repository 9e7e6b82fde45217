"""Options of other systems, rejected with the command that works here."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

_OWN = {"model.path": "--model", "env.id": "--env"}  # where a command has an option for the key


def check_options(command: Any, given: Sequence[str]) -> None:
    """Raise UserInputError for an option of another system, whose name is known and which is a key or an argument here.

    command: that of `rl-vlm`. given: the words behind it.
    """
    names = iter(given)
    while (commands := getattr(command, "commands", None)) is not None:
        command = commands.get(name := next(names, ""))
        if name[:1].isalpha() and not command and (meant := _that_says(name, commands)):
            from rl_vlm.types import UserInputError  # slow to import

            raise UserInputError(f"No such command {name!r}. Did you mean {meant}?")
    known = {option for one in getattr(command, "params", ()) for option in (*one.opts, *one.secondary_opts)}
    if any(word.startswith(("--", "-c")) and word.partition("=")[0] not in known for word in names if command):
        _translate(given, known)


def _that_says(name: str, commands: Mapping[str, Any]) -> str:
    """The command whose help has the name as a word, such as "fine-tune"; "" where none has, or a name is like it."""
    said = {one: command.get_short_help_str(200).lower().replace("-", "").split() for one, command in commands.items()}
    word = name.lower().replace("-", "")
    return "" if get_close_matches(name, commands) else next((one for one in said if word in said[one]), "")


def _translate(given: Sequence[str], known: set[str]) -> None:
    from rl_vlm.config.elsewhere import counterpart, counterparts, same_value
    from rl_vlm.config.policy import PolicyConfig
    from rl_vlm.config.section import keys_of
    from rl_vlm.config.sft import SFTConfig
    from rl_vlm.envs.registry import nearest
    from rl_vlm.types import UserInputError

    ours = [*keys_of(SFTConfig if given[0] == "sft" else PolicyConfig)]
    first, words, left = "", list[str](), list(given)
    while left:
        option, equals, value = left.pop(0).partition("=")
        dashed = option.replace("_", "-")
        is_config = option.startswith(("-c", "--config")) and known & {"config", "model"} and dashed not in known
        meant = counterpart(option[2:], ours) if option.startswith("--") and dashed not in known else ""
        if not meant and not is_config:
            words.append((dashed if dashed in known else option) + equals + value)
            continue
        first = first or f"There is no option {option}. {meant or 'Give the configuration without one.'}"
        if not equals:
            value = left.pop(0) if left and not left[0].startswith("--") else "..."
        if is_config:
            words.insert(1, value)
        for key in counterparts(option[2:], ours)[:1]:
            value = (nearest(value) or value) if key == "env.id" else value
            value = value if same_value(option[2:], key) else "..."
            words += [_OWN[key], value] if _OWN.get(key) in known else [f"{key}={value}"]
    if words[0] == "train" and all("=" in word or word.startswith("-") for word in words[1:]):
        words[1:1] = ["quickstart", "env.kwargs={}"]
    if first:
        raise UserInputError(f"{first} Write: rl-vlm {shlex.join(words)}")
