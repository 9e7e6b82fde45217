"""Conversations to token ids and back, turn by turn.

The chat template is rendered once per *shape* of a conversation, with markers where texts go; the pieces between
the template's own special tokens are then tokenised as plain text. So every span that the policy did not sample
equals the template's own rendering, token for token, and a special string inside user or environment text stays
text: no text can forge a turn or an image. What the policy sampled is never tokenised again.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from tokenizers import Tokenizer

from rl_vlm.types import EncodedImage, Message, UserInputError, images_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Private-use characters mark where texts go in a rendered template; templates do not contain them.
_MARK = re.compile("\ue000(\\d+)\ue001")
_ASSISTANT_MARK = "\ue002"
# Calls of tools are made of these (see envs/tools.py), some of which are special tokens in their family.
_CALL_MARKS = {
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call>", "<tool_call|>", '<|"|>', "<|python_tag|>",
    "<start_function_call>", "<end_function_call>", "<escape>",
}  # fmt: skip
_REMEMBERED_CHARACTERS = 2000  # ids of texts up to this length are cached

Shape = tuple[tuple[str, str], ...]  # per message: role, and its parts as "t" (text) or "i" (image)
# What follows a conversation: the model's turn begins, or nothing does, or the last message goes on.
Ending = Literal["prompt", "nothing", "open"]


@dataclass(frozen=True, slots=True)
class EncodedSpan:
    """Token ids int32 [T] with one placeholder per image, and those images in order."""

    token_ids: np.ndarray
    images: tuple[EncodedImage, ...]


class ChatCodec:
    """Encodes conversations for one model with its fast tokenizer, its Jinja chat template and the placeholder string
    of an image, such as `<|image_pad|>`. around: plain text that the model's processor puts before and after it.

    The end of a turn is the special token that the template writes after one.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str, image_token: str, around: tuple[str, str] = ("", "")
    ) -> None:
        self._tokenizer, self._template, self._around = tokenizer, template, around
        # A private copy that never parses special tokens out of text.
        self._plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]
        self._plain.encode_special_tokens = True
        added = tokenizer.added_tokens_decoder
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        self._special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        if image_token not in self._special_ids:
            raise UserInputError(f"The tokenizer lacks {image_token}: the model folder's files do not fit each other.")
        self.image_token_id = self._special_ids[image_token]
        self.pad_token_id = int(tokenizer.pad_token_id or 0)
        by_length = sorted(self._special_ids, key=len, reverse=True)
        self._special_pattern = re.compile("(" + "|".join(re.escape(token) for token in by_length) + ")")
        in_json = [re.escape(json.dumps(token, ensure_ascii=False)[1:-1]) for token in by_length]
        self._guarded = re.compile("|".join([*in_json, f"[\ue000\ue001{_ASSISTANT_MARK}]"]))
        self._render = lru_cache(maxsize=512)(self._render_uncached)
        # A broken template fails here, where the model is loaded.
        _, _, rest = self._render((("user", "t"), ("assistant", "a"), ("user", "t"))).partition(_ASSISTANT_MARK)
        said_end = self._special_pattern.match(rest)
        if said_end is None:
            raise UserInputError("The chat template ends an assistant's turn with no special token: it cannot be used.")
        self.end_of_turn_id = self._special_ids[said_end.group()]
        # Some templates end a prompt with "Assistant:" and write a blank before the text: the policy writes it.
        asked, answered = self._render((("user", "t"),)), self._render((("user", "t"), ("assistant", "a")))
        between = answered.partition(_ASSISTANT_MARK)[0].removeprefix(asked)
        self._lead = between if between.isspace() else ""
        # Texts of prompts repeat: a task's question, the words between images.
        self._remembered_ids = lru_cache(maxsize=4096)(self._ids_of)
        self.token_bytes = lru_cache(maxsize=None)(self._bytes_of_token)

    @property
    def num_known_tokens(self) -> int:
        """Token ids from here on are padding of the embedding matrix and mean nothing."""
        return len(self._tokenizer)

    @property
    def vocabulary(self) -> dict[str, int]:
        return self._tokenizer.get_vocab()  # type: ignore[no-any-return]

    def tokenizer_json(self) -> str:
        """The tokenizer with its special tokens, as the library tokenizers writes it."""
        return self._tokenizer.backend_tokenizer.to_str()  # type: ignore[attr-defined,no-any-return]

    def tokenizer_info(self) -> dict[str, Any]:
        """What clients read that encode by a server's `/tokenize`: special tokens and chat template."""
        named = {name: token for name, token in self._tokenizer.special_tokens_map.items() if isinstance(token, str)}
        return {"tokenizer_class": type(self._tokenizer).__name__, **named, "chat_template": self._template}

    @property
    def opens_thought(self) -> bool:
        """Whether the template's prompt leaves a thought open, as those of Thinking models do."""
        return self.prompt_opens_thought(None)

    def prompt_opens_thought(self, thinking: bool | None) -> bool:
        """The same where `enable_thinking` is set."""
        return leaves_thought_open(self._render((("user", "t"),), thinking))

    def token_id(self, text: str) -> int | None:
        """The added token that is this text."""
        return self._added_ids.get(text)

    def suppressed_token_ids(self, vocab_size: int) -> np.ndarray:
        """The ids that the policy can never sample: unused ids, and special tokens other than the end of a turn and the
        marks of calls."""
        special = {i for text, i in self._special_ids.items() if i != self.end_of_turn_id and text not in _CALL_MARKS}
        return np.array(sorted(special | set(range(self.num_known_tokens, vocab_size))), dtype=np.int64)

    def uses(self, name: str) -> bool:
        """Whether the template reads such a variable or field, or writes such a text."""
        return name in self._template

    def encode_prompt(
        self,
        messages: Sequence[Message],
        thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        ending: Ending = "prompt",
    ) -> EncodedSpan:
        """Encode a conversation that the policy is to answer, generation prompt included. `thinking` sets the
        template's `enable_thinking`; `tools` are OpenAI's. Raises UserInputError for what the template cannot do."""
        if not messages:
            raise UserInputError("A conversation needs at least one message: the environment's reset returned none.")
        if thinking is not None and "enable_thinking" not in self._template:
            if thinking != self.opens_thought:
                raise UserInputError(
                    f"The model's chat template {'always' if self.opens_thought else 'never'} opens a thought: leave "
                    "enable_thinking out."
                )
            thinking = None
        # A template branches on what tools and calls hold, so it gets them as they are, but for special strings.
        special: list[str] = []
        num_texts = sum(isinstance(part, str) for message in messages for part in message.parts)

        def guard(found: re.Match[str]) -> str:
            special.append(json.loads(f'"{found.group()}"'))
            return f"\ue000{num_texts + len(special) - 1}\ue001"

        fields = [dict(message.fields) for message in messages]
        beside = ""
        if tools or any(fields):
            beside = json.dumps({"tools": list(tools), "fields": fields}, ensure_ascii=False)
            beside = self._guarded.sub(guard, beside)
        render = self._render if len(beside) <= _REMEMBERED_CHARACTERS else self._render_uncached
        return self._encode(render(_shape(messages), thinking, beside, ending), messages, more=special)

    def encode_continuation(self, messages: Sequence[Message], ended: bool) -> EncodedSpan:
        """Encode what follows a sampled turn: its end (unless it `ended` with it), new messages, the next prompt."""
        rendered = self._render((("user", "t"), ("assistant", "a"), *_shape(messages)))
        tail = rendered[rendered.index(_ASSISTANT_MARK) + 1 :]
        # Text markers count from the first new message on.
        span = self._encode(tail, messages, first_text=1)
        if span.token_ids[0] != self.end_of_turn_id:
            raise UserInputError("The chat template does not end every assistant's turn with the same token.")
        return EncodedSpan(span.token_ids[1:], span.images) if ended else span

    def bare(self, token_ids: np.ndarray) -> np.ndarray:
        """An encoded prompt without the text around its images, for who adds that by itself."""
        before, after = self._around
        if not before and not after:
            return token_ids
        starts = np.flatnonzero(np.isin(token_ids, list(self._special_ids.values())))
        pieces = np.split(token_ids, starts)  # each but the first begins with a special token
        is_image = [bool(len(piece)) and piece[0] == self.image_token_id for piece in pieces]
        for number, piece in enumerate(pieces):
            precedes = is_image[number + 1 : number + 2] == [True]
            if is_image[number] or precedes:  # other pieces may have been sampled
                mark = int(number > 0)
                text = str(self._tokenizer.decode(piece[mark:].tolist()))
                text = text.removeprefix(after) if is_image[number] else text
                text = text.removesuffix(before) if precedes else text
                pieces[number] = np.concatenate([piece[:mark], self._ids_of(text)])
        return np.concatenate(pieces).astype(np.int32)

    def encode_text(self, text: str) -> np.ndarray:
        """A turn's text as the policy writes it, int32 [T]; special strings stay text. Raises UserInputError."""
        return np.array(self._ids_of(self._lead + text), dtype=np.int32)

    def encode_raw(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        """A prompt as its sender wrote it, special strings being special tokens, int32 [T]. `add_special_tokens`: those
        that the tokenizer puts around a text. Raises UserInputError."""
        _check_unicode(text)
        return np.array(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"], dtype=np.int32)

    def forms_of_word(self, word: str) -> list[list[int]]:
        """A word as tokens, and with a blank before it where that is as many tokens, as vLLM forbids it."""
        plain, spaced = (self.encode_raw(blank + word.lstrip(), False).tolist() for blank in ("", " "))
        return [plain, spaced] if len(spaced) == len(plain) and spaced[:1] != plain[:1] else [plain]

    def text_of(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """All ids as text, special ones too."""
        return b"".join(map(self.token_bytes, map(int, token_ids))).decode("utf-8", "replace")

    def decode(self, token_ids: np.ndarray) -> str:
        """Sampled ids as text, without a closing end-of-turn token."""
        ids = token_ids[:-1] if len(token_ids) and token_ids[-1] == self.end_of_turn_id else token_ids
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)).removeprefix(self._lead)

    def _bytes_of_token(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token stands for: often less than a character. Those of a sample join to its text."""
        added = self._tokenizer.added_tokens_decoder.get(token_id)
        if added is not None:
            return bytes(added.content.encode())
        return bytes(map(_byte_of_character().__getitem__, str(self._tokenizer.convert_ids_to_tokens(token_id))))

    def _render_uncached(
        self, shape: Shape, thinking: bool | None = None, beside: str = "", ending: Ending = "prompt"
    ) -> str:
        numbers = itertools.count()

        def content(part: str) -> dict[str, str]:
            if part == "i":
                return {"type": "image"}
            return {"type": "text", "text": _ASSISTANT_MARK if part == "a" else f"\ue000{next(numbers)}\ue001"}

        conversation: list[dict[str, Any]]
        conversation = [{"role": role, "content": [content(part) for part in parts]} for role, parts in shape]
        for message, (_, parts) in zip(conversation, shape, strict=True):
            if message["role"] == "tool" and parts == "t" and self.uses("string"):
                message["content"] = message["content"][0]["text"]  # templates of text models write a list as it is
        options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        if beside:
            given = json.loads(beside)
            options["tools"] = given["tools"] or None
            for message, fields in zip(conversation, given["fields"], strict=True):
                message |= fields
        rendered = str(
            self._tokenizer.apply_chat_template(
                conversation,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=ending == "prompt",
                **options,
            )
        )
        if ending == "open":  # up to the end of the last message's last text
            last = f"\ue000{next(numbers) - 1}\ue001"
            rendered = rendered[: rendered.rindex(last) + len(last)]
        return rendered

    def _ids_of(self, text: str) -> Sequence[int]:
        _check_unicode(text)
        return self._plain.encode(text, add_special_tokens=False).ids

    def _encode(
        self, rendered: str, messages: Sequence[Message], first_text: int = 0, more: Sequence[str] = ()
    ) -> EncodedSpan:
        """more: texts that may be written any number of times, numbered behind those of the messages."""
        texts = [part for message in messages for part in message.parts if isinstance(part, str)]
        known, images = [*texts, *more], images_of(messages)
        ids: list[int] = []
        plain: list[str] = []
        written: list[int] = []

        def flush() -> None:
            text = "".join(plain)
            if text:
                ids.extend(self._remembered_ids(text) if len(text) <= _REMEMBERED_CHARACTERS else self._ids_of(text))
            plain.clear()

        # Odd items are the numbers of text markers, even items belong to the template.
        for position, piece in enumerate(_MARK.split(rendered)):
            if position % 2:
                written.append(int(piece) - first_text)
                plain.append(known[written[-1]])
                continue
            for fragment in self._special_pattern.split(piece):
                if (token := self._special_ids.get(fragment)) is not None:
                    is_image = token == self.image_token_id
                    plain.append(self._around[0] if is_image else "")
                    flush()
                    ids.append(token)
                    plain.append(self._around[1] if is_image else "")
                else:
                    plain.append(fragment)
        flush()
        if sorted(number for number in written if number < len(texts)) != list(range(len(texts))):
            lost = next(text for number, text in enumerate(texts) if written.count(number) != 1)
            raise UserInputError(
                f"The chat template drops or repeats the text {lost[:60]!r}: send it in a message whose role and place "
                "the template knows (a system message comes first)."
            )
        token_ids = np.array(ids, dtype=np.int32)
        placeholders = int((token_ids == self.image_token_id).sum())
        if placeholders != len(images):
            raise UserInputError(
                f"The chat template wrote {placeholders} image placeholders for {len(images)} images: "
                "show images to the user only, by the model's own template."
            )
        return EncodedSpan(token_ids, images)


def leaves_thought_open(text: str) -> bool:
    _, opened, rest = text.rpartition("<think>")
    return bool(opened) and "</think>" not in rest


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserInputError(f"The text {text[:200]!r} is no valid Unicode: leave lone surrogates out.") from error


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes every byte as one printable character (GPT-2's table)."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def _shape(messages: Sequence[Message]) -> Shape:
    return tuple(
        (message.role, "".join("t" if isinstance(part, str) else "i" for part in message.parts)) for message in messages
    )


def expand_image_tokens(
    token_ids: np.ndarray, image_token_id: int, spans: Sequence[np.ndarray], name: str = ""
) -> np.ndarray:
    """Put the ids `spans[k]` in the place of the k-th image placeholder of `token_ids`; int32 in, int32 out."""
    places = np.flatnonzero(token_ids == image_token_id)
    if len(places) != len(spans):
        raise UserInputError(
            f"Prompt {name or 'without a name'} has {len(places)} image placeholders for {len(spans)} images."
        )
    first, *others = np.split(token_ids, places)
    pieces = [piece for span, other in zip(spans, others, strict=True) for piece in (span, other[1:])]
    return np.concatenate([first, *pieces]).astype(np.int32)


def mrope_positions(
    token_ids: np.ndarray, image_token_id: int, grids: Sequence[tuple[int, int, int]], merge_size: int
) -> np.ndarray:
    """Multimodal rotary positions int64 [3, T] (temporal, height, width) of expanded ids (Qwen2-VL, arXiv 2409.12191,
    section 2.1).

    Text advances all three together. An image of grid (t, h, w) patches holds t·h·w / merge² tokens that share a start
    and spread over its merged rows and columns; the next text starts after the longer side.
    """
    positions = np.empty((3, len(token_ids)), dtype=np.int64)
    is_image = token_ids == image_token_id
    cursor, start = 0, 0
    for grid_t, grid_h, grid_w in grids:
        rows, columns = grid_h // merge_size, grid_w // merge_size
        count = grid_t * rows * columns
        first = start + int(np.argmax(is_image[start:]))
        positions[:, start:first] = np.arange(cursor, cursor + first - start)
        cursor += first - start
        time, row, column = np.indices((grid_t, rows, columns)).reshape(3, -1)
        positions[0, first : first + count] = time + cursor
        positions[1, first : first + count] = row + cursor
        positions[2, first : first + count] = column + cursor
        cursor += max(rows, columns)
        start = first + count
    positions[:, start:] = np.arange(cursor, cursor + len(token_ids) - start)
    return positions
