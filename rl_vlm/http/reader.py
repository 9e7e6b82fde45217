"""Turns request bodies into requests for the engine; limits are checked before anything expensive is done."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from jinja2 import TemplateError
from PIL import ExifTags, Image, ImageOps

from rl_vlm.chat import EncodedSpan
from rl_vlm.config import HTTPSection
from rl_vlm.engines.base import choice_tokens
from rl_vlm.envs.images import ImageError, open_image
from rl_vlm.http.gate import RequestError
from rl_vlm.http.schema import ChatMessage, ChatRequest, GenerateRequest, ImagePart, ImageURLPart, TextPart
from rl_vlm.models.images import ImageProcessorSpec, shrunk
from rl_vlm.models.loading import TextSide
from rl_vlm.numerics import derive_seed
from rl_vlm.types import EncodedImage, GenerationRequest, Message, SamplingParams, UserInputError, as_rgb

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # by the bytes: clients are often wrong about the media type
_ORIENTATION = ExifTags.Base.Orientation
_FILE = "rl_vlm.file"  # key of an opened image's info: the bytes that it was opened from


class ImageReader:
    """Reads the images of requests.

    Args:
        limits: the server's.
        spec: the model's image processor; tells how many tokens an image takes.
    """

    def __init__(self, limits: HTTPSection, spec: ImageProcessorSpec) -> None:
        self._limits = limits
        self._spec = spec

    def open(self, uri: str, name: str) -> Image.Image:
        """The image of a data URI; its header is within the limits, its pixels are not decoded. Raises UserInputError.

        `name` is the image's number in the request, for the message.
        """
        data = self._bytes(uri, name)
        with _explained(name, "is no PNG, JPEG, WebP or GIF image, or is damaged"):
            image = open_image(data, _FORMATS)
            image.info[_FILE] = data
        if image.width * image.height > self._limits.max_image_pixels:
            raise UserInputError(
                f"Image {name} ({image.width}x{image.height}) has too many pixels, more than "
                f"{self._limits.max_image_pixels}: shrink it."
            )
        self.num_tokens(image, name)
        return image

    def num_tokens(self, image: Image.Image, name: str) -> int:
        """How many tokens of the prompt the image will take.

        Raises UserInputError for one that the model cannot see.
        """
        return self._spec.num_image_tokens(self._spec.grid_thw(image.width, image.height, name))

    def decode(self, image: Image.Image, name: str) -> EncodedImage:
        """Decode an opened image: the first frame, upright as its EXIF says, RGB."""
        with _explained(name, "is damaged and cannot be decoded"):
            turned = ImageOps.exif_transpose(image)
            width, height = self._spec.resized(turned.width, turned.height, name)
            if width * height < turned.width * turned.height:
                # The model sees a photo smaller: as PNG in full size it would take ten times its file.
                return EncodedImage.from_pil(shrunk(self._spec, as_rgb(turned), name))
            return _as_sent(image) or EncodedImage.from_pil(turned)

    def _bytes(self, uri: str, name: str) -> bytes:
        """The file inside a data URI."""
        head, comma, encoded = uri.partition(",")
        if head[:5].lower() != "data:" or not comma:
            raise UserInputError(
                f"Image {name} must be a data URI (data:image/png;base64,...): this server fetches neither files nor "
                "addresses."
            )
        if "base64" not in (parameter.strip() for parameter in head.lower().split(";")[1:]):
            raise UserInputError(f"Image {name} must be a base64 data URI: data:image/png;base64,...")
        limit = self._limits.max_image_mib * 2**20
        if len(encoded) * 3 / 4 > limit + 3:
            raise UserInputError(
                f"Image {name} is larger than {self._limits.max_image_mib:g} MiB: send a smaller file."
            )
        try:
            return base64.b64decode("".join(encoded.split()), validate=True)
        except (binascii.Error, ValueError) as error:  # ValueError: characters beyond ASCII
            raise UserInputError(f"Image {name} is not valid base64: it may have been cut off.") from error


@contextmanager
def _explained(name: str, otherwise: str) -> Iterator[None]:
    """Turn what a decoder raises into UserInputError; damaged data raise almost anything."""
    try:
        yield
    except ImageError as error:
        raise UserInputError(f"Image {name} {error}.") from error
    except UserInputError:
        raise
    except Image.DecompressionBombError as error:
        raise UserInputError(f"Image {name} has too many pixels: shrink it.") from error
    except Exception as error:
        raise UserInputError(f"Image {name} {otherwise}: send another one.") from error


def _as_sent(image: Image.Image) -> EncodedImage | None:
    """The file itself if it is a plain RGB PNG: encoding it again would be the most expensive step."""
    plain = image.format == "PNG" and image.mode == "RGB" and getattr(image, "n_frames", 1) == 1
    if not plain or "transparency" in image.info or _ORIENTATION in image.getexif():
        return None
    data: bytes = image.info[_FILE]
    return EncodedImage(hashlib.sha256(data).hexdigest(), data, image.width, image.height)


# Below this a sample is the greedy one; engines refuse temperatures between it and 0.
_MIN_TEMPERATURE = 0.01
_GENERATE_TOP_P = 0.9


class RequestReader:
    """Turns request bodies into `GenerationRequest`s. Runs on worker threads: decoding and tokenising take time.

    Args:
        text: tokenizer, chat template and image geometry of the model.
        limits: the server's.
        max_context: prompt and new tokens of one sample.
    """

    def __init__(self, text: TextSide, limits: HTTPSection, max_context: int) -> None:
        self._text = text
        self._limits = limits
        self._max_context = max_context
        self._images = ImageReader(limits, text.images)

    def chat(self, body: ChatRequest, name: str, version: int) -> tuple[GenerationRequest, int]:
        """The engine's request and the number of prompt tokens. Raises RequestError and UserInputError."""
        limits, count = self._limits, body.n or 1
        if count > limits.max_samples:
            raise RequestError(400, f"n is {count} and this server gives at most {limits.max_samples}.", param="n")
        wanted = body.max_completion_tokens or body.max_tokens
        if wanted is not None and wanted > limits.max_new_tokens:
            message = f"max_tokens is {wanted} and this server gives at most {limits.max_new_tokens}."
            raise RequestError(400, message, param="max_tokens")
        most = limits.max_new_tokens
        if body.logprobs:
            most = min(most, limits.max_reply_values // (count * (1 + (body.top_logprobs or 0))))
        if (wanted or 1) > most:
            raise RequestError(
                400,
                f"n ({count}) x max_tokens ({wanted}) x (1 + top_logprobs) is more than {limits.max_reply_values}: "
                "ask for less.",
                param="max_tokens",
            )
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        thinking = body.chat_template_kwargs.enable_thinking if body.chat_template_kwargs else None
        span, prompt_tokens = self._encode(body.messages, sum(map(len, (*stop, *body.choices))), thinking)
        left = self._max_context - prompt_tokens
        if wanted is not None and wanted > left:
            raise self._too_long(f"The prompt has {prompt_tokens} tokens and max_tokens is {wanted}: together more")
        sampling = SamplingParams(
            max_new_tokens=wanted or min(left, most),
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
        # Here it is the client's error; the engine would fail later.
        choice_tokens(sampling, self._text.codec.encode_text, self._text.codec.decode)
        return _request(span, sampling, name, version), prompt_tokens

    def generate(self, body: GenerateRequest, name: str, version: int) -> tuple[GenerationRequest, int]:
        """The same for `/generate`, whose `max_tokens` is cut to what the context has left."""
        span, prompt_tokens = self._encode(body.messages)
        temperature = _temperature(body.temperature)
        sampling = SamplingParams(
            max_new_tokens=min(body.max_tokens, self._max_context - prompt_tokens, self._limits.max_new_tokens),
            temperature=temperature,
            top_p=_GENERATE_TOP_P if temperature else 1.0,
        )
        return _request(span, sampling, name, version), prompt_tokens

    def _encode(
        self, messages: Sequence[ChatMessage], extra_chars: int = 0, thinking: bool | None = None
    ) -> tuple[EncodedSpan, int]:
        """The conversation as tokens, and their number with every token of its images."""
        limits, contents = self._limits, [_parts(message) for message in messages]
        parts = [part for content in contents for part in content]
        if len(messages) + len(parts) > limits.max_parts:
            raise _too_much(f"The request has more than {limits.max_parts} messages and parts: send less.")
        chars = extra_chars + sum(len(part) for part in parts if isinstance(part, str))
        if chars > limits.max_text_chars:
            raise _too_much(
                f"The request has {chars} characters of text and this server takes {limits.max_text_chars}."
            )
        images = iter(self._decode([_uri(part) for part in parts if not isinstance(part, str)]))
        conversation = [
            Message(
                "system" if message.role == "developer" else message.role,
                tuple(part if isinstance(part, str) else next(images) for part in content),
            )
            for message, content in zip(messages, contents, strict=True)
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

    def _decode(self, uris: Sequence[str]) -> list[EncodedImage]:
        limits = self._limits
        if len(uris) > limits.max_images:
            raise _too_much(f"The request has {len(uris)} images and this server takes {limits.max_images}.")
        names = [str(k + 1) for k in range(len(uris))]
        opened = [self._images.open(uri, name) for uri, name in zip(uris, names, strict=True)]
        # Headers tell how many tokens and pixels there will be: too many are rejected before they cost memory.
        tokens = sum(self._images.num_tokens(image, name) for image, name in zip(opened, names, strict=True))
        if tokens >= self._max_context:
            raise self._too_long(f"The images alone take {tokens} tokens: no less")
        pixels = sum(image.width * image.height for image in opened)
        if pixels > limits.max_request_pixels:
            raise _too_much(
                f"The images have {pixels} pixels together and this server takes {limits.max_request_pixels}: shrink "
                "them."
            )
        decoded: list[EncodedImage] = []
        for name in names:
            image = opened.pop(0)
            decoded.append(self._images.decode(image, name))
            del image  # it keeps its pixels, which must be gone before the next one is decoded
        return decoded

    def _too_long(self, what: str) -> RequestError:
        return RequestError(
            400,
            f"{what} than the context of {self._max_context} tokens. Send less, or raise serving.max_context.",
            code="context_length_exceeded",
            param="messages",
        )


def _request(span: EncodedSpan, sampling: SamplingParams, name: str, version: int) -> GenerationRequest:
    return GenerationRequest(name, span.token_ids, sampling, span.images, min_version=version)


def _too_much(message: str) -> RequestError:
    return RequestError(400, message, param="messages")


def _parts(message: ChatMessage) -> list[str | ImagePart | ImageURLPart]:
    if message.content is None or isinstance(message.content, str):
        return [message.content] if message.content else []
    return [part.text if isinstance(part, TextPart) else part for part in message.content]


def _uri(part: ImagePart | ImageURLPart) -> str:
    return part.image if isinstance(part, ImagePart) else part.image_url.url


def _temperature(value: float) -> float:
    return value if value >= _MIN_TEMPERATURE else 0.0
