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


class Choices(_In):
    # Other forms are errors, beside a choice too: one of the two would be ignored. They come first, to be named first.
    json_schema: None = Field(None, alias="json")
    regex: None = None
    grammar: None = None
    json_object: Literal[False] | None = None
    structural_tag: None = None
    choice: ChoiceTexts


class ResponseFormat(_In):
    type: Literal["text"] = Field(description="Only text; guided choice restricts an answer to given texts.")


class TemplateOptions(BaseModel):
    """Options of the chat template."""

    model_config = ConfigDict(extra="forbid", strict=True)

    enable_thinking: bool | None = Field(None, description="Where the model's template knows the switch.")


# Fields of OpenAI and of vLLM that are not supported, each with the value that changes nothing.
_USUAL: dict[str, Any] = {
    "tools": [], "tool_choice": "none", "functions": [], "function_call": "none", "logit_bias": {},
    "modalities": ["text"], "best_of": 1, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False, "add_generation_prompt": True, "continue_final_message": False,
    "add_special_tokens": False, "echo": False, "length_penalty": 1.0, "use_beam_search": False,
    "include_reasoning": True, "stop_token_ids": [], "bad_words": [], "priority": 0, "mm_payload": "tensors",
    "routed_experts_prompt_start": 0, "return_token_offsets": False, "return_token_ids": False,
    "return_tokens_as_token_ids": False, "return_prompt_text": False, "return_mm_kwargs": False,
}  # fmt: skip
# Fields that do not change the answer, whatever they hold.
_IGNORED = {
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key",
    "reasoning_effort", "verbosity", "request_id", "session_id", "cache_salt",
}  # fmt: skip


def _changes_nothing(name: str, value: Any) -> bool:
    return value is None or name in _IGNORED or (name in _USUAL and value == _USUAL[name])


def _describe(schema: dict[str, Any]) -> None:
    """The fields without a meaning here, for the published schema."""
    usual = {name: {"enum": [value, None], "description": "Not supported."} for name, value in _USUAL.items()}
    ignored = {name: {"description": "Ignored."} for name in sorted(_IGNORED)}
    schema["properties"] |= usual | ignored


_GUIDES = ("guided_choice", "choice", "structured_outputs")


class ChatRequest(BaseModel):
    """OpenAI's request, and vLLM's additions.

    A field that is None counts as absent. A field that is unknown, or not supported, is an error that names it.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True, json_schema_extra=_describe)

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

    @model_validator(mode="before")
    @classmethod
    def _without_what_changes_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {name: value for name, value in data.items() if not _changes_nothing(name, value)}
        # JSON has one kind of number, and some clients write 6.0 for 6.
        return {name: int(v) if isinstance(v, float) and v.is_integer() else v for name, v in kept.items()}

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
