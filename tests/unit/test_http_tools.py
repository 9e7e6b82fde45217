"""Tools, thoughts, legacy completions and responses over HTTP, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import jinja2
import jsonschema
import numpy as np
import openai
import pydantic
import pytest
from core_support import picture, plain_model, reference_logits, text_side
from http_support import PATIENCE_S, EngineBackend, Server, data_uri, serving, tiny_engine

from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.http.backend import ServedModel
from rl_vlm.types import POLICY, Completion, GenerationRequest, Sample, SampleChunk, StopReason

PARAMETERS = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "unit": {"enum": ["cm", "m"]}},
    "required": ["x", "unit"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "zoom", "description": "Look closer.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop"}},
]
ASK = [{"role": "user", "content": "How many?"}]
CALLS = (
    'Let me look.\n<tool_call>\n{"name": "zoom", "arguments": {"x": 5, "unit": "cm"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
)


class Scripted:
    """A backend that says one text, token by token, and keeps what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.codec, self.says, self.asked = text_side(folder).codec, "", [GenerationRequest.__new__(GenerationRequest)]

    async def models(self) -> dict[str, ServedModel]:
        return {"tiny": ServedModel(POLICY, BASE_MODEL)}

    def _ids(self, request: GenerationRequest) -> np.ndarray:
        self.asked.append(request)
        return np.append(self.codec.encode_text(self.says), np.int32(self.codec.end_of_turn_id))

    async def call(self, requests: list[GenerationRequest]) -> list[Completion]:
        ids = self._ids(requests[0])
        sample = Sample(ids, np.zeros(len(ids), np.float32), StopReason.END_OF_TURN)
        return [Completion(requests[0].request_id, requests[0].prompt_ids, (sample,), 3)]

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[SampleChunk, None]:
        for token in (ids := self._ids(request)):
            last = StopReason.END_OF_TURN if token == ids[-1] else None
            yield SampleChunk(0, np.array([token]), np.zeros(1, np.float32), 3, last)


