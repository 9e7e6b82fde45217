"""Bodies of requests: OpenAI's chat completions with vLLM's additions, and the plain `/generate`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from rl_vlm.http.gate import RequestError
from rl_vlm.types import MAX_GRAMMAR_CHARS, MAX_REPETITION_PENALTY, MAX_TOP_LOGPROBS, MIN_REPETITION_PENALTY, Grammar

_MAX_ITEMS = 100_000  # a bound for the parser; the server's own limits are lower
_MAX_INT = 2**31
_MAX_FIELDS = 256  # of a chat; more are not even named
_MAX_SHOWN = 200  # characters of an error that may come from the client

M = TypeVar("M", bound=BaseModel)


class _In(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class TextPart(_In):
    type: Literal["text"]
    text: str


class ImagePart(_In):
    type: Literal["image"]
    image: str

    @property
    def uri(self) -> str:
        return self.image


class ImageURL(_In):
    url: str


class ImageURLPart(_In):
    type: Literal["image_url"]
    image_url: ImageURL

    @property
    def uri(self) -> str:
        return self.image_url.url


Part = Annotated[TextPart | ImagePart | ImageURLPart, Field(discriminator="type")]


def _as_parts(content: Any) -> Any:
    if not isinstance(content, str | list):
        raise ValueError("this must be text, or a list of parts")
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Parts = Annotated[list[Part], Field(max_length=_MAX_ITEMS, fail_fast=True), BeforeValidator(_as_parts)]


class FunctionCall(_In):
    name: str
    arguments: str = "{}"  # JSON

    @property
    def text(self) -> str:
        """As Qwen's chat template writes it, and environments read it."""
        called = f'{{"name": {json.dumps(self.name)}, "arguments": {self.arguments}}}'
        return f"\n<tool_call>\n{called}\n</tool_call>"


class ToolCall(_In):
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(_In):
    role: Literal["system", "developer", "user", "tool", "assistant"]
    content: Parts | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=_MAX_ITEMS, fail_fast=True)

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError("the content is missing")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only the assistant calls tools")
        if self.tool_calls:  # they are part of what it said
            said = [TextPart(type="text", text=call.function.text) for call in self.tool_calls]
            self.content = [*(self.content or ()), *said]
        return self


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=_MAX_ITEMS, fail_fast=True)]


class GenerateRequest(_In):
    """A conversation; temperature 0 is greedy, above 0 samples with top-p 0.9."""

    messages: Messages
    max_tokens: int = Field(512, ge=1, lt=_MAX_INT)
    temperature: float = Field(0.7, ge=0, le=2)


class StreamOptions(_In):
    include_usage: bool | None = False


Texts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024, fail_fast=True)]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopText = Annotated[str, Field(min_length=1, max_length=256)]
StopTexts = Annotated[list[StopText], Field(max_length=16, fail_fast=True), BeforeValidator(_as_list)]


def _as_json(schema: Any) -> Any:
    if not isinstance(schema, str | dict):
        raise ValueError("this must be a JSON schema, or its text")
    return schema if isinstance(schema, str) else json.dumps(schema)


Schema = Annotated[str, BeforeValidator(_as_json)]
Pattern = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]


class NamedSchema(_In):
    json_schema: Schema = Field(alias="schema")


class ResponseFormat(_In):
    """OpenAI's form of a grammar. A schema always holds, whether `strict` or not."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema")
        return self


class StructuredOutputs(_In):
    """vLLM's form of a grammar: one of these."""

    json_schema: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Pattern | None = None
    grammar: Pattern | None = None
    choice: Texts | None = None
    structural_tag: None = None


_ANY_OBJECT = '{"type": "object"}'


class TemplateOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    enable_thinking: bool | None = None  # where the model's template knows the switch


# Fields of OpenAI and of vLLM that are not supported, each with the value that changes nothing.
_USUAL: dict[str, Any] = {
    "tools": [], "tool_choice": "none", "functions": [], "function_call": "none", "logit_bias": {},
    "modalities": ["text"], "best_of": 1, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "include_stop_str_in_output": False, "add_generation_prompt": True,
    "continue_final_message": False, "add_special_tokens": False, "echo": False, "length_penalty": 1.0,
    "use_beam_search": False, "include_reasoning": True, "stop_token_ids": [], "bad_words": [], "priority": 0,
    "mm_payload": "tensors", "routed_experts_prompt_start": 0, "return_token_offsets": False,
    "return_token_ids": False, "return_tokens_as_token_ids": False, "return_prompt_text": False,
    "return_mm_kwargs": False,
}  # fmt: skip
# Fields that do not change the answer, whatever they hold.
_IGNORED = {
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key",
    "reasoning_effort", "verbosity", "request_id", "session_id", "cache_salt",
}  # fmt: skip


