"""JSON schemas as llguidance follows them: compact, closed, and without bounds and formats that say nothing.

Compact: at most one space behind `,` and `:`. Where blanks are free, a greedy sample may write them without end.
Closed: an object has no properties that its schema does not name, as with vLLM's xgrammar. What combined schemas name
counts together, as for `unevaluatedProperties: false`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection
from typing import Any
from urllib.parse import quote

from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from rl_vlm.types import UserInputError

_MAX_STEPS = 20_000  # through one schema, whose references may multiply
_MOST = {"Items": 10_000, "Length": 1_000_000, "Properties": 10_000}  # no answer has more; llguidance writes items out
_LARGEST, _HUGE = 2**63 - 1024, 1e300  # the largest float64 that fits int64; what only float64's own bounds exceed
_ANY = "\0any"  # stands for all names
_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # keywords of names
_COMBINED = ("$ref", "allOf", "anyOf", "oneOf")
_VALUES = ("const", "enum")  # keywords of what is no schema
_NOTES = ("default", "example", "examples", "description", "discriminator", "x-guidance")
_OUTWARD = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29"
_DATE = {"pattern": f"^([0-9]{{4}}-(0[13-9]|1[0-2]|02-([01]|2[0-8]))|{_LEAP})"}


def json_lark(text: str) -> str:
    """JSON that fits a schema, as the right-hand side of a rule in Lark. The schema's `x-guidance` has llguidance's
    options; a match of its `whitespace_pattern` stands on each side of `,` and `:`. Raises UserInputError."""
    try:
        schema = json.loads(text)
        if isinstance(schema, dict):
            schema = {"x-guidance": _options(schema, '"discriminator"' in text), **_Sealing(schema).whole()}
        return f"%json {json.dumps({} if schema is True else schema)}"
    except RecursionError:
        raise UserInputError("The JSON schema cannot be read: it is nested too deeply.") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise UserInputError(f"The JSON schema cannot be read: {error}.") from error


def _options(schema: dict[str, Any], tagged: bool) -> dict[str, Any]:
    """llguidance's options. `tagged`: the branches of unions, as pydantic writes them, exclude each other."""
    asked = {"coerce_one_of": tagged, **schema.get("x-guidance", {})}
    blank, flexible = asked.pop("whitespace_pattern", None), asked.pop("whitespace_flexible", None)
    if flexible and blank is None:
        return asked
    before = "" if blank is None else f"({blank})"
    after = " ?" if blank is None and flexible is None else before
    separators = {"item_separator": f"{before},{after}", "key_separator": f"{before}:{after}"}
    return {"whitespace_flexible": False, **separators, **asked}