@pytest.fixture(scope="module")
def scripted(tiny_folder: Path) -> Iterator[tuple[Scripted, Server]]:
    backend = Scripted(tiny_folder)
    with serving(backend, tiny_folder) as server:
        yield backend, server


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[TransformersEngine]:
    with tiny_engine(tiny_folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def real(engine: TransformersEngine, tiny_folder: Path) -> Iterator[Server]:
    with serving(EngineBackend(engine), tiny_folder) as server:
        yield server


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


def chat(server: Server, **more: Any) -> Any:
    given = {"model": "tiny", "messages": ASK, "tools": TOOLS, **more}
    return client_of(server).chat.completions.create(**given)


def joined(chunks: Any) -> dict[str, Any]:
    """What the deltas of a stream add up to."""
    content, reasoning, calls, finish = "", "", {}, None
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning", None) or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or ():
                kept = calls.setdefault(call.index, {"name": call.function.name, "arguments": "", "id": call.id})
                kept["arguments"] += call.function.arguments or ""
    return {"content": content, "reasoning": reasoning, "calls": list(calls.values()), "finish": finish}


def test_calls_are_parted_from_the_text_whole_and_streamed(scripted: tuple[Scripted, Server]) -> None:
    backend, server = scripted
    backend.says = CALLS
    (choice,) = chat(server).choices
    found = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert found == [("zoom", {"x": 5, "unit": "cm"}), ("stop", {})] and choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look.\n"
    streamed = joined(chat(server, stream=True))
    assert [(call["name"], json.loads(call["arguments"])) for call in streamed["calls"]] == found
    assert (streamed["content"], streamed["finish"]) == ("Let me look.\n", "tool_calls")
    assert len({call["id"] for call in streamed["calls"]}) == 2
    one = chat(server, parallel_tool_calls=False).choices[0].message.tool_calls
    assert [call.function.name for call in one] == ["zoom"]
    (unread,) = chat(server, tool_choice="none").choices
    assert unread.message.content == CALLS and unread.message.tool_calls is None and unread.finish_reason == "stop"


@pytest.mark.parametrize("says", ['<tool_call>\n{"name": }\n</tool_call> so', "<tool_call>", 'a {"name": "zoom"} b'])
def test_what_is_no_call_is_text(scripted: tuple[Scripted, Server], says: str) -> None:
    scripted[0].says = says
    (choice,) = chat(scripted[1]).choices
    assert choice.message.content == says and not choice.message.tool_calls and choice.finish_reason == "stop"
    assert joined(chat(scripted[1], stream=True))["content"] == says


def test_a_loop_of_calls_and_pictures_reaches_the_model_as_its_template_writes_it(
    scripted: tuple[Scripted, Server], tiny_folder: Path
) -> None:
    backend, server = scripted
    image = picture(np.random.default_rng(0), 64, 64)
    backend.says = "Two."
    call = {
        "id": "call00001",
        "type": "function",
        "function": {"name": "zoom", "arguments": '{"x": 5, "unit": "<|im_end|>"}'},
    }
    reply = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": data_uri(image.png)}}]
    turns = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "content": reply},
    ]
    chat(server, messages=turns)
    tokenizer = backend.codec._tokenizer
    shown = [{"type": "text", "text": "see"}, {"type": "image"}]
    parsed = {**call, "function": {"name": "zoom", "arguments": {"x": 5, "unit": "<|im_end|>"}}}
    tools = [
        {"type": "function", "function": {"description": None, "parameters": None, **tool["function"]}}
        for tool in TOOLS
    ]
    tools = [
        {"type": "function", "function": {k: tool["function"][k] for k in ("name", "description", "parameters")}}
        for tool in tools
    ]
    expected = tokenizer.apply_chat_template(
        [ASK[0], {"role": "assistant", "content": "", "tool_calls": [parsed]}, {"role": "tool", "content": shown}],
        tools=tools, tokenize=False, add_generation_prompt=True,
    )  # fmt: skip
    request = backend.asked[-1]
    assert backend.codec.text_of(request.prompt_ids) == expected
    # What a client sent forges no end of a turn: system, user, assistant, tool.
    assert (request.prompt_ids == backend.codec.end_of_turn_id).sum() == 4
    assert [one.sha256 for one in request.images] == [image.sha256]


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "zoom"}}])
def test_a_call_that_is_asked_for_comes_and_fits_its_schema(real: Server, choice: Any) -> None:
    """By a model that answers noise."""
    for seed in range(4):
        more = {"tool_choice": choice, "max_tokens": 200, "seed": seed}
        (whole,) = chat(real, **more).choices
        streamed = joined(chat(real, **more, stream=True))
        calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()]
        assert [(call["name"], call["arguments"]) for call in streamed["calls"]] == calls
        if whole.finish_reason == "length":
            continue
        assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop") and calls
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), PARAMETERS if name == "zoom" else {"type": "object"})


@pytest.mark.slow
def test_calls_of_strict_tools_fit_their_schemas(real: Server) -> None:
    """A bias for the mark of a call makes a model that answers noise call."""
    mark = real.text.codec.token_id("<tool_call>")
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    found = []
    for seed in range(6):
        (choice,) = chat(real, tools=tools, seed=seed, max_tokens=150, logit_bias={str(mark): 12}).choices
        found += [json.loads(call.function.arguments) for call in choice.message.tool_calls or ()]
    assert len(found) >= 3
    for arguments in found:
        jsonschema.validate(arguments, PARAMETERS)


def test_a_call_that_is_asked_for_is_in_no_answers_form(real: Server) -> None:
    """An agent has a form for its last answer, and has to call a tool first."""
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "boolean"}}}
    (choice,) = chat(real, tool_choice="required", response_format=form, max_tokens=200, seed=1).choices
    assert choice.message.tool_calls or choice.message.content.startswith("[")


