"""JSON schemas and tools of all kinds, sense and nonsense, and what a server makes of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from random import Random
from typing import Any

import httpx
import psutil
from http_support import PATIENCE_S, Server

COUNTS = (0, 1, 2, 3, 7, 1000, 10**6, 2**31 - 1, 10**9, 2**63 - 1, -1, 1.5, 2.0, "2")
BOUNDS = (
    0,
    1,
    -1,
    0.5,
    1e-9,
    10**6,
    -(2**31),
    2**31 - 1,
    2**53,
    -(2**63),
    1 - 2**63,
    2**63 - 1,
    2**64,
    3.4e38,
    -1.79e308,
    True,
)
NAMES = ("a", "b", "foo", "$ref", "", "é", "a/b", "a~b", "properties", "\n", "__proto__", "x" * 300)
PATTERNS = (
    "^a",
    "a+$",
    "^(a|b)*c{2,5}$",
    "(",
    "(?=a)",
    "\\p{L}",
    "^\\d{4}-\\d{2}$",
    "(a{1000}){1000}",
    "[^\\x00]",
    ".{0,100000}",
    "(((a*)*)*)*b",
)
REFS = (
    "#",
    "#/$defs/a",
    "#/$defs/b",
    "#/properties/a",
    "#/definitions/a",
    "#a",
    "#/$defs/a%20b",
    "#/$defs/é",
    "a.json",
    "https://example.org/x",
    "#/nowhere",
)
FORMATS = (
    "date",
    "date-time",
    "time",
    "uuid",
    "ipv4",
    "ipv6",
    "email",
    "uri",
    "hostname",
    "duration",
    "path",
    "binary",
    "regex",
    "int64",
    "iri",
    "",
)
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
VALUES: tuple[Any, ...] = (None, True, 0, 1, 1.5, -(2**63), "a", "\u0000", "🙂", [], [1, [2]], {}, {"a": {"b": []}}, "x" * 500)  # fmt: skip


def schema(r: Random, depth: int = 3) -> Any:
    """One schema: a few keywords of the JSON-Schema test suite, with values that are usual, extreme or wrong."""
    if depth <= 0 or r.random() < 0.05:
        return r.choice(
            (True, False, {}, {"type": r.choice(TYPES)}, {"enum": r.sample(VALUES, 3)}, {"$ref": r.choice(REFS)})
        )

    def some(most: int = 3) -> list[Any]:
        return [schema(r, depth - 1) for _ in range(r.randint(0, most))]

    def named() -> dict[str, Any]:
        return {name: schema(r, depth - 1) for name in r.sample(NAMES, r.randint(0, 4))}

    keywords: dict[str, Any] = {
        "type": lambda: r.choice((*TYPES, [*r.sample(TYPES, 2)], "any")), "enum": lambda: r.sample(VALUES, r.randint(0, 5)),
        "const": lambda: r.choice(VALUES), "properties": named, "patternProperties": lambda: {r.choice(PATTERNS): schema(r, depth - 1)},
        "additionalProperties": lambda: schema(r, depth - 1), "unevaluatedProperties": lambda: schema(r, depth - 1),
        "required": lambda: r.sample(NAMES, r.randint(0, 3)), "propertyNames": lambda: schema(r, depth - 1),
        "items": lambda: r.choice((schema(r, depth - 1), some())), "prefixItems": some, "contains": lambda: schema(r, depth - 1),
        "unevaluatedItems": lambda: False, "uniqueItems": lambda: r.random() < 0.5, "additionalItems": lambda: False,
        "allOf": some, "anyOf": some, "oneOf": some, "not": lambda: schema(r, depth - 1), "if": lambda: schema(r, depth - 1),
        "then": lambda: schema(r, depth - 1), "dependentRequired": lambda: {"a": ["b"]}, "dependentSchemas": named,
        "$ref": lambda: r.choice(REFS), "$dynamicRef": lambda: "#a", "$defs": named, "definitions": named, "$anchor": lambda: "a",
        "$id": lambda: r.choice(("a.json", "https://example.org/x", "#a", 5)), "$schema": lambda: r.choice(("http://json-schema.org/draft-07/schema#", "https://example.org/mine")),
        "pattern": lambda: r.choice(PATTERNS), "format": lambda: r.choice(FORMATS), "contentEncoding": lambda: "base64",
        "default": lambda: r.choice(VALUES), "description": lambda: "::= start: " * 9, "unknown": lambda: r.choice(VALUES),
        "discriminator": lambda: {"propertyName": "a"}, "x-guidance": lambda: r.choice(({"whitespace_pattern": "(a*)*"}, {"lenient": True}, 5)),
    }  # fmt: skip
    keywords |= {
        f"{end}{what}": lambda: r.choice(COUNTS)
        for end in ("min", "max")
        for what in ("Items", "Length", "Properties", "Contains")
    }
    keywords |= {
        key: lambda: r.choice(BOUNDS)
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    }
    return {key: keywords[key]() for key in r.sample([*keywords], r.randint(1, 5))}


def requests(seed: int, schemas: int, tool_lists: int) -> Iterator[dict[str, Any]]:
    """The fields of chats that ask for a form, or for calls."""
    r = Random(seed)
    for number in range(schemas):
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema(r, r.randint(1, 4)) or {}}}
        yield (
            {"structured_outputs": {"json": form["json_schema"]["schema"]}}
            if number % 5 == 0
            else {"response_format": form}
        )
    for number in range(tool_lists):
        functions = [{"name": f"t{k}", "parameters": schema(r, 3)} for k in range(r.randint(1, 6))]
        for one in functions:
            if not isinstance(one["parameters"], dict):
                one["parameters"] = None
            if r.random() < 0.3:
                one["strict"] = True
        named = {"type": "function", "function": {"name": "t0"}}
        tools = [{"type": "function", "function": one} for one in functions]
        yield {"tools": tools, "tool_choice": ("required", "auto", named, "any")[number % 4]}


def ask_all(server: Server, asked: Iterable[dict[str, Any]]) -> tuple[Counter[int], float, float]:
    """Ask each, and after each that is rejected for its cost a small form. The statuses, and the most seconds of a
    request and MiB by which this process and its children grew."""
    statuses, slowest, whole = Counter[int](), 0.0, psutil.Process()
    small = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": [1]}}}}

    def memory() -> float:
        return sum(one.memory_info().rss for one in (whole, *whole.children(recursive=True))) / 2**20

    def ask(fields: dict[str, Any]) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "max_tokens": 4, **fields}
        return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)

    ask(small)
    before = most = memory()
    for fields in asked:
        started = time.monotonic()
        reply = ask(fields)
        slowest, most = max(slowest, time.monotonic() - started), max(most, memory())
        statuses[reply.status_code] += 1
        if reply.status_code == 400:
            said = reply.json()["error"]["message"]
            assert len(said) < 400 and "\n" not in said, said
            assert "MiB" not in said or ask(small).status_code == 200
        else:
            assert reply.status_code == 200, (fields, reply.text)
    assert ask(small).status_code == 200
    return statuses, slowest, most - before
