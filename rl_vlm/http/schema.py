"""Bodies of requests: OpenAI's with vLLM's additions, and the plain `/generate`."""

from __future__ import annotations

import json
import logging
import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from rl_vlm.http.gate import RequestError
from rl_vlm.types import MAX_GRAMMAR_CHARS, MAX_REPETITION_PENALTY, MAX_TOP_LOGPROBS, MIN_REPETITION_PENALTY, Grammar

_MAX_ITEMS = 100_000  # a bound for the parser; the server's own limits are lower
_MAX_INT = 2**31
_MAX_FIELDS = 256  # of a chat; more are not even named
_MAX_SHOWN = 200  # characters of an error that may come from the client
_MAX_BIASED = 1024  # tokens of a logit_bias

logger = logging.getLogger("rl_vlm.http")

M = TypeVar("M", bound=BaseModel)


def _shown(name: str) -> str:
    return name if _NAME.fullmatch(name) else "?"


class _In(BaseModel):
    """An object within a body. Fields that it does not know are ignored, and named where it has a `place`."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)
    place: ClassVar[str] = ""
    notes: ClassVar[frozenset[str]] = frozenset()  # fields that change nothing

    @model_validator(mode="before")
    @classmethod
    def _name_unknown(cls, data: Any, info: ValidationInfo) -> Any:
        keys = {str(field.alias or name): field.is_required() for name, field in cls.model_fields.items()}
        needed = {key for key, required in keys.items() if required}
        if cls.place and isinstance(data, dict) and needed <= data.keys() and info.context is not None:
            new = (name for name in data.keys() - keys - cls.notes - IGNORED if data[name])
            info.context.extend(f"{cls.place}.{_shown(name)}" for name in new)
        return data


class TextPart(_In):
    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


class ImagePart(_In):
    type: Literal["image", "image_url", "input_image", "file", "input_file"]
    uri: str

    @model_validator(mode="before")
    @classmethod
    def _with_its_uri(cls, data: Any) -> Any:
        """The URI, which each form keeps at a place of its own."""
        if not isinstance(data, dict):
            return data
        holder = data.get("image_url", data.get("file", data))
        holder = holder if isinstance(holder, dict) else {"url": holder}
        keys = ("url", "image", "file_data", "file_url", "filename")
        uri, *others = [*(holder[key] for key in keys if isinstance(holder.get(key), str)), ""]
        if any(_PDF.search(text[:_MAX_SHOWN]) for text in (uri, *others)):
            raise ValueError("this part is a PDF, and only images are read: send its pages as images")
        if not uri or uri == holder.get("filename"):
            raise ValueError("this part holds no image: give its data URI")
        return {"type": data.get("type"), "uri": uri}


_PDF = re.compile(r"application/pdf|base64,JVBERi|^JVBERi|\.pdf([?#]|$)", re.IGNORECASE)  # JVBERi: %PDF in base64


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


def _as_parts(content: Any) -> Any:
    if not isinstance(content, str | list):
        raise ValueError("this must be text, or a list of parts")
    parts = [content] if isinstance(content, str) else content
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


Parts = Annotated[list[Part], Field(max_length=_MAX_ITEMS, fail_fast=True), BeforeValidator(_as_parts)]


def _parsed(arguments: Any) -> Any:
    """As templates want them; as text where they are no JSON."""
    if not isinstance(arguments, str):
        raise ValueError("this must be text that holds JSON")
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


class FunctionCall(_In):
    name: str
    arguments: Annotated[Any, BeforeValidator(_parsed)] = {}

    @property
    def text(self) -> str:
        """As Qwen's chat template writes it, and environments read it."""
        arguments = self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments)
        return f'\n<tool_call>\n{{"name": {json.dumps(self.name)}, "arguments": {arguments}}}\n</tool_call>'