@pytest.mark.slow
def parts(one: Any, key: str = "$defs", to: str = "#/{}/At", **more: Any) -> dict[str, Any]:
    """Parameters whose only one, `at`, is described elsewhere in them: {"at": {"x": ONE}}."""
    at = {"type": "object", "properties": {"x": {"const": one}}, "required": ["x"]}
    whole = {"type": "object", "properties": {"at": {"$ref": to.format(key)}}, "required": ["at"], **more}
    return whole | {key: {"At": at}}


@pytest.mark.parametrize(
    "schemas",
    [
        [parts(1), parts(True)],
        [parts("a", "definitions"), parts("b", "definitions")],
        [parts(1, **{"$id": "https://example.org/at.json"})],
        [parts(1, to="at.json#/{}/At", **{"$id": "https://example.org/at.json"})],
        [parts(None, "components")],
    ],
    ids=["of one name", "draft 7", "$id", "by address", "elsewhere"],
)
def test_a_reference_leads_to_a_part_of_its_own_tool(real: Server, schemas: list[Any]) -> None:
    tools = [
        {"type": "function", "function": {"name": f"t{number}", "parameters": schema}}
        for number, schema in enumerate(schemas)
    ]
    for seed in range(3):
        given = {"tools": tools, "tool_choice": "required", "seed": seed, "parallel_tool_calls": False}
        (choice,) = client_of(real).chat.completions.create(model="tiny", messages=ASK, **given).choices
        (call,) = choice.message.tool_calls
        schema, arguments = schemas[int(call.function.name[1:])], json.loads(call.function.arguments)
        jsonschema.validate(arguments, schema)
        assert arguments.keys() == {"at"} and arguments["at"].keys() == {"x"}


def test_tools_without_parameters_take_nothing_and_few_may_be_allowed(real: Server) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b", "c")]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools[1:2]}}
    for asked, names in (("any", {"a", "b", "c"}), (choice, {"b"})):
        body = {"model": "tiny", "messages": ASK, "tools": tools, "tool_choice": asked, "max_tokens": 400}
        message = httpx.post(f"{real.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).json()["choices"][0]
        calls = [call["function"] for call in message["message"]["tool_calls"]]
        assert {call["name"] for call in calls} <= names and {call["arguments"] for call in calls} == {"{}"}
    flat = [{"type": "function", "name": name} for name in "abc"]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": flat[:1]}
    body = {"model": "tiny", "input": "?", "tools": flat, "tool_choice": choice, "max_output_tokens": 1}
    reply = httpx.post(f"{real.url}/v1/responses", json=body | {"metadata": {"k": "v"}}, timeout=PATIENCE_S).json()
    assert [tool["name"] for tool in reply["tools"]] == ["a"] and reply["metadata"] == {"k": "v"}


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"stream_options": {"include_usage": True, "x": 1}, "stream": True}, "stream_options.x"),
        ({"response_format": {"type": "json_object", "strict": True}}, "response_format.strict"),
        ({"structured_outputs": {"json": {"enum": [1]}, "backend": "x"}, "y": 1}, "y, structured_outputs.backend"),
        ({"tools": [{"type": "function", "function": {"name": "a", "examples": [1]}}]}, "tools.function.examples"),
        ({"messages": [{"role": "user", "content": "?", "mood": "good"}]}, "messages.mood"),
        ({"tools": [{"type": "function", "function": {"name": "a"}, "cache": 1}]}, "tools.cache"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": {"enum": [1]}, "mode": 1},
                }
            },
            "response_format.json_schema.mode",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a"}}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "a"}}]},
                },
            },
            None,
        ),
        ({"response_format": {"type": "json_object", "schema": {"enum": [7]}}}, None),
        ({"stream_options": {"continuous_usage_stats": False, "x": None}, "stream": True}, None),
    ],
    ids=str,
)
def test_fields_that_are_ignored_are_named_wherever_they_stand(real: Server, fields: Any, ignored: str | None) -> None:
    body = {"model": "tiny", "messages": ASK, "max_tokens": 4, **fields}
    reply = httpx.post(f"{real.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert reply.status_code == 200 and reply.headers.get("X-Ignored-Fields") == ignored


def test_a_form_beside_its_type_holds_and_usage_comes_with_each_chunk(real: Server) -> None:
    form = {"type": "json_object", "schema": {"enum": [7]}}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "tiny", "messages": ASK, "response_format": form, "stream": True, "stream_options": options}
    with httpx.stream("POST", f"{real.url}/v1/chat/completions", json=body, timeout=PATIENCE_S) as reply:
        events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1]) == "7"
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 2


