"""JSON schemas of requests: OpenAI's chat completions with vLLM's additions, and the plain `/generate`.

Replies to chats are `openai.types.chat.ChatCompletion` and `ChatCompletionChunk`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from openai.types import Model
from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from rl_vlm.types import MAX_REPETITION_PENALTY, MAX_TOP_LOGPROBS, MIN_REPETITION_PENALTY

_MAX_ITEMS = 100_000  # a bound for the parser; the server's own limits are lower
_MAX_INT = 2**31


class _In(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class TextPart(_In):
    type: Literal["text"]
    text: str


DataURI = Annotated[str, Field(description="A data URI, such as data:image/png;base64,...")]


class ImagePart(_In):
    type: Literal["image"]
    image: DataURI


class ImageURL(_In):
    url: DataURI


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


class PromptMessage(_Message):
    role: Literal["system", "developer", "user", "tool"]
    content: Content


class AssistantTurn(_Message):
    role: Literal["assistant"]
    content: Content | None = None


ChatMessage = Annotated[PromptMessage | AssistantTurn, Field(discriminator="role")]
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


_Nothing = Annotated[list[Any], Field(max_length=0)] | None
_Empty = Annotated[dict[str, Any], Field(max_length=0)] | None


class Choices(_In):
    choice: ChoiceTexts
    # Beside a choice these are errors: one of the two would be ignored.
    json_schema: None = Field(None, alias="json")
    regex: None = None
    grammar: None = None
    json_object: Literal[False] | None = None
    structural_tag: None = None


class ResponseFormat(_In):
    type: Literal["text"] = Field(description="Only text; guided choice restricts an answer to given texts.")


class TemplateOptions(BaseModel):
    """Options of the chat template."""

    model_config = ConfigDict(extra="forbid", strict=True)

    enable_thinking: bool | None = Field(None, description="Where the model's template knows the switch.")


_GUIDES = ("guided_choice", "choice", "structured_outputs")


class ChatRequest(BaseModel):
    """OpenAI's request, and vLLM's additions.

    A field that is None counts as absent. An unknown field is an error that names it.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

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
    # Not supported: each accepts only values that change nothing.
    tools: _Nothing = None
    tool_choice: Literal["none"] | None = None
    functions: _Nothing = None
    function_call: Literal["none"] | None = None
    logit_bias: _Empty = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    modalities: list[Literal["text"]] | None = None
    best_of: Literal[1] | None = None
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    echo: Literal[False] | None = None
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


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


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