class MessageToolCall(_In):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(_In):
    place: ClassVar[str] = "messages"
    role: Literal["system", "developer", "user", "tool", "assistant"]
    content: Parts | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = Field(None, max_length=_MAX_ITEMS, fail_fast=True)
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(None, validation_alias=AliasChoices("reasoning_content", "reasoning"))

    @model_validator(mode="before")
    @classmethod
    def _calls_as_tools(cls, data: Any) -> Any:
        """OpenAI's older form of a call and its result."""
        if isinstance(data, dict) and data.get("role") == "function":
            return {**data, "role": "tool"}
        if isinstance(data, dict) and isinstance(call := data.get("function_call"), dict):
            return {**data, "function_call": None, "tool_calls": [{"function": call}]}
        return data

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError("the content is missing")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only the assistant calls tools")
        return self

    @property
    def fields(self) -> dict[str, Any]:
        """What a chat template reads beside role and content."""
        beside = self.model_dump(include={"name", "tool_calls", "tool_call_id", "reasoning_content"})
        return {name: value for name, value in beside.items() if value}


class Function(_In):
    place: ClassVar[str] = "tools.function"
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """What a call's arguments fit: nothing else than the parameters, if these do not say otherwise."""
        return {"type": "object", "properties": {}, **(self.parameters or {})}


class Tool(_In):
    place: ClassVar[str] = "tools"
    type: Literal["function"] = "function"
    function: Function

    @property
    def shown(self) -> dict[str, Any]:
        """As chat templates write it, key by key as vLLM does."""
        function = self.function.model_dump()
        return {"type": "function", "function": {k: v for k, v in function.items() if k != "strict" or v is not None}}


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=_MAX_ITEMS, fail_fast=True)]


class GenerateRequest(_In):
    """A conversation; temperature 0 is greedy, above 0 samples with top-p 0.9."""

    messages: Messages  # The conversation, in the forms of a chat.
    max_tokens: int = Field(512, ge=1, lt=_MAX_INT)  # Cut to what the context has left.
    temperature: float = Field(0.7, ge=0, le=2)  # 0 is greedy; above it top-p is 0.9.


class AllowedTools(_In):
    """Those of `tools` that may be called."""

    mode: Literal["auto", "required"]
    tools: list[Tool] = Field(min_length=1, max_length=256)


class ToolChoice(_In):
    """OpenAI's choice of some tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class StreamOptions(_In):
    place: ClassVar[str] = "stream_options"
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


Texts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024, fail_fast=True)]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopText = Annotated[str, Field(min_length=1, max_length=256)]
BadTexts = Annotated[list[StopText], Field(max_length=64)]
Biases = dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-100, le=100)]]
StopTexts = Annotated[list[StopText], Field(max_length=16, fail_fast=True), BeforeValidator(_as_list)]


def _as_json(schema: Any) -> Any:
    if not isinstance(schema, str | dict):
        raise ValueError("this must be a JSON schema, or its text")
    return schema if isinstance(schema, str) else json.dumps(schema)


Schema = Annotated[str, BeforeValidator(_as_json)]
Pattern = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]


class NamedSchema(_In):
    place: ClassVar[str] = "response_format.json_schema"
    notes: ClassVar[frozenset[str]] = frozenset({"name", "description", "strict", "type"})
    json_schema: Schema = Field(alias="schema")


class ResponseFormat(_In):
    """OpenAI's form of a grammar, or llama.cpp's with the `schema` beside the type. A schema always holds, whether
    `strict` or not."""

    place: ClassVar[str] = "response_format"
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    plain: Schema | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        named = self.json_schema is not None
        if (named and self.type != "json_schema") or (self.type == "json_schema" and not named and self.plain is None):
            raise ValueError("json_schema goes with the type json_schema")
        return self

    @property
    def schema_text(self) -> str | None:
        """The schema that the answer fits."""
        if self.type == "text":
            return None
        return self.json_schema.json_schema if self.json_schema else self.plain or _ANY_OBJECT


class StructuredOutputs(_In):
    """vLLM's form of a grammar: one of these, and how JSON is written."""

    place: ClassVar[str] = "structured_outputs"
    json_schema: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Pattern | None = None
    grammar: Pattern | None = None
    choice: Texts | None = None
    structural_tag: None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: Pattern | None = None
    disable_additional_properties: bool | None = None  # so it is, where a schema does not say otherwise

    def spaced(self, schema: str) -> str:
        """A schema with llguidance's options of how to write it."""
        options: dict[str, Any] = {"whitespace_flexible": False} if self.disable_any_whitespace else {}
        options |= {"whitespace_pattern": self.whitespace_pattern} if self.whitespace_pattern else {}
        if not options or not isinstance(root := _parsed(schema), dict):
            return schema
        return json.dumps({**root, "x-guidance": options})