def test_calls_in_the_older_form_are_calls(scripted: tuple[Scripted, Server]) -> None:
    backend, server = scripted
    backend.says = "Two."
    call = {"name": "zoom", "arguments": '{"x": 5}'}
    turns = [
        *ASK,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "zoom", "content": "done"},
    ]
    assert chat(server, messages=turns).choices[0].message.content == "Two."
    text = backend.codec.text_of(backend.asked[-1].prompt_ids)
    assert '"name": "zoom"' in text and "done" in text


@pytest.mark.parametrize(
    "part",
    [
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}},
        {"type": "image_url", "image_url": {"url": "data:application/octet-stream;base64,JVBERi0xLjcK"}},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.pdf?page=1"}},
        {"type": "file", "file": {"filename": "A.PDF", "file_id": "file-1"}},
    ],
    ids=str,
)
def test_a_pdf_is_called_one(real: Server, part: dict[str, Any]) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": [part]}]}
    reply = httpx.post(f"{real.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert reply.status_code == 400 and "a PDF" in reply.json()["error"]["message"]


def test_a_form_of_answers_leaves_calls_open(real: Server) -> None:
    """An agent that may call tools has a form for its last answer, as at vLLM."""
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {**schema, "additionalProperties": False}},
    }
    mark = str(int(real.text.codec.encode_text("<tool_call>")[0]))
    for seed in range(4):
        asked = {"response_format": form, "max_tokens": 200, "seed": seed}
        (answer,) = chat(real, **asked, logit_bias={mark: -100}).choices
        assert answer.finish_reason == "length" or "yes" in json.loads(answer.message.content)
        (call,) = chat(real, **asked, logit_bias={mark: 100}).choices
        for one in call.message.tool_calls or ():
            assert one.function.name in ("zoom", "stop") and isinstance(json.loads(one.function.arguments), dict)
        assert call.message.tool_calls or call.message.content.startswith(("<tool_call>{", "<tool_call>\n{"))


@pytest.mark.slow
def test_unions_with_a_discriminator_hold(real: Server) -> None:
    class Left(pydantic.BaseModel):
        kind: Literal["left"]

    class Right(pydantic.BaseModel):
        kind: Literal["right"]
        far: bool

    class Move(pydantic.BaseModel):
        to: Left | Right = pydantic.Field(discriminator="kind")

    schema = Move.model_json_schema()
    assert "oneOf" in json.dumps(schema)
    tool = {"type": "function", "function": {"name": "move", "parameters": schema}}
    choice = {"type": "function", "function": {"name": "move"}}
    form = {"type": "json_schema", "json_schema": {"name": "move", "schema": schema}}
    for seed in range(3):
        asked = {"seed": seed, "max_tokens": 250, "tools": [tool]}
        (call,) = chat(real, **asked, tool_choice=choice).choices
        (answer,) = chat(real, **asked, tool_choice="none", response_format=form).choices
        assert call.finish_reason == "length" or Move.model_validate_json(call.message.tool_calls[0].function.arguments)
        assert answer.finish_reason == "length" or Move.model_validate_json(answer.message.content)


