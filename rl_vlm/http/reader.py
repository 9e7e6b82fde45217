"""Turns request bodies into requests for the engine; limits are checked before anything expensive is done."""

from __future__ import annotations

import ctypes
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
from jinja2 import TemplateError
from PIL import Image

from rl_vlm.chat import EncodedSpan, Ending, leaves_thought_open
from rl_vlm.config import HTTPSection
from rl_vlm.engines.grammars import MAX_CALLS, as_lark, call_lark
from rl_vlm.envs.images import BadImageError, check_header, decoded, image_bytes
from rl_vlm.http.gate import RequestError
from rl_vlm.http.replies import Asked
from rl_vlm.http.schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    SampledRequest,
    TemplateOptions,
    TextPart,
    TokenizeRequest,
    Tool,
)
from rl_vlm.models.images import ImageLayout, TextSide
from rl_vlm.safe_text import one_line
from rl_vlm.seeding import derive_seed
from rl_vlm.types import EncodedImage, GenerationRequest, Grammar, Message, SamplingParams, UserInputError, as_rgb

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # by the bytes: clients are often wrong about the media type
# Below this a sample is the greedy one; engines reject temperatures between it and 0.
_MIN_TEMPERATURE = 0.01
_GENERATE_TOP_P = 0.9
_AS_SENT = (
    "top_p", "n", "min_p", "min_tokens", "ignore_eos", "repetition_penalty", "frequency_penalty",
    "presence_penalty",
)  # fmt: skip

_FETCH_S = 10.0