Form = Grammar | tuple[str, ...]  # what an answer is to be: a grammar's, or one of some texts
_ANY_OBJECT = '{"type": "object"}'


class TemplateOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    enable_thinking: bool | None = None  # where the model's template knows the switch


# Fields of OpenAI and of vLLM that would change the answer and are not supported, each with the value that does not.
USUAL: dict[str, Any] = {
    "functions": [], "function_call": "none", "modalities": ["text"], "best_of": 1, "length_penalty": 1.0,
    "add_special_tokens": False, "use_beam_search": False, "stop_token_ids": [], "priority": 0, "echo": False,
    "return_prompt_text": False, "truncate_prompt_tokens": None, "documents": [], "chat_template": None,
    "mm_processor_kwargs": {}, "media_io_kwargs": {}, "allowed_token_ids": None, "logprob_token_ids": None,
    "kv_transfer_params": None, "audio": None, "suffix": None, "prompt_embeds": None, "previous_response_id": None,
    "conversation": None, "background": False, "prompt": None,
}  # fmt: skip
# Fields that do not change the answer, whatever they hold.
IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "reasoning_effort",
    "verbosity", "request_id", "session_id", "cache_salt", "skip_special_tokens", "spaces_between_special_tokens",
    "include", "truncation", "reasoning", "max_tool_calls", "prompt_cache_retention", "mm_payload", "return_mm_kwargs",
    "routed_experts_prompt_start", "return_token_offsets",
}  # fmt: skip
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_logged: set[str] = set()  # unknown fields that the log has named