def test_what_the_system_says_later_is_not_lost(scripted: tuple[Scripted, Server]) -> None:
    """Agents add a system message when they ask again; the template writes the first message's alone."""
    backend, server = scripted
    backend.says = "Two."
    again = [{"role": "assistant", "content": "5"}, {"role": "system", "content": "Mind."}, *ASK]
    for turns in ([{"role": "system", "content": "Look."}, {"role": "developer", "content": "Mind."}, *ASK],
                  [{"role": "system", "content": "Look."}, *ASK, *again], [*ASK, *again]):  # fmt: skip
        chat(server, messages=turns)
        text = backend.codec.text_of(backend.asked[-1].prompt_ids)
        system = text.partition("<|im_end|>")[0]
        assert text.startswith("<|im_start|>system\n") and text.count("Mind.") == 1 and "Mind." in system
        assert ("Look.\n\nMind." in system) == (turns[0]["role"] == "system")
    image = {"type": "image_url", "image_url": {"url": data_uri(picture(np.random.default_rng(0), 64, 64).png)}}
    with pytest.raises(openai.BadRequestError, match="drops or repeats"):
        chat(server, messages=[*ASK, {"role": "system", "content": ["Mind.", image]}])


def test_biases_and_bad_words_change_what_is_sampled(real: Server) -> None:
    codec, create = real.text.codec, client_of(real).chat.completions.create
    token = int(codec.encode_text("3")[0])
    asked: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 4, "temperature": 0}
    (biased,) = create(**asked, logit_bias={str(token): 100}).choices
    assert biased.message.content == "3333"
    banned = create(**asked, logit_bias={str(token): 100}, extra_body={"bad_words": ["33"]}).choices[0].message.content
    assert banned[0] == "3" and "33" not in banned


def test_one_form_in_the_words_of_two_servers_is_one_form(real: Server) -> None:
    """As guidance's client sends it, beside a field that nobody knows any more."""
    more = {"guided_grammar": 'start: "ab"', "structured_outputs": {"grammar": 'start: "ab"'}}
    create = client_of(real).chat.completions.create
    asked: dict[str, Any] = {"model": "tiny", "messages": ASK}
    told = create(**asked, extra_body={**more, "guided_decoding_backend": "guidance"})
    assert told.choices[0].message.content == "ab"
    with pytest.raises(openai.BadRequestError, match="one of them"):
        create(**asked, extra_body={**more, "guided_grammar": 'start: "cd"'})


# --- Thoughts


@pytest.fixture(scope="module")
def thinking(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scripted, Server]]:
    """A model whose template opens a thought."""
    import shutil

    folder = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(tiny_folder, folder)
    path = folder / "chat_template.jinja"
    path.write_text(
        path.read_text().replace(
            "'<|im_start|>assistant\\n' }}\n{%- endif %}", "'<|im_start|>assistant\\n<think>\\n' }}\n{%- endif %}"
        )
    )
    backend = Scripted(folder)
    assert backend.codec.opens_thought
    with serving(backend, folder) as server:
        yield backend, server


def test_thoughts_are_parted_from_the_answer(thinking: tuple[Scripted, Server]) -> None:
    backend, server = thinking
    backend.says = "I see <2 of them>.\n</think>\n\nTwo.\n" + CALLS
    (choice,) = chat(server).choices
    assert choice.message.reasoning == choice.message.reasoning_content == "I see <2 of them>.\n"
    assert choice.message.content == "\n\nTwo.\nLet me look.\n" and len(choice.message.tool_calls) == 2
    streamed = joined(chat(server, stream=True))
    assert (streamed["reasoning"], streamed["content"]) == ("I see <2 of them>.\n", "\n\nTwo.\nLet me look.\n")
    (silent,) = chat(server, extra_body={"include_reasoning": False}).choices
    assert "reasoning" not in silent.message.model_extra and silent.message.content == choice.message.content
    backend.says = 'So.</think>\n[{"name": "zoom", "parameters": {"x": 1, "unit": "m"}}]'
    (forced,) = chat(server, tool_choice="required").choices
    assert [call.function.name for call in forced.message.tool_calls] == ["zoom"] and forced.message.reasoning == "So."
    backend.says = "I never end"
    (open_end,) = chat(server).choices
    assert (open_end.message.content, open_end.message.reasoning) == (None, "I never end")