# The system message for a model whose template knows no tools, in the form that most models were trained on.
_TOOLS_MESSAGE = """# Tools

You may call these functions:
<tools>
{tools}
</tools>

For each call, write a JSON object with the function's name and its arguments:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

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

    def __init__(self, text: TextSide, limits: HTTPSection, max_context: int, strict_tools: bool = True) -> None:
        self._text, self._limits, self._max_context = text, limits, max_context
        self._strict_tools = strict_tools  # whether calls that no `tool_choice` requires follow their tools' schemas

    def chat(self, body: ChatRequest, name: str, version: int) -> list[Asked]:
        """What the engine is asked. Raises RequestError and UserInputError."""
        most = self._most_new_tokens(body, 1)
        chars = sum(map(len, (*body.stop, *body.choices, *body.bad_words)))
        ending, codec = _ending(body), self._text.codec
        span, ids = self._encode(body.messages, chars, body.chat_template_kwargs, body.tools, ending)
        thinks = codec.uses("<think>")
        opened = thinks and ending == "prompt" and codec.prompt_opens_thought(body.chat_template_kwargs.enable_thinking)
        if thinks and ending == "open":
            opened = leaves_thought_open("".join(getattr(part, "text", "") for part in body.messages[-1].content or ()))
        sampling = self._sampling(
            body,
            most,
            ids,
            grammar=self._grammar(body),
            opened_thought=opened,
            max_thought_tokens=body.thinking_token_budget if opened else None,
        )
        request = GenerationRequest(name, span.token_ids, sampling, span.images, min_version=version)
        tools = {tool.function.name: tool.function.parameters or {} for tool in body.tools}
        read = body.tools and body.tool_choice != "none"
        forced = None if not read or body.tool_choice == "auto" else body.named_tool
        return [Asked(request, ids, thinks, tools if read else None, forced, body.parallel_tool_calls)]

    def _grammar(self, body: ChatRequest) -> Grammar | None:
        """The form of an answer. Where tools may be called, it is that or calls: agents have a form for their last one.
        Calls fit the schemas of their tools if one of these is strict. For Hermes' form of calls alone, Qwen's too."""
        grammar, codec = body.grammar, self._text.codec
        strict = self._strict_tools and any(tool.function.strict for tool in body.tools)
        if not body.tools or body.tool_choice != "auto" or body.choices or not (strict or grammar):
            return grammar
        marks = [codec.token_id(mark) for mark in ("<tool_call>", "</tool_call>")]
        other = codec.uses("tools") and (codec.uses("<function=") or not codec.uses("<tool_call>"))
        if other or None in marks or (grammar and grammar.kind != "json_schema"):
            return grammar
        free, functions = {"type": "object"}, [tool.function for tool in body.tools]
        schemas = {one.name: free if one.parameters and not strict else one.arguments_schema for one in functions}
        form = as_lark(grammar, codec.token_id) if grammar else ""
        start = f"form | call{{1,{MAX_CALLS}}}\nform: {form}" if form else "(/(?s:.+)/ | call)*"
        inside = f"/\\s?/ ({call_lark(schemas, 'arguments')}) /\\s?/"
        return Grammar("grammar", f"start: {start}\ncall: <[{marks[0]}]> {inside} <[{marks[1]}]> /\\s?/")

    def completions(self, body: CompletionRequest, name: str, version: int) -> list[Asked]:
        """The same for prompts that are encoded, or as their client wrote them."""
        codec, prompts = self._text.codec, body.prompts
        if (body.images and len(prompts) > 1) or (body.stream and body.echo and body.top is not None):
            raise RequestError(
                400, "Images go with a single prompt, and a prompt's log-probabilities are not streamed."
            )
        most = self._most_new_tokens(body, len(prompts))
        chars = sum(map(len, (*body.stop, *body.choices, *body.bad_words, *prompts)))
        if chars > self._limits.max_text_chars:
            raise _too_much(f"The request has {chars} characters and this server takes {self._limits.max_text_chars}.")
        images = tuple(self.images(body.images))
        asked = []
        for number, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                ids = codec.encode_raw(prompt, body.add_special_tokens)
            else:
                ids = np.array(prompt, dtype=np.int32)
                if ids.max() >= codec.num_known_tokens:
                    raise RequestError(400, f"The prompt holds {ids.max()}, which is no token's id.", param="prompt")
            if len(images) < (ids == codec.image_token_id).sum():  # as an earlier reply gave them
                ids = self._text.collapse(ids, images)
            expanded = self._text.expand(ids, images, name)
            self._check_length(len(expanded), "prompt")
            if not len(ids):
                raise RequestError(400, "The prompt is empty.", param="prompt")
            sampling = self._sampling(body, most, expanded, grammar=body.grammar)
            request = GenerationRequest(f"{name}-{number}", ids, sampling, images, min_version=version)
            asked.append(Asked(request, expanded, scores_only=body.max_tokens == 0))
        return asked

    def generate(self, body: GenerateRequest, name: str, version: int) -> list[Asked]:
        """The same for `/generate`, whose `max_tokens` is cut to what the context has left."""
        span, ids = self._encode(body.messages)
        temperature = _temperature(body.temperature)
        sampling = SamplingParams(
            max_new_tokens=min(body.max_tokens, self._max_context - len(ids), self._limits.max_new_tokens),
            temperature=temperature,
            top_p=_GENERATE_TOP_P if temperature else 1.0,
        )
        return [Asked(GenerationRequest(name, span.token_ids, sampling, span.images, min_version=version), ids)]

    def tokens(self, body: TokenizeRequest) -> np.ndarray:
        """A prompt's tokens int32 [T], with all those of its images."""
        if body.messages is None:
            return self._text.codec.encode_raw(body.prompt or "", body.add_special_tokens)
        return self._encode(body.messages, 0, body.chat_template_kwargs, body.tools, _ending(body))[1]

    def _most_new_tokens(self, body: SampledRequest, prompts: int) -> int:
        """How many new tokens a sample may have. Raises RequestError where the request asks for more log-probabilities
        than a reply may hold. max_tokens is an upper bound, and clients' own defaults are high: it is cut."""
        limits, count, wanted = self._limits, body.n * prompts, body.max_new_tokens
        if count > limits.max_samples:
            message = f"n is {count} and this server gives at most {limits.max_samples}."
            raise RequestError(400, message, param="n")
        most = limits.max_new_tokens
        if body.top is not None:
            most = min(most, limits.max_reply_values // (count * (1 + body.top)))
        if min(wanted or 1, limits.max_new_tokens) > most:
            raise RequestError(
                400,
                f"n ({count}) x max_tokens ({wanted}) x (1 + top_logprobs) is more than {limits.max_reply_values}: "
                "ask for less.",
                param="max_tokens",
            )
        return most

    def _sampling(self, body: SampledRequest, most: int, prompt_ids: np.ndarray, **more: object) -> SamplingParams:
        """What is asked of each prompt, int32 [P] with all tokens of its images. Raises RequestError and
        UserInputError."""
        wanted, left = body.max_new_tokens, self._max_context - len(prompt_ids)
        wanted = None if wanted is None else min(wanted, self._limits.max_new_tokens)
        if wanted is not None and wanted > left:
            raise self._too_long(
                f"The prompt has {len(prompt_ids)} tokens and max_tokens is {wanted}: together more", "max_tokens"
            )
        scores = body.scores
        if scores is not None and len(prompt_ids) * (1 + scores) > self._limits.max_reply_values:
            raise RequestError(400, f"The prompt's log-probabilities are more than {self._limits.max_reply_values}.")
        bias = {int(token): value for token, value in body.logit_bias.items()}
        if bias and max(bias) >= self._text.codec.num_known_tokens:
            raise RequestError(400, f"{max(bias)} is no token's id.", param="logit_bias")
        return SamplingParams(
            max_new_tokens=max(wanted if wanted is not None else min(left, most), 1),
            temperature=_temperature(body.temperature),
            top_k=max(body.top_k, 0),
            seeds=None if body.seed is None else tuple(derive_seed(body.seed, k) for k in range(body.n)),
            stop=tuple(body.stop),
            choices=body.choices,
            top_logprobs=body.top or 0,
            prompt_logprobs=scores,
            logit_bias=tuple(bias.items()),
            bad_words=tuple(body.bad_words),
            **{name: getattr(body, name) for name in _AS_SENT},
            **more,  # type: ignore[arg-type]
        )

    def _encode(
        self,
        messages: Sequence[ChatMessage],
        extra_chars: int = 0,
        template: TemplateOptions | None = None,
        tools: Sequence[Tool] = (),
        ending: Ending = "prompt",
    ) -> tuple[EncodedSpan, np.ndarray]:
        """The conversation as tokens, and with every token of its images, int32 [P]."""
        limits, codec = self._limits, self._text.codec
        parts = [part for message in messages for part in message.content or ()]
        if len(messages) + len(parts) > limits.max_parts:
            raise _too_much(f"The request has more than {limits.max_parts} messages and parts: send less.")
        beside = [message.fields for message in messages]
        shown = [tool.shown for tool in tools]
        chars = extra_chars + sum(len(part.text) for part in parts if isinstance(part, TextPart))
        chars += len(json.dumps([beside, shown])) if shown or any(beside) else 0
        if chars > limits.max_text_chars:
            raise _too_much(
                f"The request has {chars} characters of text and this server takes {limits.max_text_chars}."
            )
        images = iter(self.images([part.uri for part in parts if not isinstance(part, TextPart)]))
        conversation = []
        for message, fields in zip(messages, beside, strict=True):
            content = [part.text if isinstance(part, TextPart) else next(images) for part in message.content or ()]
            if message.tool_calls and not codec.uses("tool_calls"):  # they are part of what it said
                content += [call.function.text for call in message.tool_calls]
            role = "system" if message.role == "developer" else message.role
            conversation.append(Message(role, tuple(content), fields))
        if shown and not codec.uses("tools"):
            system = _TOOLS_MESSAGE.format(tools="\n".join(map(json.dumps, shown)))
            if conversation[0].role == "system":
                system = f"{conversation.pop(0).text}\n\n{system}"
            conversation.insert(0, Message.of("system", system))
        encode = partial(
            codec.encode_prompt, thinking=template.enable_thinking if template else None, tools=shown, ending=ending
        )
        try:
            try:
                span = encode(conversation)
            except (TemplateError, UserInputError):
                rules = [message for message in conversation if message.role == "system"]
                if not rules or rules == conversation[:1] or any(message.images for message in rules):
                    raise
                span = encode(_system_first(conversation))
        except TemplateError as error:
            raise UserInputError(f"The model's chat template rejects this conversation: {error}.") from error
        ids = self._text.expand(span.token_ids, span.images)
        self._check_length(len(ids), "messages")
        return span, ids

    def _check_length(self, tokens: int, param: str) -> None:
        if tokens >= self._max_context:
            raise self._too_long(f"The prompt has {tokens} tokens: no less", param)

    def images(self, uris: Sequence[str]) -> list[EncodedImage]:
        """The images of data URIs. Their headers are checked before one is decoded. Raises RequestError and
        UserInputError."""
        limits, spec = self._limits, self._text.images
        if len(uris) > limits.max_images:
            raise _too_much(f"The request's images are {len(uris)}, and this server takes {limits.max_images}.")
        files: list[bytes] = []
        pixels = tokens = 0
        deadline = time.monotonic() + _FETCH_S  # of all that must be fetched
        for number, uri in enumerate(uris, 1):
            with _naming(number):
                files.append(image_file(uri, limits, deadline - time.monotonic()))
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

    def _too_long(self, what: str, param: str = "messages") -> RequestError:
        return RequestError(
            400,
            f"{what} than the context of {self._max_context} tokens. Send less, or raise serving.max_context.",
            code="context_length_exceeded",
            param=param,
        )


def _system_first(conversation: Sequence[Message]) -> list[Message]:
    """For templates that have a place for one system message: all of them in one. Agents add some on their way."""
    system = "\n\n".join(message.text for message in conversation if message.role == "system")
    return [Message.of("system", system), *(message for message in conversation if message.role != "system")]


def image_file(uri: str, limits: HTTPSection, seconds: float = _FETCH_S) -> bytes:
    """The file inside a data URI, or at an address of a host that is allowed. Raises BadImageError."""
    if limits.image_hosts and uri[:8].lower().startswith(("https://", "http://")):
        return _fetched(uri, limits, seconds)
    if uri[:5].lower() != "data:":
        raise BadImageError(
            "must be a data URI (data:image/png;base64,...): this server fetches neither files nor addresses"
        )
    if len(uri) * 3 / 4 > limits.max_image_mib * 2**20 + 100:
        raise BadImageError(f"is larger than {limits.max_image_mib:g} MiB: send a smaller file")
    return image_bytes(uri, None)


def _fetched(address: str, limits: HTTPSection, seconds: float) -> bytes:
    """The file at an address, without redirects, which could lead to any host."""
    import httpx

    most, deadline, file = limits.max_image_mib * 2**20, time.monotonic() + seconds, bytearray()
    try:
        if (host := httpx.URL(address).host) not in limits.image_hosts:
            raise BadImageError(
                f"is at {host[:80]!r}: this server fetches images of {', '.join(limits.image_hosts)} only"
            )
        with httpx.stream("GET", address, timeout=max(seconds, 0.1)) as reply:
            reply.raise_for_status()
            for piece in reply.iter_raw():
                file += piece
                if len(file) > most or time.monotonic() > deadline:
                    raise BadImageError(
                        f"is larger than {limits.max_image_mib:g} MiB, or takes more than {_FETCH_S:g} s"
                    )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BadImageError(f"cannot be fetched ({one_line(error)}): send it as a data URI") from error
    return bytes(file)


def seen_image(file: bytes, spec: ImageLayout, limits: HTTPSection) -> EncodedImage:
    """The first frame of an image file, upright as its EXIF says, RGB. Raises BadImageError.

    A photo becomes as small as the model sees it: as PNG in full size it would take ten times its file. A PNG that is
    RGB already stays as it is: encoding it again would be the most expensive step.
    """

    def encode(image: Image.Image) -> EncodedImage:
        image.load()
        rgb = spec.shrunk(as_rgb(image))
        if rgb is image and image.format == "PNG" and getattr(image, "n_frames", 1) == 1:
            return EncodedImage(hashlib.sha256(file).hexdigest(), file, image.width, image.height)
        return EncodedImage.from_pil(rgb)

    return decoded(file, encode, limits.max_image_pixels, _FORMATS)


@contextmanager
def _naming(number: int) -> Iterator[None]:
    try:
        yield
    except BadImageError as error:
        raise UserInputError(f"Image {number} {error}.") from error


def _too_much(message: str) -> RequestError:
    return RequestError(400, message, param="messages")


def _ending(body: ChatRequest | TokenizeRequest) -> Ending:
    return "open" if body.continue_final_message else "prompt" if body.add_generation_prompt else "nothing"


def _temperature(value: float) -> float:
    return value if value >= _MIN_TEMPERATURE else 0.0