class ChatRequest(BaseModel):
    """OpenAI's request, and vLLM's additions. A field that is None counts as absent; one that is unknown, or not
    supported, is an error that names it."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    model: str = Field(max_length=256)
    messages: Messages
    max_tokens: int | None = Field(None, ge=1, lt=_MAX_INT)
    max_completion_tokens: int | None = Field(None, ge=1, lt=_MAX_INT)
    min_tokens: int = Field(0, ge=0, lt=_MAX_INT)  # before an end of turn or a stop string
    ignore_eos: bool = False  # go on to max_tokens whatever is sampled
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=_MAX_INT)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    n: int = Field(1, ge=1, lt=_MAX_INT)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: StopTexts = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_choice: Texts | None = None  # the answer is one of these
    guided_json: Schema | None = None
    guided_regex: Pattern | None = None
    guided_grammar: Pattern | None = None
    chat_template_kwargs: TemplateOptions = TemplateOptions()

    @model_validator(mode="before")
    @classmethod
    def _without_what_changes_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > _MAX_FIELDS:
            raise ValueError(f"the body has {len(data)} fields: leave out those that are not known here")
        given = {
            name: value
            for name, value in data.items()
            if value is not None and name not in _IGNORED and not (name in _USUAL and value == _USUAL[name])
        }
        # JSON has one kind of number, and some clients write 6.0 for 6.
        return {name: int(v) if isinstance(v, float) and v.is_integer() else v for name, v in given.items()}

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if len(self._forms) > 1:
            raise ValueError(f"{' and '.join(name for name, _ in self._forms)} constrain the answer: give one of them")
        return self

    @property
    def _forms(self) -> list[tuple[str, Grammar | tuple[str, ...]]]:
        """What the answer is to be, and where the body says so."""
        asked, vllm = self.response_format, self.structured_outputs or StructuredOutputs()
        json_object = _ANY_OBJECT if vllm.json_object else None
        schemas = {"guided_json": self.guided_json, "structured_outputs.json": vllm.json_schema}
        schemas["structured_outputs.json_object"] = json_object
        if asked is not None and asked.type != "text":
            schemas["response_format"] = asked.json_schema.json_schema if asked.json_schema else _ANY_OBJECT
        patterns = {"guided_regex": self.guided_regex, "structured_outputs.regex": vllm.regex}
        grammars = {"guided_grammar": self.guided_grammar, "structured_outputs.grammar": vllm.grammar}
        choices = {"guided_choice": self.guided_choice, "structured_outputs.choice": vllm.choice}
        return [
            *((name, Grammar("json_schema", schema)) for name, schema in schemas.items() if schema is not None),
            *((name, Grammar("regex", text)) for name, text in patterns.items() if text is not None),
            *((name, Grammar("grammar", text)) for name, text in grammars.items() if text is not None),
            *((name, tuple(texts)) for name, texts in choices.items() if texts is not None),
        ]

    @property
    def grammar(self) -> Grammar | None:
        return next((form for _, form in self._forms if isinstance(form, Grammar)), None)

    @property
    def choices(self) -> tuple[str, ...]:
        return next((form for _, form in self._forms if isinstance(form, tuple)), ())


def parse_body(body: bytes, kind: type[M]) -> M:
    """The body as a model. NaN, lone surrogates and deep nesting are errors. Raises RequestError."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    # Outside of the handler: the error holds the client's data.
    if first["type"] == "model_type" and not first["loc"]:
        raise RequestError(400, "The body must be a JSON object, sent with the header Content-Type: application/json.")
    path: list[str] = []
    for item in map(str, first["loc"]):
        if item not in path[-1:]:  # the tag of a part is the name of its field, too
            path.append(item)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "this field is not known here, or not with this value: leave it out"
    elif first["type"] == "model_type":
        message = "this must be a JSON object"
    param, message = ".".join(path)[:_MAX_SHOWN], message[:_MAX_SHOWN]
    raise RequestError(400, f"{param}: {message}." if param else f"{message}.", param=param or None)