def test_a_schema_binds_the_answer_and_not_the_thought_which_has_a_budget(
    thinking: tuple[Scripted, Server], tiny_folder: Path
) -> None:
    backend, server = thinking
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [7]}}}
    with tiny_engine(server.text_folder if hasattr(server, "text_folder") else tiny_folder) as engine:
        backend.says = "x"
        chat(server, response_format=schema, tools=[], max_tokens=40, extra_body={"thinking_token_budget": 5})
        (answer,) = asyncio.run(engine.generate([backend.asked[-1]]))
    ids, decode = answer.samples[0].token_ids, backend.codec.decode
    assert decode(ids).partition("</think>")[2].strip() == "7"
    # As it was sampled: the thought's text encoded anew may have fewer tokens, or more. The tag has one per character at most.
    closed = next(count for count in range(len(ids)) if "</think>" in decode(ids[:count]))
    assert closed <= 5 + len("</think>")


# --- Completions: prompts as text or ids, their scores, ids in and out


def test_a_prompts_scores_are_those_of_the_plain_model(real: Server, tiny_folder: Path) -> None:
    ids = real.text.codec.encode_raw("How many shapes are there?", False).tolist()
    model = plain_model(tiny_folder)
    expected = reference_logits(tiny_folder, model, np.array(ids), []).detach().log_softmax(-1)
    create = client_of(real).completions.create
    for prompt in (ids, "How many shapes are there?"):
        for max_tokens in (0, 1):
            more = {"extra_body": {"prompt_logprobs": 0}} if max_tokens else {}
            (choice,) = create(
                model="tiny", prompt=prompt, max_tokens=max_tokens, temperature=0, echo=True, logprobs=2, **more
            ).choices
            told = choice.logprobs
            assert (
                len(told.tokens) == len(ids) + max_tokens
                and "".join(told.tokens[: len(ids)]) == "How many shapes are there?"
            )
            assert told.token_logprobs[0] is None
            wanted = [float(expected[k, ids[k + 1]]) for k in range(len(ids) - 1)]
            assert told.token_logprobs[1 : len(ids)] == pytest.approx(wanted, abs=1e-4)
            assert max(told.top_logprobs[1].values()) == pytest.approx(float(expected[0].max()), abs=1e-4)
            assert choice.text.startswith("How many shapes are there?")


def test_token_ids_go_in_and_out_with_images(real: Server) -> None:
    """An outside trainer's loop: what a chat told is sent back, and gives the same answer."""
    image = picture(np.random.default_rng(1), 64, 96)
    url = data_uri(image.png)
    message = {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}],
    }
    asked = {"model": "tiny", "temperature": 0, "max_tokens": 6, "return_token_ids": True, "logprobs": True}
    post = lambda path, body: httpx.post(f"{real.url}/v1/{path}", json=body, timeout=PATIENCE_S).json()  # noqa: E731
    told = post("chat/completions", {**asked, "messages": [message]})
    again = {**asked, "prompt": told["prompt_token_ids"], "images": [url], "logprobs": 0}
    completed = post("completions", again)
    assert completed["choices"][0]["prompt_token_ids"] == told["prompt_token_ids"]
    assert completed["choices"][0]["token_ids"] == told["choices"][0]["token_ids"]
    assert completed["choices"][0]["policy_versions"] == [[len(told["choices"][0]["token_ids"]), 0]]
    with httpx.stream(
        "POST", f"{real.url}/v1/completions", json={**again, "stream": True}, timeout=PATIENCE_S
    ) as reply:
        events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    assert events[0]["choices"][0]["prompt_token_ids"] == told["prompt_token_ids"]
    streamed = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert streamed == told["choices"][0]["token_ids"]
    two = post("completions", {**asked, "prompt": ["a", "b"], "n": 2, "temperature": 1, "logprobs": None})
    assert [choice["index"] for choice in two["choices"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": ["a", "b"], "images": ["data:image/png;base64,"]}, None),
        ({"prompt": "<|image_pad|>"}, None),
        ({"prompt": "a" * 5000}, "prompt"),
        ({"prompt": "a", "max_tokens": 5000}, "max_tokens"),
    ],
    ids=str,
)
def test_a_bad_prompt_is_refused_by_name(real: Server, body: dict[str, Any], param: str | None) -> None:
    reply = httpx.post(f"{real.url}/v1/completions", json={"model": "tiny", **body}, timeout=PATIENCE_S)
    assert reply.status_code == 400
    found = reply.json()["error"]["param"]
    assert found is None if param is None else found.startswith(param)


