"""Turns request bodies into requests for the engine; limits are checked before anything expensive is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import TemplateError

from rl_vlm.chat import EncodedSpan
from rl_vlm.config import HTTPSection
from rl_vlm.engines.choice_texts import choice_tokens
from rl_vlm.http.errors import RequestError
from rl_vlm.http.images import ImageReader
from rl_vlm.http.kv_room import KVRoom
from rl_vlm.http.pixel_room import PixelRoom
from rl_vlm.http.schema import ChatMessage, ChatRequest, GenerateRequest, ImagePart, TextPart
from rl_vlm.models.loading import TextSide
from rl_vlm.seeding import derive_seed
from rl_vlm.types import EncodedImage, GenerationRequest, Message, SamplingParams, UserInputError

# Below this a sample is the greedy one; engines refuse temperatures between it and 0.
_MIN_TEMPERATURE = 0.01
_GENERATE_TOP_P = 0.9
_LARGEST_IMAGES = 2  # are decoded at a time; more of smaller ones


@dataclass(frozen=True, slots=True)
class Prompt:
    """An encoded conversation; `num_tokens` counts every token of its images."""

    span: EncodedSpan
    num_tokens: int


class RequestReader:
    """Turns request bodies into `GenerationRequest`s. Runs on worker threads: decoding and tokenising take time.

    Args:
        text: tokenizer, chat template and image geometry of the model.
        limits: the server's.
        max_context: prompt and new tokens of one sample.
        kv_room: what bounds prompt and new tokens of all samples of a request; None: nothing.
    """

    def __init__(self, text: TextSide, limits: HTTPSection, max_context: int, kv_room: KVRoom | None = None) -> None:
        self._text = text
        self._limits = limits
        self._max_context = max_context
        self._kv_room = kv_room
        self._images = ImageReader(limits, text.images)
        self._pixels = PixelRoom(_LARGEST_IMAGES * limits.max_image_pixels)

    def chat(self, body: ChatRequest, name: str, version: int) -> tuple[GenerationRequest, int]:
        """The engine's request and the number of prompt tokens. Raises RequestError and UserInputError."""
        limits, count = self._limits, body.n or 1
        if count > limits.max_samples:
            raise RequestError(400, f"n is {count} and this server gives at most {limits.max_samples}.", param="n")
        wanted = body.max_completion_tokens or body.max_tokens
        if wanted is not None and wanted > limits.max_new_tokens:
            raise RequestError(
                400,
                f"max_tokens is {wanted} and this server gives at most {limits.max_new_tokens}.",
                param="max_tokens",
            )
        each = count * (1 + (body.top_logprobs or 0))  # values of the reply per token
        if wanted is not None and wanted * each > limits.max_reply_values:
            raise RequestError(
                400,
                f"n ({count}) x max_tokens ({wanted}) x (1 + top_logprobs) is more than {limits.max_reply_values}: ask for less.",
                param="max_tokens",
            )
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        thinking = body.chat_template_kwargs.enable_thinking if body.chat_template_kwargs else None
        prompt = self._encode(body.messages, sum(map(len, (*stop, *body.choices))), thinking)
        left = self._max_context - prompt.num_tokens
        if wanted is not None and wanted > left:
            raise self._too_long(f"The prompt has {prompt.num_tokens} tokens and max_tokens is {wanted}: together more")
        sampling = SamplingParams(
            max_new_tokens=wanted or self._most_tokens(prompt, count, each),
            temperature=_temperature(1.0 if body.temperature is None else body.temperature),
            top_p=body.top_p or 1.0,
            top_k=max(body.top_k or 0, 0),
            n=count,
            seeds=None if body.seed is None else tuple(derive_seed(body.seed, k) for k in range(count)),
            stop=stop,
            choices=body.choices,
            top_logprobs=body.top_logprobs or 0,
            min_p=body.min_p or 0.0,
            min_tokens=body.min_tokens or 0,
            ignore_eos=bool(body.ignore_eos),
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            frequency_penalty=body.frequency_penalty or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
        )
        choice_tokens(
            sampling, self._text.codec.encode_text, self._text.codec.decode
        )  # the engine would refuse it later
        return self._request(prompt, sampling, name, version), prompt.num_tokens

    def generate(self, body: GenerateRequest, name: str, version: int) -> tuple[GenerationRequest, int]:
        """The same for `/generate`, whose `max_tokens` is cut to what the context has left."""
        prompt = self._encode(body.messages)
        temperature = _temperature(body.temperature)
        sampling = SamplingParams(
            max_new_tokens=min(body.max_tokens, self._left(prompt, 1), self._limits.max_new_tokens),
            temperature=temperature,
            top_p=_GENERATE_TOP_P if temperature else 1.0,
        )
        return self._request(prompt, sampling, name, version), prompt.num_tokens

    def _most_tokens(self, prompt: Prompt, count: int, each: int) -> int:
        """New tokens of a sample where the client names none: the rest of the context, as far as the limits allow."""
        limits = self._limits
        return max(min(self._left(prompt, count), limits.max_new_tokens, limits.max_reply_values // each), 1)

    def _left(self, prompt: Prompt, count: int) -> int:
        """New tokens that each of `count` samples has room for: the rest of the context, as far as there is memory."""
        longest = self._max_context
        if self._kv_room is not None:
            longest = min(longest, self._kv_room.longest(count))
        return max(longest - prompt.num_tokens, 1)

    def _request(self, prompt: Prompt, sampling: SamplingParams, name: str, version: int) -> GenerationRequest:
        return GenerationRequest(name, prompt.span.token_ids, sampling, prompt.span.images, min_version=version)

    def _encode(self, messages: Sequence[ChatMessage], extra_chars: int = 0, thinking: bool | None = None) -> Prompt:
        parts = [part for message in messages for part in _parts(message)]
        if len(messages) + len(parts) > self._limits.max_parts:
            raise RequestError(
                400,
                f"The request has more than {self._limits.max_parts} messages and parts: send less.",
                param="messages",
            )
        chars = extra_chars + sum(len(part) for part in parts if isinstance(part, str))
        if chars > self._limits.max_text_chars:
            raise RequestError(
                400,
                f"The request has {chars} characters of text and this server takes {self._limits.max_text_chars}.",
                param="messages",
            )
        images = iter(self._decode([part.uri for part in parts if isinstance(part, _ImageUri)]))
        conversation = [
            Message(
                "system" if message.role == "developer" else message.role,
                tuple(next(images) if isinstance(part, _ImageUri) else part for part in _parts(message)),
            )
            for message in messages
        ]
        try:
            span = self._text.codec.encode_prompt(conversation, thinking)
        except TemplateError as error:
            raise UserInputError(f"The model's chat template refuses this conversation: {error}.") from error
        total = len(span.token_ids) - len(span.images) + self._num_image_tokens(span.images)
        if total >= self._max_context:
            raise self._too_long(f"The prompt has {total} tokens: no less")
        return Prompt(span, total)

    def _decode(self, uris: Sequence[str]) -> list[EncodedImage]:
        if len(uris) > self._limits.max_images:
            raise RequestError(
                400,
                f"The request has {len(uris)} images and this server takes {self._limits.max_images}.",
                param="messages",
            )
        names = [str(k + 1) for k in range(len(uris))]
        opened = [self._images.open(uri, name) for uri, name in zip(uris, names, strict=True)]
        # Headers tell how many tokens there will be: too many are refused before they cost memory.
        tokens = sum(self._images.num_tokens(image, name) for image, name in zip(opened, names, strict=True))
        if tokens >= self._max_context:
            raise self._too_long(f"The images alone take {tokens} tokens: no less")
        pixels = sum(image.width * image.height for image in opened)
        if pixels > self._limits.max_request_pixels:
            raise RequestError(
                400,
                f"The images have {pixels} pixels together and this server takes {self._limits.max_request_pixels}: shrink them.",
                param="messages",
            )
        decoded: list[EncodedImage] = []
        for name in names:
            image = opened.pop(0)  # it keeps its pixels when it is decoded
            with self._pixels.taken(image.width * image.height, self._limits.deadline_s):
                decoded.append(self._images.decode(image, name))
            del image
        return decoded

    def _num_image_tokens(self, images: Sequence[EncodedImage]) -> int:
        return sum(self._text.count_image_tokens(image.width, image.height) for image in images)

    def _too_long(self, what: str) -> RequestError:
        return RequestError(
            400,
            f"{what} than the context of {self._max_context} tokens. Send less, or raise serving.max_context.",
            code="context_length_exceeded",
            param="messages",
        )


def shows_images(body: ChatRequest | GenerateRequest) -> bool:
    """Whether any message has an image."""
    contents = [message.content for message in body.messages]
    return any(not isinstance(part, TextPart) for content in contents if isinstance(content, list) for part in content)


def num_values(sampling: SamplingParams) -> int:
    """The most log-probabilities that a reply with these may have."""
    return sampling.n * sampling.max_new_tokens * (1 + sampling.top_logprobs)


@dataclass(frozen=True, slots=True)
class _ImageUri:
    uri: str


def _parts(message: ChatMessage) -> list[str | _ImageUri]:
    if message.content is None or isinstance(message.content, str):
        return [message.content] if message.content else []
    return [
        part.text
        if isinstance(part, TextPart)
        else _ImageUri(part.image if isinstance(part, ImagePart) else part.image_url.url)
        for part in message.content
    ]


def _temperature(value: float) -> float:
    return value if value >= _MIN_TEMPERATURE else 0.0
