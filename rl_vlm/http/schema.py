"""JSON schemas of requests and replies: OpenAI's chat completions, and the plain `/generate`."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)

from rl_vlm.types import MAX_REPETITION_PENALTY, MAX_TOP_LOGPROBS, MIN_REPETITION_PENALTY

_MAX_ITEMS = 100_000  # a bound for the parser; the server's own limits are lower
_MAX_INT = 2**31


class _In(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


def _neutral(*values: Any) -> Any:
    """Annotation of a field that other servers support: only values that have no effect here are accepted."""

    def check(value: Any) -> Any:
        if value is not None and not any(
            value == known and isinstance(value, bool) == isinstance(known, bool) for known in values
        ):
            only = "leave it out" if not values else f"leave it out, or send {json.dumps(values[0])}"
            raise ValueError(f"this is not supported here: {only}")
        return value

    return Annotated[Any, AfterValidator(check), WithJsonSchema({"enum": [None, *values]})]


class TextPart(_In):
    type: Literal["text"]
    text: str


class ImagePart(_In):
    type: Literal["image"]
    image: str = Field(description="A data URI, such as data:image/png;base64,...")


class ImageURL(_In):
    url: str = Field(description="A data URI, such as data:image/png;base64,...")


class ImageURLPart(_In):
    type: Literal["image_url"]
    image_url: ImageURL


Part = Annotated[TextPart | ImagePart | ImageURLPart, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(max_length=_MAX_ITEMS, fail_fast=True)]
# Tagged unions, so that an error names the form that was sent.
_TextOrParts = Discriminator(lambda value: "text" if isinstance(value, str) else "parts")
Content = Annotated[Annotated[str, Tag("text")] | Annotated[Parts, Tag("parts")], _TextOrParts]


class _Message(_In):
    tool_calls: list[Any] | None = Field(None, max_length=0, description="Not supported.")


class SpokenMessage(_Message):
    role: Literal["system", "developer", "user", "tool"]
    content: Content


class AssistantTurn(_Message):
    role: Literal["assistant"]
    content: Content | None = None


ChatMessage = Annotated[SpokenMessage | AssistantTurn, Field(discriminator="role")]
Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=_MAX_ITEMS, fail_fast=True)]


class GenerateRequest(_In):
    """A conversation; temperature 0 is greedy, above 0 samples with top-p 0.9."""

    messages: Messages
    max_tokens: int = Field(512, ge=1, lt=_MAX_INT)
    temperature: float = Field(0.7, ge=0, le=2)


class GenerateReply(BaseModel):
    text: str


class DetailError(BaseModel):
    detail: str


class StreamOptions(_In):
    include_usage: bool | None = None


StopText = Annotated[str, Field(min_length=1, max_length=256)]
StopTexts = Annotated[list[StopText], Field(max_length=16, fail_fast=True)]
Stop = Annotated[Annotated[StopText, Tag("text")] | Annotated[StopTexts, Tag("parts")], _TextOrParts]


def _different(texts: list[str]) -> list[str]:
    if len(set(texts)) < len(texts):
        raise ValueError("the texts must differ")
    return texts


ChoiceTexts = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(min_length=1, max_length=1024, fail_fast=True, json_schema_extra={"uniqueItems": True}),
    AfterValidator(_different),
]


class Choices(_In):
    choice: ChoiceTexts
    # Of these the choice would be lost, or they would.
    json_schema: _neutral() = Field(None, alias="json")  # type: ignore[valid-type]
    regex: _neutral() = None  # type: ignore[valid-type]
    grammar: _neutral() = None  # type: ignore[valid-type]
    json_object: _neutral(False) = None  # type: ignore[valid-type]
    structural_tag: _neutral() = None  # type: ignore[valid-type]


class ResponseFormat(_In):
    type: Literal["text"] = Field(description="Only text; guided choice restricts an answer to given texts.")


class TemplateOptions(BaseModel):
    """Options of the chat template."""

    model_config = ConfigDict(extra="forbid", strict=True)

    enable_thinking: bool | None = Field(None, description="Where the model's template knows the switch.")


def _one_of(*alternatives: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [{"properties": properties} for properties in alternatives]}


_NULL: dict[str, Any] = {"type": "null"}
_GUIDES = ("guided_choice", "choice", "structured_outputs")
_FREE = dict.fromkeys(_GUIDES, _NULL)
# The checks of `_consistent` as JSON Schema.
_CONSISTENT: dict[str, Any] = {
    "allOf": [
        _one_of({"top_logprobs": {"enum": [None, 0]}}, {"logprobs": {"const": True}}),
        _one_of({"stream_options": _NULL}, {"stream": {"const": True}}),
        _one_of(*({name: _NULL for name in _GUIDES if name != guide} for guide in _GUIDES)),
        _one_of(_FREE, {"min_tokens": {"enum": [None, 0]}, "ignore_eos": {"enum": [None, False]}}),
    ]
}
_CONSISTENT["allOf"][0]["anyOf"][1]["required"] = ["logprobs"]
_CONSISTENT["allOf"][1]["anyOf"][1]["required"] = ["stream"]


class ChatRequest(BaseModel):
    """OpenAI's request, and vLLM's additions. Fields that are None count as absent; what is not known is refused by name."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True, json_schema_extra=_CONSISTENT)

    model: str = Field(max_length=256)
    messages: Messages
    max_tokens: int | None = Field(None, ge=1, lt=_MAX_INT)
    max_completion_tokens: int | None = Field(None, ge=1, lt=_MAX_INT)
    min_tokens: int | None = Field(None, ge=0, lt=_MAX_INT, description="Before an end of turn or a stop string.")
    ignore_eos: bool | None = Field(None, description="Go on to max_tokens whatever is sampled.")
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=_MAX_INT)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    n: int | None = Field(None, ge=1, lt=_MAX_INT)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: ResponseFormat | None = None
    guided_choice: ChoiceTexts | None = Field(None, description="The answer is one of these texts.")
    choice: ChoiceTexts | None = Field(None, description="The same as guided_choice.")
    structured_outputs: Choices | None = Field(None, description="vLLM's form of guided_choice.")
    chat_template_kwargs: TemplateOptions | None = None
    # Not supported: these would change the answer.
    tools: _neutral([]) = None  # type: ignore[valid-type]
    tool_choice: _neutral("none") = None  # type: ignore[valid-type]
    functions: _neutral([]) = None  # type: ignore[valid-type]
    function_call: _neutral("none") = None  # type: ignore[valid-type]
    logit_bias: _neutral({}) = None  # type: ignore[valid-type]
    audio: _neutral() = None  # type: ignore[valid-type]
    prediction: _neutral() = None  # type: ignore[valid-type]
    web_search_options: _neutral() = None  # type: ignore[valid-type]
    modalities: _neutral(["text"]) = None  # type: ignore[valid-type]
    best_of: _neutral(1) = None  # type: ignore[valid-type]
    skip_special_tokens: _neutral(True) = None  # type: ignore[valid-type]
    spaces_between_special_tokens: _neutral(True) = None  # type: ignore[valid-type]
    include_stop_str_in_output: _neutral(False) = None  # type: ignore[valid-type]
    add_generation_prompt: _neutral(True) = None  # type: ignore[valid-type]
    continue_final_message: _neutral(False) = None  # type: ignore[valid-type]
    add_special_tokens: _neutral(False) = None  # type: ignore[valid-type]
    echo: _neutral(False) = None  # type: ignore[valid-type]
    # Accepted and ignored: these do not change the answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    parallel_tool_calls: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if sum(getattr(self, guide) is not None for guide in _GUIDES) > 1:
            raise ValueError("guided_choice, choice and structured_outputs mean the same: give one of them")
        if self.choices and (self.min_tokens or self.ignore_eos):
            raise ValueError("a guided choice ends where its text does: leave min_tokens and ignore_eos out")
        return self

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts that the answer is restricted to; empty when it is free."""
        structured = self.structured_outputs.choice if self.structured_outputs else ()
        return tuple(self.guided_choice or self.choice or structured)


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


FinishReason = Literal["stop", "length"]


class Choice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: FinishReason


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class _Out(BaseModel):
    id: str
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    system_fingerprint: str = Field(description="The policy version that sampled the answer.")


class ChatCompletion(_Out):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[Choice]
    usage: Usage


class ChunkChoice(BaseModel):
    index: int
    delta: dict[str, str] = Field(description="`role` first, then pieces of `content`, nothing at the end.")
    logprobs: ChoiceLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(_Out):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["rl_vlm"] = "rl_vlm"


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    error: ErrorDetail


class Health(BaseModel):
    status: Literal["ok", "draining", "unavailable"]
    models: list[str] = []
    in_flight: int
    detail: str = ""