def test_images_are_fetched_from_hosts_that_are_allowed_only(engine: TransformersEngine, tiny_folder: Path) -> None:
    image = picture(np.random.default_rng(1), 64, 96)

    class Files(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            moved = self.path == "/moved"
            self.send_response(302 if moved else 200)
            if moved:
                self.send_header("Location", "/image.png")
            self.end_headers()
            self.wfile.write({"/image.png": image.png, "/large": b"x" * 3_000_000}.get(self.path, b"text"))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files) as files:
        threading.Thread(target=files.serve_forever, daemon=True).start()
        at = f"http://127.0.0.1:{files.server_port}"
        with serving(EngineBackend(engine), tiny_folder, image_hosts=["127.0.0.1"], max_image_mib=2) as server:

            def status(url: str) -> int:
                part = {"type": "image_url", "image_url": {"url": url}}
                body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": [part]}]}
                return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).status_code

            assert status(f"{at}/image.png") == 200
            for url in (
                f"{at}/moved",
                f"{at}/text",
                f"{at}/large",
                "http://127.0.0.1:9/x",
                "http://localhost/x",
                "http://[",
            ):
                assert status(url) == 400, url
        files.shutdown()


def test_tokens_of_prompts_and_conversations(real: Server) -> None:
    post = lambda path, body: httpx.post(f"{real.url}/{path}", json=body, timeout=PATIENCE_S).json()  # noqa: E731
    image = picture(np.random.default_rng(1), 64, 96)
    for body in (
        {"prompt": "Where?"},
        {"messages": [{"role": "user", "content": [{"type": "image", "image": data_uri(image.png)}]}]},
    ):
        told = post("tokenize", {**body, "return_token_strs": True})
        assert told["count"] == len(told["tokens"]) == len(told["token_strs"]) and told["max_model_len"] == 1024
        assert post("detokenize", {"tokens": told["tokens"]})["prompt"] == "".join(told["token_strs"])
    assert httpx.post(f"{real.url}/detokenize", json={"tokens": [99999]}, timeout=60).status_code == 400
    assert httpx.get(f"{real.url}/version", timeout=60).json()["version"]
    assert httpx.get(f"{real.url}/ping", timeout=60).status_code == 200
    # A client that encodes here writes conversations itself.
    info, turn = httpx.get(f"{real.url}/tokenizer_info", timeout=60).json(), [{"role": "user", "content": "Where?"}]
    rendered = jinja2.Template(info["chat_template"]).render(messages=turn, add_generation_prompt=True)
    as_text = post("tokenize", {"prompt": rendered, "add_special_tokens": False})["tokens"]
    assert as_text == post("tokenize", {"messages": turn})["tokens"]
    assert post("tokenize", {"prompt": info["eos_token"], "add_special_tokens": False})["count"] == 1
    card = httpx.get(f"{real.url}/v1/models/tiny", timeout=60).json()
    assert card["max_model_len"] == 1024 and "image" in card["input_modalities"]


def test_a_prefilled_answer_goes_on(real: Server, engine: TransformersEngine) -> None:
    turns = [*ASK, {"role": "assistant", "content": "Answer: "}]
    body = {"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True}
    told = client_of(real).chat.completions.create(model="tiny", messages=turns, max_tokens=2, extra_body=body)
    text = real.text.codec.text_of(told.prompt_token_ids)
    assert text.endswith("<|im_start|>assistant\nAnswer: ")


# --- Responses


RESPONSE_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]