class _Sealing:
    """Rewrites one schema so that llguidance follows it, and lets nothing through that does not fit."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root, resource = root, DRAFT202012.create_resource(root)
        address = resource.id() or ""
        self._resolver = Registry().with_resource(address, resource).resolver(address)
        self._found = dict[int, frozenset[str]]()
        self._opened = dict[tuple[int, frozenset[str]], str]()  # names in `_more` of schemas beside others
        self._more, self._steps = dict[str, Any](), 0

    def whole(self) -> dict[str, Any]:
        new: dict[str, Any] = self.sealed(self._root)
        return {**new, "$defs": {**new.get("$defs", {}), **self._more}} if self._more else new

    def sealed(self, schema: Any, beside: frozenset[str] = frozenset()) -> Any:
        """The schema; `beside` is what schemas name that hold for the same object."""
        if isinstance(schema, list):
            return [self.sealed(one) for one in schema]
        if not isinstance(schema, dict):
            return int(schema) if isinstance(schema, float) and schema.is_integer() else schema
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise ValueError("it is too large, or refers to itself in a circle")
        names = {key: [self._names(part) for part in self._parts(schema, key)] for key in _COMBINED}

        def around(key: str, place: int) -> frozenset[str]:
            """What is named beside one part. Of branches one holds, so what the others name does not count."""
            rest = {**names, key: [one for n, one in enumerate(names.get(key, ())) if key == "allOf" and n != place]}
            self._steps += sum(map(len, rest.values()))
            return beside.union(_own_names(schema), *(one for found in rest.values() for one in found))

        new = dict[str, Any]()
        for key, value in schema.items():
            if key in _MAPS and isinstance(value, dict):
                new[key] = {name: self.sealed(one) for name, one in value.items()}
            elif key in _COMBINED and isinstance(value, list):
                new[key] = [self.sealed(one, around(key, place)) for place, one in enumerate(value)]
            elif key not in _NOTES and not key.startswith("x-"):
                new[key] = value if key in _VALUES else self.sealed(value)
        if isinstance(ref := schema.get("$ref"), str):
            new["$ref"] = quote(ref, safe="/:?#%@!$&'()*+,;=~")
            if names["$ref"] and (others := around("$ref", 0)):  # what it leads to is closed alone
                new["$ref"] = self._beside(self._parts(schema, "$ref")[0], others)
        if "json-schema.org" not in str(schema.get("$schema")):
            new.pop("$schema", None)
        return _bounded(_without_what_says_nothing(new), around("", 0))

    def _beside(self, schema: Any, others: frozenset[str]) -> str:
        """A reference to a schema that holds beside schemas which name `others`."""
        key = (id(schema), others)
        if key not in self._opened:
            self._opened[key] = name = f"beside-{len(self._opened)}"
            self._more[name] = self.sealed(schema, others)
        return f"#/$defs/{self._opened[key]}"

    def _names(self, schema: Any) -> frozenset[str]:
        """The properties that a schema and its parts name."""
        if not isinstance(schema, dict):
            return frozenset()
        if id(schema) not in self._found:
            self._found[id(schema)] = frozenset()  # ends a circle of references
            parts = [part for key in _COMBINED for part in self._parts(schema, key)]
            self._found[id(schema)] = _own_names(schema).union(*map(self._names, parts))
        return self._found[id(schema)]

    def _parts(self, schema: dict[str, Any], key: str) -> list[Any]:
        """The schemas that `key` says hold for the same value; none for a reference that leads nowhere."""
        value = schema.get(key)
        if key != "$ref" or not isinstance(value, str):
            return value if isinstance(value, list) else []
        with contextlib.suppress(Unresolvable):
            return [self._resolver.lookup(value).contents]
        return []


def _own_names(schema: dict[str, Any]) -> frozenset[str]:
    names = frozenset(schema.get("properties", ())).union(schema.get("required", ()))
    more = schema.get("additionalProperties", schema.get("unevaluatedProperties", False))
    return names if more is False else names | {_ANY}


def _without_what_says_nothing(schema: dict[str, Any]) -> dict[str, Any]:
    """Bounds beyond those of numbers in JSON, and formats that are notes to people, as pydantic's `path`."""
    for key, sign in _OUTWARD.items():
        value = schema.get(key)
        if isinstance(value, int | float) and value * sign > _LARGEST:
            schema[key] = sign * _LARGEST
            if abs(value) > _HUGE:
                del schema[key]
    for kind, most in _MOST.items():
        if f"max{kind}" in schema:
            schema[f"max{kind}"] = min(schema[f"max{kind}"], max(schema.get(f"min{kind}", 0), most))
    if schema.get("format") not in _FORMATS:
        schema.pop("format", None)
    elif schema["format"].startswith("date"):  # llguidance lets every year leap
        schema["allOf"] = [*schema.get("allOf", ()), _DATE]
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    return schema


def _bounded(schema: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """No further items behind `prefixItems`, and no properties but `names`, where the schema does not say otherwise."""
    for first, rest in (("prefixItems", "items"), ("items", "additionalItems")):
        if isinstance(listed := schema.get(first), list) and schema.get("minItems", 0) <= len(listed):
            schema.setdefault(rest, False)
    rest, named = schema.pop("unevaluatedProperties", None), schema.get("properties", {})
    more = schema.get("additionalProperties", rest)
    closes = rest is False or schema.keys() & {"properties", "patternProperties", "required"}
    if closes and "additionalProperties" not in schema and _ANY not in names:
        schema["properties"] = named | dict.fromkeys(sorted(names - named.keys()), True)
        more = False
    if more is not None:
        schema["additionalProperties"] = more
    if more is False:
        return schema
    if "patternProperties" in schema:
        raise UserInputError("The JSON schema has patternProperties, which need additionalProperties: false.")
    if schema.get("minProperties", 0) > len(schema.get("required", ())) + 1:
        raise UserInputError("The JSON schema has minProperties beyond one more than required, which names may repeat.")
    if more is not None and named:
        # llguidance does not see that a name with escapes, as \\u0061, is one of `properties`, and counts a name again
        # that comes again. A pattern is matched without escapes.
        schema["patternProperties"] = {"" if more in (True, {}) else f"^{_not_one_of(named)}$": more}
        schema["additionalProperties"] = False
    return schema


def _not_one_of(names: Collection[str]) -> str:
    """A regular expression of all texts that are none of these."""
    tails: dict[str, list[str]] = {}
    for name in filter(None, names):
        tails.setdefault(name[0], []).append(name[1:])
    ways = [re.escape(head) + _not_one_of(rest) for head, rest in tails.items()]
    ways.append(f"[^{''.join(map(re.escape, tails))}](?s:.)*" if tails else "(?s:.)+")
    return f"({'|'.join(ways + [''] * ('' not in names))})"