class SampledRequest(BaseModel):
    """What all requests for samples share. A field that is None counts as absent. One that would change the answer and
    is not supported is an error; one that is unknown is ignored, and named in the log and in a header."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    model: str | None = Field(None, max_length=256)  # Which weights answer: see GET /v1/models.
    max_tokens: int | None = Field(None, ge=1, lt=_MAX_INT)  # Sampled tokens of each answer at most.
    min_tokens: int = Field(0, ge=0, lt=_MAX_INT)  # Before an end of turn or a stop string.
    ignore_eos: bool = False  # Go on to max_tokens whatever is sampled.
    temperature: float = Field(1.0, ge=0, le=2)  # Below 0.01 an answer is greedy.
    top_p: float = Field(1.0, gt=0, le=1)  # Sample among the likeliest tokens that have this probability together.
    top_k: int = Field(0, ge=-1, lt=_MAX_INT)  # Sample among so many tokens; 0 and -1: all.
    min_p: float = Field(0.0, ge=0, le=1)  # Leave out tokens below this share of the likeliest one.
    # Above 1 tokens of the prompt and the answer become less likely.
    repetition_penalty: float = Field(1.0, ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)  # Off a token's logit, for each time that it was sampled.
    presence_penalty: float = Field(0.0, ge=-2, le=2)  # Off the logits of tokens that were sampled.
    # Token id → what is added to its logit; at most 1,024.
    logit_bias: Biases = Field({}, max_length=_MAX_BIASED)
    bad_words: BadTexts = []  # Texts that are never sampled.
    n: int = Field(1, ge=1, lt=_MAX_INT)  # Answers to each prompt.
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)  # Of the random numbers of this request.
    stop: StopTexts = []  # Texts that end an answer.
    include_stop_str_in_output: bool = False  # Whether the text has the stop string at its end.
    stream: bool = False  # Send the answer as events while it grows.
    stream_options: StreamOptions | None = None  # {"include_usage": true}: an event at the end counts tokens.
    # Log-probabilities of the prompt, with so many alternatives at each place.
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    return_token_ids: bool = False  # Give the ids of prompt and answer, and which version sampled them.
    return_tokens_as_token_ids: bool = False  # Write tokens of log-probabilities as token_id:N.
    response_format: ResponseFormat | None = None  # OpenAI's form of the answer: json_object or json_schema.
    # vLLM's form of the answer: one of json, json_object, regex, grammar and choice.
    structured_outputs: StructuredOutputs | None = None
    guided_choice: Texts | None = None  # The answer is one of these.
    guided_json: Schema | None = None  # The answer is JSON of this schema.
    guided_regex: Pattern | None = None  # The answer matches this regular expression.
    guided_grammar: Pattern | None = None  # The answer is a sentence of this grammar, in Lark or GBNF.
    ignored_fields: list[str] = []

    @model_validator(mode="before")
    @classmethod
    def _without_what_changes_nothing(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > _MAX_FIELDS:
            raise ValueError(f"the body has {len(data)} fields: leave out unknown ones")
        known = cls.model_fields.keys() - {"ignored_fields"}
        given = dict[str, Any]()
        for name, value in data.items():
            if value is None or name in IGNORED - known:
                continue
            if name in known or (name in USUAL and value != USUAL[name]):
                # JSON has one kind of number, and some clients write 6.0 for 6.
                given[name] = int(value) if isinstance(value, float) and value.is_integer() else value
            elif name not in USUAL and info.context is not None:
                info.context.append(_shown(name))
        return given

    @model_validator(mode="after")
    def _name_ignored(self, info: ValidationInfo) -> Any:
        self.ignored_fields = [*dict.fromkeys(info.context or ())][:16]
        if new := sorted({*self.ignored_fields} - _logged) if len(_logged) < _MAX_FIELDS else []:
            _logged.update(new)
            logger.warning("Clients send fields that are not known here and are ignored: %s.", ", ".join(new))
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Any:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs are not streamed: leave stream out")
        # Some clients say the same in the words of older and of newer servers.
        if len({form for _, form in self._forms}) > 1:
            raise ValueError(f"{' and '.join(name for name, _ in self._forms)} constrain the answer: give one of them")
        return self

    @property
    def top(self) -> int | None:
        """How many alternatives each place has; None where no log-probabilities are."""
        return None

    @property
    def scores(self) -> int | None:
        return self.prompt_logprobs

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def _forms(self) -> list[tuple[str, Form]]:
        """What the answer is to be, and where the body says so."""
        vllm = self.structured_outputs or StructuredOutputs()
        schemas = {"guided_json": self.guided_json, "structured_outputs.json": vllm.json_schema}
        schemas["structured_outputs.json_object"] = _ANY_OBJECT if vllm.json_object else None
        schemas["response_format"] = self.response_format.schema_text if self.response_format else None
        patterns = {"guided_regex": self.guided_regex, "structured_outputs.regex": vllm.regex}
        grammars = {"guided_grammar": self.guided_grammar, "structured_outputs.grammar": vllm.grammar}
        choices = {"guided_choice": self.guided_choice, "structured_outputs.choice": vllm.choice}
        return [
            *((name, Grammar("json_schema", vllm.spaced(text))) for name, text in schemas.items() if text is not None),
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


def _plain(choice: Any) -> Any:
    """The word that some clients wrap into an object: {"type": "auto"}."""
    return choice["type"] if isinstance(choice, dict) and choice.keys() == {"type"} else choice


# "any" is Mistral's word for "required".
Choice = Annotated[Literal["none", "auto", "required", "any"] | Tool | ToolChoice, BeforeValidator(_plain)]


class ChatRequest(SampledRequest):
    """OpenAI's request for a chat, and vLLM's additions."""

    messages: Messages  # The conversation; content is text or a list of parts, images among them.
    max_completion_tokens: int | None = Field(None, ge=1, lt=_MAX_INT)  # OpenAI's newer name of max_tokens.
    logprobs: bool = False  # Give the log-probability of each sampled token.
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)  # And of so many alternatives.
    tools: list[Tool] = Field([], max_length=256)  # Functions that the model may call.
    # Whether it must call one, or which one, or some that it may call.
    tool_choice: Choice = "auto"
    parallel_tool_calls: bool = True  # false: one call at most.
    add_generation_prompt: bool = True  # Begin a turn of the assistant.
    continue_final_message: bool = False  # Go on with the last message, which is the assistant's.
    include_reasoning: bool = True  # false: leave thoughts out of the answer.
    thinking_token_budget: int | None = Field(None, ge=0, lt=_MAX_INT)  # Close a thought after so many tokens.
    chat_template_kwargs: TemplateOptions = TemplateOptions()  # {"enable_thinking": false} switches thoughts off.

    @model_validator(mode="after")
    def _of_a_chat(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("two tools have the same name")
        if isinstance(choice := self.tool_choice, ToolChoice):
            allowed = {tool.function.name for tool in choice.allowed_tools.tools}
            if allowed - set(names):
                raise ValueError("tool_choice asks for a tool that is not among tools")
            self.tools, self.tool_choice = (
                [one for one in self.tools if one.function.name in allowed],
                choice.allowed_tools.mode,
            )
        elif choice == "any":
            self.tool_choice = "required"
        if (self.tool_choice == "required" and not names) or (self.named_tool and self.named_tool not in names):
            raise ValueError("tool_choice asks for a tool that is not among tools")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message needs a last message of the assistant")
        return self

    @property
    def named_tool(self) -> str:
        return self.tool_choice.function.name if isinstance(self.tool_choice, Tool) else ""

    @property
    def top(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def _forms(self) -> list[tuple[str, Form]]:
        forced = [tool.function for tool in self.tools if self.named_tool in ("", tool.function.name)]
        if self.tool_choice in ("none", "auto") or not forced:
            return super()._forms
        if self.named_tool:
            form = Grammar("json_schema", json.dumps(forced[0].arguments_schema))
        else:
            tools = {function.name: function.arguments_schema for function in forced}
            form = Grammar("calls", json.dumps({"tools": tools, "several": self.parallel_tool_calls}))
        others = [form for form in super()._forms if form[0] != "response_format"]  # that of answers, which this is not
        return [*others, ("tool_choice", form)]


TokenId = Annotated[int, Field(ge=0, lt=_MAX_INT)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=_MAX_ITEMS)]
Prompts = Annotated[list[str | TokenIds], Field(min_length=1, max_length=256)]


class CompletionRequest(SampledRequest):
    """OpenAI's legacy request: prompts as text or token ids. `images`: data URIs for the placeholders of one prompt."""

    # A text, token ids, or up to 256 of these.
    prompt: str | TokenIds | Prompts
    images: list[str] = Field([], max_length=_MAX_ITEMS)  # Data URIs for the image placeholders of one prompt.
    max_tokens: int | None = Field(16, ge=0, lt=_MAX_INT)  # 0 with echo: score the prompt only.
    echo: bool = False  # Put the prompt before the text, with its log-probabilities.
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)  # Log-probabilities, with so many alternatives.
    add_special_tokens: bool = True  # Put the tokens around a text that the tokenizer puts there.

    @property
    def prompts(self) -> list[str | list[int]]:
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if single else self.prompt  # type: ignore[list-item,return-value]

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def scores(self) -> int | None:
        """How many alternatives each prompt token has; None where none are asked for."""
        asked = [self.logprobs] * self.echo + [self.prompt_logprobs]
        return max((one for one in asked if one is not None), default=None)


class TokenizeRequest(BaseModel):
    """vLLM's: a prompt, or a conversation."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None  # As for samples; all models of a server have one tokenizer.
    prompt: str | None = None  # A text, or instead of it:
    messages: Messages | None = None  # A conversation, as in a chat; its images count all their tokens.
    tools: list[Tool] = Field([], max_length=256)  # As in a chat.
    add_generation_prompt: bool = True  # As in a chat.
    continue_final_message: bool = False  # As in a chat.
    add_special_tokens: bool = True  # As for a prompt of /v1/completions.
    return_token_strs: bool | None = False  # Give the text of each token, too.
    chat_template_kwargs: TemplateOptions = TemplateOptions()  # As in a chat.

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(BaseModel):
    """vLLM's: token ids."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None  # As for samples.
    # Token ids.
    tokens: list[TokenId] = Field(max_length=_MAX_ITEMS)


def parse_body(body: bytes, kind: type[M]) -> M:
    """The body as a model. NaN, lone surrogates and deep nesting are errors. Raises RequestError."""
    try:
        return kind.model_validate_json(body, context=[])
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