def test_a_response_has_text_and_calls_whole_and_streamed(scripted: tuple[Scripted, Server]) -> None:
    backend, server = scripted
    client = client_of(server)
    backend.says = CALLS
    given: dict[str, Any] = {"model": "tiny", "input": "How many?", "instructions": "Look.", "tools": RESPONSE_TOOLS}
    whole = client.responses.create(**given)
    assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
    assert whole.output_text == "Let me look.\n" and json.loads(whole.output[1].arguments) == {"x": 5, "unit": "cm"}
    assert whole.status == "completed" and whole.usage.total_tokens > 0
    with client.responses.stream(**given) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events][:2] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    for one, other in zip(final.output, whole.output, strict=True):
        assert (one.type, getattr(one, "name", 0), getattr(one, "arguments", 0)) == (
            other.type, getattr(other, "name", 0), getattr(other, "arguments", 0),
        )  # fmt: skip
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    # The next turn, with a picture that the tool returned.
    image = picture(np.random.default_rng(0), 64, 64)
    turns = [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "How many?"},
                {"type": "input_image", "image_url": data_uri(image.png)},
            ],
        },
        *[item.model_dump(exclude_none=True) for item in whole.output],
        {
            "type": "function_call_output",
            "call_id": whole.output[1].call_id,
            "output": [{"type": "input_image", "image_url": data_uri(image.png)}],
        },
        {"type": "function_call_output", "call_id": whole.output[2].call_id, "output": "stopped"},
    ]
    backend.says = "Two."
    assert client.responses.create(model="tiny", input=turns, tools=RESPONSE_TOOLS).output_text == "Two."
    text = backend.codec.text_of(backend.asked[-1].prompt_ids)
    assert text.count("<|image_pad|>") == 2 and text.count("</tool_call>") == 2 + 2 and "stopped" in text


def test_a_response_fits_a_model_and_tells_log_probabilities(real: Server) -> None:
    class Answer(pydantic.BaseModel):
        yes: bool

    client = client_of(real)
    parsed = client.responses.parse(model="tiny", input="Is it red?", text_format=Answer, max_output_tokens=60)
    assert isinstance(parsed.output_parsed, Answer)
    told = client.responses.create(model="tiny", input="Say.", max_output_tokens=3, top_logprobs=2, temperature=0)
    assert told.status in ("incomplete", "completed")
    if told.status == "incomplete":
        assert told.incomplete_details.reason == "max_output_tokens"
    assert len(told.output[0].content[0].logprobs[0].top_logprobs) == 2


def test_thoughts_are_an_item_of_their_own(thinking: tuple[Scripted, Server]) -> None:
    thinking[0].says = "Hm.</think>Two."
    client = client_of(thinking[1])
    whole = client.responses.create(model="tiny", input="How many?")
    assert [item.type for item in whole.output] == ["reasoning", "message"] and whole.output_text == "Two."
    assert whole.output[0].content[0].text == "Hm."
    with client.responses.stream(model="tiny", input="How many?") as stream:
        kinds = [event.type for event in stream]
    assert "response.reasoning_text.delta" in kinds and kinds.count("response.output_item.done") == 2
    again = [{"role": "user", "content": "?"}, *[item.model_dump(exclude_none=True) for item in whole.output]]
    assert (
        client.responses.create(model="tiny", input=[*again, {"role": "user", "content": "Sure?"}]).output_text
        == "Two."
    )


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": 5},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": "x", "previous_response_id": "resp_1"},
        {"input": "x", "tools": [{"type": "web_search"}]},
        {"input": "x", "n": 2},
        {"input": "x", "text": {"format": {"type": "json_schema"}}},
    ],
    ids=str,
)
def test_a_response_that_cannot_be_given_is_refused(real: Server, body: dict[str, Any]) -> None:
    reply = httpx.post(f"{real.url}/v1/responses", json={"model": "tiny", **body}, timeout=PATIENCE_S)
    assert reply.status_code == 400 and reply.json()["error"]["message"]
