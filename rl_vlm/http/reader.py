"""Turns request bodies into requests for the engine; limits are checked before anything expensive is done."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from jinja2 import TemplateError
from PIL import Image

from rl_vlm.chat import EncodedSpan
from rl_vlm.config import HTTPSection
from rl_vlm.engines.grammars import Grammars
from rl_vlm.envs.images import ImageError, check_header, decoded, image_bytes
from rl_vlm.http.gate import RequestError
from rl_vlm.http.schema import ChatMessage, ChatRequest, GenerateRequest, TextPart
from rl_vlm.models.images import ImageLayout, ImageProcessorSpec, TextSide, shrunk
from rl_vlm.numerics import derive_seed
from rl_vlm.types import EncodedImage, GenerationRequest, Message, SamplingParams, UserInputError, as_rgb

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # by the bytes: clients are often wrong about the media type
# Below this a sample is the greedy one; engines refuse temperatures between it and 0.
_MIN_TEMPERATURE = 0.01
_GENERATE_TOP_P = 0.9
_AS_SENT = (
    "top_p", "n", "top_logprobs", "min_p", "min_tokens", "ignore_eos", "repetition_penalty", "frequency_penalty",
    "presence_penalty",
)  # fmt: skip

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_LARGE = 1 << 20  # bytes


def return_freed_memory() -> None:
    """Let blocks of a MiB and more be mapped, so that `free` returns them; needs glibc. In the decoding threads' heaps
    pixels lie between small blocks that stay: 4.6 GiB remain after 128 images of 8 megapixels on four threads."""
    try:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)
    except (AttributeError, OSError):  # another C library
        return


class RequestReader:
    """Turns request bodies into `GenerationRequest`s, on worker threads: decoding and tokenising take time.
    `max_context` bounds prompt and new tokens of one sample."""

    def __init__(self, text: TextSide, limits: HTTPSection, max_context: int) -> None:
        self._text, self._limits, self._max_context = text, limits, max_context
        self._grammars = Grammars(text)

    def chat(self, body: ChatRequest, name: str, version: int) -> tuple[GenerationRequest, int]:
        """The engine's request and the number of prompt tokens. Raises RequestError and UserInputError."""
        limits, count = self._limits, body.n
        wanted = body.max_completion_tokens or body.max_tokens
        for param, given, bound in (("n", count, limits.max_samples), ("max_tokens", wanted, limits.max_new_tokens)):
            if given is not None and given > bound:
                message = f"{param} is {given} and this server gives at most {bound}."
                raise RequestError(400, message, param=param)
        most = limits.max_new_tokens
        if body.logprobs:
            most = min(most, limits.max_reply_values // (count * (1 + body.top_logprobs)))
        if (wanted or 1) > most:
            raise RequestError(
                400,
                f"n ({count}) x max_tokens ({wanted}) x (1 + top_logprobs) is more than {limits.max_reply_values}: "
                "ask for less.",
                param="max_tokens",
            )
        chars = sum(map(len, (*body.stop, *body.choices)))
        span, prompt_tokens = self._encode(body.messages, chars, body.chat_template_kwargs.enable_thinking)
        left = self._max_context - prompt_tokens
        if wanted is not None and wanted > left:
            raise self._too_long(f"The prompt has {prompt_tokens} tokens and max_tokens is {wanted}: together more")
        sampling = SamplingParams(
            max_new_tokens=wanted or min(left, most),
            temperature=_temperature(body.temperature),
            top_k=max(body.top_k, 0),
            seeds=None if body.seed is None else tuple(derive_seed(body.seed, k) for k in range(count)),
            stop=tuple(body.stop),
            choices=body.choices,
            grammar=body.grammar,
            **{name: getattr(body, name) for name in _AS_SENT},
        )
        # Here it is the client's error; the engine would fail later.
        self._grammars.matcher(sampling)
        return GenerationRequest(name, span.token_ids, sampling, span.images, min_version=version), prompt_tokens

    def generate(self, body: GenerateRequest, name: str, version: int) -> tuple[GenerationRequest, int]:
        """The same for `/generate`, whose `max_tokens` is cut to what the context has left."""
        span, prompt_tokens = self._encode(body.messages)
        temperature = _temperature(body.temperature)
        sampling = SamplingParams(
            max_new_tokens=min(body.max_tokens, self._max_context - prompt_tokens, self._limits.max_new_tokens),
            temperature=temperature,
            top_p=_GENERATE_TOP_P if temperature else 1.0,
        )
        return GenerationRequest(name, span.token_ids, sampling, span.images, min_version=version), prompt_tokens

    def _encode(
        self, messages: Sequence[ChatMessage], extra_chars: int = 0, thinking: bool | None = None
    ) -> tuple[EncodedSpan, int]:
        """The conversation as tokens, and their number with every token of its images."""
        limits = self._limits
        parts = [part for message in messages for part in message.content or ()]
        if len(messages) + len(parts) > limits.max_parts:
            raise _too_much(f"The request has more than {limits.max_parts} messages and parts: send less.")
        chars = extra_chars + sum(len(part.text) for part in parts if isinstance(part, TextPart))
        if chars > limits.max_text_chars:
            raise _too_much(
                f"The request has {chars} characters of text and this server takes {limits.max_text_chars}."
            )
        images = iter(self.images([part.uri for part in parts if not isinstance(part, TextPart)]))
        conversation = [
            Message(
                "system" if message.role == "developer" else message.role,
                tuple(part.text if isinstance(part, TextPart) else next(images) for part in message.content or ()),
            )
            for message in messages
        ]
        try:
            span = self._text.codec.encode_prompt(conversation, thinking)
        except TemplateError as error:
            raise UserInputError(f"The model's chat template refuses this conversation: {error}.") from error
        image_tokens = sum(self._text.images.count_tokens(image.width, image.height) for image in span.images)
        total = len(span.token_ids) - len(span.images) + image_tokens
        if total >= self._max_context:
            raise self._too_long(f"The prompt has {total} tokens: no less")
        return span, total

    def images(self, uris: Sequence[str]) -> list[EncodedImage]:
        """The images of data URIs. Their headers are checked before one is decoded. Raises RequestError and
        UserInputError."""
        limits, spec = self._limits, self._text.images
        if len(uris) > limits.max_images:
            raise _too_much(f"The request's images are {len(uris)}, and this server takes {limits.max_images}.")
        files: list[bytes] = []
        pixels = tokens = 0
        for number, uri in enumerate(uris, 1):
            with _naming(number):
                files.append(image_file(uri, limits))
                width, height = check_header(files[-1], limits.max_image_pixels, _FORMATS)
            pixels += width * height
            tokens += spec.count_tokens(width, height, str(number))
        if tokens >= self._max_context:
            raise self._too_long(f"The images alone take {tokens} tokens: no less")
        if pixels > limits.max_request_pixels:
            raise _too_much(
                f"The images have {pixels} pixels together and this server takes {limits.max_request_pixels}: shrink "
                "them."
            )
        images: list[EncodedImage] = []
        for number, file in enumerate(files, 1):
            with _naming(number):
                images.append(seen_image(file, spec, limits))
        return images

    def _too_long(self, what: str) -> RequestError:
        return RequestError(
            400,
            f"{what} than the context of {self._max_context} tokens. Send less, or raise serving.max_context.",
            code="context_length_exceeded",
            param="messages",
        )


def image_file(uri: str, limits: HTTPSection) -> bytes:
    """The file inside a data URI. Raises ImageError."""
    if uri[:5].lower() != "data:":
        raise ImageError(
            "must be a data URI (data:image/png;base64,...): this server fetches neither files nor addresses"
        )
    if len(uri) * 3 / 4 > limits.max_image_mib * 2**20 + 100:
        raise ImageError(f"is larger than {limits.max_image_mib:g} MiB: send a smaller file")
    return image_bytes(uri, None)


def seen_image(file: bytes, spec: ImageLayout, limits: HTTPSection) -> EncodedImage:
    """The first frame of an image file, upright as its EXIF says, RGB. Raises ImageError.

    A photo becomes as small as the model sees it: as PNG in full size it would take ten times its file. A PNG that is
    RGB already stays as it is: encoding it again would be the most expensive step.
    """

    def encode(image: Image.Image) -> EncodedImage:
        image.load()
        rgb = as_rgb(image)
        rgb = shrunk(spec, rgb) if isinstance(spec, ImageProcessorSpec) else rgb
        if rgb is image and image.format == "PNG" and getattr(image, "n_frames", 1) == 1:
            return EncodedImage(hashlib.sha256(file).hexdigest(), file, image.width, image.height)
        return EncodedImage.from_pil(rgb)

    return decoded(file, encode, limits.max_image_pixels, _FORMATS)


@contextmanager
def _naming(number: int) -> Iterator[None]:
    try:
        yield
    except ImageError as error:
        raise UserInputError(f"Image {number} {error}.") from error


def _too_much(message: str) -> RequestError:
    return RequestError(400, message, param="messages")


def _temperature(value: float) -> float:
    return value if value >= _MIN_TEMPERATURE else 0.0
