"""What is wrong with a configuration, in sentences that say what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, get_args

from pydantic import ValidationError

from rl_vlm.config.elsewhere import OF_ANYTHING, counterpart, is_name
from rl_vlm.config.overrides import leaves
from rl_vlm.config.policy import PolicyConfig
from rl_vlm.config.preference import PreferenceConfig
from rl_vlm.config.section import Section, keys_of, section_of
from rl_vlm.config.sft import SFTConfig

# What has the keys of each class, in error messages.
_KINDS: dict[type[Section], str] = {
    PolicyConfig: "with algorithm.name grpo or ppo",
    PreferenceConfig: "with algorithm.name preference_sac",
    SFTConfig: "in `rl-vlm sft`",
}


def explain(error: ValidationError, root: type[Section]) -> str:
    """All that is wrong with a configuration of class `root`, a sentence in each line."""
    unknown = [str(one["loc"][0]) for one in error.errors() if one["type"] == "extra_forbidden" and len(one["loc"]) < 2]
    if root is SFTConfig and len(foreign := [key for key in unknown if _of_any_kind(key)]) > 1:
        return (
            f"This is a configuration of `rl-vlm train`, because it has {', '.join(foreign)}: give it to that command, "
            "or begin `rl-vlm sft` with one such as sft_tiny."
        )
    sentences = (sentence for one in error.errors() for sentence in _sentences(one, root))
    return "\n".join(dict.fromkeys(sentences))


def _sentences(error: Mapping[str, Any], root: type[Section]) -> Iterator[str]:
    # Without the members of a union, of which each has an error.
    location = [str(part) for part in error["loc"] if part != "str" and "[" not in str(part)]
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        # The keys of a section that is another system's.
        inner = [] if _of_any_kind(key) else [name for name, _ in leaves(error["input"], key)]
        is_ours = len(location) > 1 or _nearest(key, root.model_fields, 0.78)
        seek = counterpart if is_ours else partial(_meant, "", (), "")
        for name in [name for name in inner if seek(name, [*keys_of(root)])] or [key]:
            yield unknown_key(name, root)
    elif error["type"] == "value_error":
        for sentence in str(error["ctx"]["error"]).split("\n"):
            named = not key or sentence.startswith(key.split(".")[0])
            yield f"Config: {sentence}." if named else f"Config key {key}: {sentence}."
    else:
        shown = repr(error.get("input"))
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        if error["type"] == "model_type" and key:
            yield f"Config key {key}: it is a section, whose keys `rl-vlm config {key}` lists; got {shown}."
            return
        yield f"Config key {key or 'file'}: {error['msg'][0].lower()}{error['msg'][1:]}; got {shown}."


def unknown_key(key: str, root: type[Section]) -> str:
    """What to write in place of a key that `root` does not have, in a sentence or two."""
    section, (*outer, last) = root, key.split(".")
    parent = "".join(f"{part}." for part in outer)
    for part in outer:
        if part in section.model_fields:  # and not a place in a list
            section = section_of(section.model_fields[part].annotation) or section
    beside = [] if outer and outer[0] not in root.model_fields else [*keys_of(section, parent)]
    meant = _meant(parent, beside, argument := _as_argument(section, parent, last), key, [*keys_of(root)])
    if root in _KINDS and _of_any_kind(key):
        remove = "remove it, or give the configuration to `rl-vlm sft`." if key == "sft" else "remove it."
        advice = f"{meant[0].lower()}{meant[1:]}" if meant else remove
        return f"Config key {key} has no effect {_KINDS[root]}: {advice}"
    known = f"Known keys here: {', '.join(section.model_fields)}."
    return f"Unknown config key {key}. {meant or known + argument}"


def _as_argument(section: type[Section], parent: str, name: str) -> str:
    """Where the name belongs if it is an argument of an environment or a function that the section names, as a sentence
    with a blank before it; "" where the section has none."""
    for key, field in section.model_fields.items():
        listed = next(iter(get_args(field.annotation)), None)  # such as a reward function
        if key == "kwargs":
            return f" An argument of the environment would be {parent}kwargs.{name}."
        if "kwargs" in getattr(listed, "model_fields", ()):
            return f" An argument of a function would be one of the kwargs in {parent}{key}."
    return ""


def _of_any_kind(key: str) -> bool:
    return any(key in keys_of(kind) for kind in _KINDS)


def _meant(parent: str, beside: Sequence[str], argument: str, key: str, everywhere: Sequence[str]) -> str:
    """What to write in place of an unknown key, in a sentence or two; "" if there is no telling. A key that is no
    neighbour has the name alone in common: its meaning is quoted, before the `argument`."""
    name = key.removeprefix(parent).rpartition(".")[2].lower().replace("-", "_")
    if name in OF_ANYTHING and parent and not beside:
        name = parent.split(".")[-2]
    siblings = [one for one in beside if "." not in one.removeprefix(parent)]
    typo, foreign = _nearest(name, siblings, 0.85), counterpart(key, everywhere)
    if foreign and (not typo or is_name(name)):
        return foreign
    like = typo or _nearest(name, beside if parent else siblings, 0.78)
    if like in siblings:
        return f"Did you mean {like}?"
    meanings = _meanings()  # not of sections, nor of what is in a list
    if like := like or _nearest(name, [one for one in everywhere if one.rpartition(".")[0] not in meanings], 1.0):
        meaning = f" (a section: `rl-vlm config {like}` lists its keys)"
        if like in meanings:
            meaning = f' ("{meanings[like].partition(". ")[0].removesuffix(".")}")'
        return f"Did you mean {like}{meaning}?{argument}"
    return ""


@cache
def _meanings() -> dict[str, str]:
    from rl_vlm.config.reference import reference  # which reads files of configuration, too

    return {key.name: key.meaning for kind in _KINDS for key in reference(kind)}


def _nearest(name: str, keys: Iterable[str], cutoff: float) -> str | None:
    """The first and outermost of the keys whose last part is most like the name, if one is as like as `cutoff`."""
    known: dict[str, str] = {}
    for key in sorted(keys, key=lambda key: key.count(".")):
        known.setdefault(key.rpartition(".")[2], key)
    alike = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return known[alike[0]] if alike else None
