"""What comes in and goes out as JSON: OpenAI's chat completions, and the plain `/generate`."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from rl_vlm.types import MAX_TOP_LOGPROBS

_MAX_ITEMS = 100_000  # a bound for the parser; the server's own limits are lower
_MAX_INT = 2**31


class _In(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


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
# Tagged unions, so that an error speaks of the form that was sent.
_TextOrParts = Discriminator(lambda value: "text" if isinstance(value, str) else "parts")
Content = Annotated[Annotated[str, Tag("text")] | Annotated[Parts, Tag("parts")], _TextOrParts]


class ChatMessage(_In):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    tool_calls: list[Any] | None = Field(None, max_length=0, description="Not supported.")

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a {self.role} message needs content")
        return self


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
StopTexts = Annotated[list[StopText], Field(max_length=16)]
Stop = Annotated[Annotated[StopText, Tag("text")] | Annotated[StopTexts, Tag("parts")], _TextOrParts]


ChoiceTexts = Annotated[list[str], Field(min_length=1, max_length=1024)]


class Choices(_In):
    choice: ChoiceTexts


class ResponseFormat(_In):
    type: Literal["text"] = Field(description="Only text; guided choice restricts an answer to given texts.")


class ChatRequest(BaseModel):
    """OpenAI's request. Fields that are None count as absent; what is not known is refused by name."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    model: str = Field(max_length=256)
    messages: Messages
    max_tokens: int | None = Field(None, ge=1, lt=_MAX_INT)
    max_completion_tokens: int | None = Field(None, ge=1, lt=_MAX_INT)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=_MAX_INT)
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
    # Known to OpenAI's clients and without a meaning here: what would change the answer is refused, the rest ignored.
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    logit_bias: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    modalities: Any = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    parallel_tool_calls: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None

    @field_validator(
        "tools", "tool_choice", "functions", "function_call", "logit_bias", "frequency_penalty", "presence_penalty",
        "audio", "prediction", "web_search_options", "modalities",
    )  # fmt: skip
    @classmethod
    def _unsupported(cls, value: Any) -> None:
        if value not in (None, 0, [], {}, "none", ["text"]):
            raise ValueError("this is not supported here: leave it out")

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if sum(given is not None for given in (self.guided_choice, self.choice, self.structured_outputs)) > 1:
            raise ValueError("guided_choice, choice and structured_outputs mean the same: give one of them")
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
