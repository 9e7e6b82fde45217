"""From the policy's text to the action of an OpenEnv server, by the JSON schema that the server gives."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from rl_vlm.envs.tools import THOUGHT_END
from rl_vlm.types import RLVLMError, UserInputError

MAX_CHARS = 65_536
# Words of other scripts stand without spaces between them; an underscore is part of a word where letters go on behind it.
_BEFORE_WORD, _AFTER_WORD = r"(?<![A-Za-z0-9])(?<![A-Za-z0-9]_)", r"(?![A-Za-z0-9]|_[A-Za-z0-9]|\.\d)"
_BEFORE_NUMBER = r"(?<!^-)(?<![^A-Za-z]-)(?<!\d\.)"  # a sign, but not the hyphen of "action-2"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_MOST_DIGITS = 40
_MOST_BRACES = 64  # from which an object is tried to be read


class ActionError(RLVLMError):
    """The policy's text is no action; the message tells it why."""


@dataclass(frozen=True)
class ActionForm:
    """How an action is written: `field` is the only one to fill, or "" where a JSON object is expected.

    `kind` is the field's JSON type, `choices` its allowed values as the server writes them, `properties` the schema of all fields.
    """

    field: str
    kind: str
    choices: tuple[Any, ...]
    properties: dict[str, Any]

    @classmethod
    def of(cls, schema: dict[str, Any], field: str | None = None) -> ActionForm:
        """The form of a JSON schema; `field` chooses one where the schema has several. Raises UserInputError."""
        properties = {name: one for name, one in schema.get("properties", {}).items() if name != "metadata"}
        if field is not None and field not in properties:
            raise UserInputError(f"The action has no field {field!r}: choose one of {', '.join(properties) or 'none'}.")
        required = [name for name in schema.get("required", ()) if name in properties]
        names = [field] if field else required if len(required) == 1 else list(properties)
        if len(names) != 1:
            return cls("", "object", (), properties)
        one = properties[names[0]]
        kind = "enum" if "enum" in one else str(one.get("type", ""))
        if kind not in ("enum", "string", "integer", "number", "boolean"):
            return cls("", "object", (), properties)
        return cls(names[0], kind, tuple(one.get("enum", ())), properties)

    @property
    def instructions(self) -> str:
        """What the policy is told to write."""
        if not self.field:
            shape = {name: one.get("description") or one.get("type", "any") for name, one in self.properties.items()}
            return f"Answer with a JSON object: {json.dumps(shape)}."
        about = self.properties[self.field].get("description", "")
        what = {
            "string": f"the {self.field}",
            "integer": f"the {self.field}, a whole number",
            "number": f"the {self.field}, a number",
            "boolean": f"the {self.field}, true or false",
            "enum": f"the {self.field}, one of {', '.join(map(str, self.choices))}",
        }[self.kind]
        return f"Answer with {what}{f' ({about})' if about else ''}."

    def parse(self, text: str) -> dict[str, Any]:
        """The action; what stands before the end of a thought does not count. Raises ActionError."""
        if len(text) > MAX_CHARS:
            raise ActionError(f"An action may have {MAX_CHARS} characters, not {len(text)}.")
        spoken = text.rpartition(THOUGHT_END)[2].strip()
        if not self.field:
            return _last_object(spoken)
        return {self.field: self._value(spoken)}

    def _value(self, text: str) -> Any:
        if self.kind == "string":
            return text
        if self.kind in ("integer", "number"):
            found = _NUMBER.findall(text)
            if not found:
                raise ActionError(f"No number was found. {self.instructions}")
            if len(found[-1]) > _MOST_DIGITS:
                raise ActionError(
                    f"A number may have {_MOST_DIGITS} characters, not {len(found[-1])}. {self.instructions}"
                )
            if self.kind == "number":
                return float(found[-1])
            return round(float(found[-1])) if "." in found[-1] else int(found[-1])
        # Where one choice is part of another ("up" and "pick up"), the longer one is meant: both end at the same place.
        choices = (True, False) if self.kind == "boolean" else self.choices
        named = [(*place, number) for number, one in enumerate(choices) if (place := _last_place(str(one), text))]
        if not named:
            raise ActionError(f"The answer names none of the choices. {self.instructions}")
        return choices[max(named)[-1]]


def _last_place(choice: str, text: str) -> tuple[int, int] | None:
    """(end, length) of the last place where a choice stands as a whole word, in any case; None where it does not."""
    before = (_BEFORE_WORD if _is_ascii_word(choice[:1]) else "") + (_BEFORE_NUMBER if choice[:1].isdigit() else "")
    after = _AFTER_WORD if _is_ascii_word(choice[-1:]) else ""
    found = list(re.finditer(f"{before}{re.escape(choice)}{after}", text, re.IGNORECASE)) if choice else []
    return (found[-1].end(), len(choice)) if found else None


def _is_ascii_word(character: str) -> bool:
    return character.isascii() and (character.isalnum() or character == "_")


def _last_object(text: str) -> dict[str, Any]:
    """The last JSON object of a text, tried from each brace that may open it."""
    decoder, starts = json.JSONDecoder(), [match.start() for match in re.finditer(r"\{", text)][-_MOST_BRACES:]
    best: dict[str, Any] | None = None
    end = -1
    for start in starts:
        if start < end:
            continue  # inside the object before
        try:
            best, end = decoder.raw_decode(text, start)
        except (json.JSONDecodeError, RecursionError):
            continue
    if not isinstance(best, dict):
        raise ActionError("The answer holds no JSON object.")
    return best
