"""The types that pass between environments, engines, env runners and the learner.

An environment returns `Observation`s, which are lists of `Message`s of text and images. `chat.py` turns them
into token ids. A `GenerationRequest` asks an engine for samples and a `Completion` brings them back. One episode
becomes a `Trajectory`; the episodes of one task instance become a `TrajectoryGroup`, the unit of the GRPO
baseline, of retries and of transport. Nothing here knows Ray or torch.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps

from rl_vlm.safe_text import safe
from rl_vlm.tracing import Span

# (token id, log-probability) of the most likely tokens of a place, best first
TopLogprobs = tuple[tuple[int, float], ...]
POLICY = "policy"  # of a run that has its own replicas; runs that share replicas have a name each
# How many alternatives per position a request may ask for (the limit of OpenAI's interface).
MAX_TOP_LOGPROBS = 20
MAX_ASPECT_RATIO = 200  # of an image, by which Qwen's processors go
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0  # beyond them logits overflow

Role = Literal["system", "user", "assistant", "tool"]
Split = Literal["train", "test"]
# What a running sample does with its keys and values when it takes newer weights.
InFlightUpdates = Literal["keep", "recompute"]


class RLVLMError(Exception):
    """Base of the errors that this package raises on purpose; the message says what to do, and what a file, a
    model or an endpoint put into it reaches no terminal or log raw (see `safe_text`)."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(safe(one) if isinstance(one, str) else one for one in args))


class UserInputError(RLVLMError):
    """The input (config, data, image, path, argument) is wrong. The command line exits with code 2.

    Do: change what the sentence names.
    """


class TrajectoryError(RLVLMError):
    """A trajectory breaks one of its invariants; it must not be trained on.

    Do: report it as a bug, unless a plugin of yours makes trajectories.
    """


class PixelLimits(NamedTuple):
    """The least and the most pixels that an image is resized to; None leaves the processor's own limit."""

    minimum: int | None = None
    maximum: int | None = None


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An RGB image as PNG bytes; `sha256` of those bytes identifies it in every cache."""

    sha256: str
    png: bytes = field(repr=False)
    width: int
    height: int

    @classmethod
    def from_pil(cls, image: Image.Image) -> EncodedImage:
        """Encode any PIL image as RGB PNG (see `as_rgb`); metadata are left out."""
        rgb = as_rgb(image)
        buffer = io.BytesIO()
        rgb.save(buffer, format="PNG", compress_level=1, icc_profile=None)
        png = buffer.getvalue()
        return cls(hashlib.sha256(png).hexdigest(), png, rgb.width, rgb.height)

    def to_pil(self, name: str = "") -> Image.Image:
        """Decode to an RGB PIL image. Raises UserInputError, which calls it `name`, where the bytes are no PNG of the
        announced size: that decides how many tokens the image takes, and may come from a client apart from the bytes.
        """
        name = f"Image {name or self.sha256[:12]}"
        try:
            image = Image.open(io.BytesIO(self.png), formats=("PNG",))
            # Before the pixels are decoded: a forged size must not cost memory.
            if image.size == (self.width, self.height):
                return image.convert("RGB")
        except Exception as error:  # Pillow raises nearly anything on damaged bytes
            raise UserInputError(f"{name} cannot be decoded ({error}): replace it.") from error
        raise UserInputError(
            f"{name} has {image.width}x{image.height} pixels and was announced as {self.width}x{self.height}."
        )


def as_rgb(image: Image.Image) -> Image.Image:
    """Any PIL image as a viewer shows it, in RGB: turned as its EXIF data say, transparency laid on white, 16 bits made
    8. Raises UserInputError for pixels of 32 bits."""
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode in ("I", "F"):
        raise UserInputError("The image has pixels of 32 bits, whose range is unknown: convert it to 8 or 16 bits.")
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))  # PIL would cut off at 255
    palette = image.palette.mode if image.palette is not None else ""
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or palette == "RGBA" or "transparency" in image.info:
        rgba = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return image if image.mode == "RGB" else image.convert("RGB")


Part = str | Image.Image | EncodedImage


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message: a role and its parts in order, text or images."""

    role: Role
    parts: tuple[Part, ...]
    # What else the chat template gets: tool_calls, tool_call_id, name, reasoning_content; values are JSON.
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, role: Role, *parts: Part) -> Message:
        """`Message.of("user", image, "What is this?")`."""
        return cls(role, parts)

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def images(self) -> tuple[EncodedImage, ...]:
        """The images, encoded; the parts are as an environment gave them."""
        return tuple(as_encoded(part) for part in self.parts if not isinstance(part, str))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, well-formed; who runs it says whether the tool exists."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Observation:
    """The messages that an environment appends to the conversation. Empty after the last step.

    `context`, of an observation that is not the first, is all that the next turn's prompt shows.
    """

    messages: tuple[Message, ...] = ()
    context: tuple[Message, ...] | None = None

    @classmethod
    def user(cls, *parts: Part) -> Observation:
        """One user message, the usual case."""
        return cls((Message("user", parts),))


class StopReason(StrEnum):
    """Why the engine stopped sampling a turn."""

    END_OF_TURN = "end_of_turn"  # the end-of-turn token was sampled; it is the last token id
    STOP = "stop"  # a stop string appeared; the text up to and including it was sampled
    LENGTH = "length"  # max_new_tokens was reached


class TrajectoryStatus(StrEnum):
    """How an episode ended."""

    COMPLETED = "completed"  # the environment said terminated
    TRUNCATED = "truncated"  # a limit: turns, context, new tokens, or the environment said truncated


MAX_GRAMMAR_CHARS = 65_536


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a sample has to be: JSON that fits the schema `text`, a match of the regular expression, a sentence of the
    Lark or GBNF grammar, or a list of calls: of the `tools`, name to schema, in the JSON `text`, `several` or one."""

    kind: Literal["json_schema", "regex", "grammar", "calls"]
    text: str

    def __post_init__(self) -> None:
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise UserInputError(f"A grammar has at most {MAX_GRAMMAR_CHARS} characters, not {len(self.text)}.")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. Penalties: see `penalise` in `engines/sampling.py`."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 switches top-k off
    n: int = 1
    seeds: tuple[int, ...] | None = None  # one per sample; None for fresh randomness
    stop: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()  # a sample is one of these texts, followed by end-of-turn (guided choice)
    grammar: Grammar | None = None
    opened_thought: bool = False  # the prompt ends within a thought, which choices and grammar leave free
    max_thought_tokens: int | None = None  # the thought is closed after so many
    top_logprobs: int = 0  # how many of the most likely tokens are given at every position
    prompt_logprobs: int | None = None  # the same for the prompt's own tokens; None: nothing is given for them
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    bad_words: tuple[str, ...] = ()  # texts whose last token is not sampled behind the others
    min_p: float = 0.0  # leaves out tokens that are less likely than this share of the most likely one
    min_tokens: int = 0  # before these no end of turn is sampled and no stop string counts
    ignore_eos: bool = False  # a sample does not end at an end of turn
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def bound(self) -> bool:
        """Whether a grammar says which tokens may come next."""
        return bool(self.choices) or self.grammar is not None or self.max_thought_tokens is not None

    def __post_init__(self) -> None:
        # Configurations and requests bound each field; what several values must fulfil together is found here.
        if "" in self.choices or len(set(self.choices)) < len(self.choices):
            raise UserInputError("Choices must be different texts, none of them empty.")
        if self.choices and self.grammar is not None:
            raise UserInputError("Choices are a grammar of their own: leave the other one out.")
        if self.bound and (self.min_tokens or self.ignore_eos):
            raise UserInputError("Choices and grammars say where an answer ends: leave min_tokens and ignore_eos out.")
        if not 0 <= self.min_tokens <= self.max_new_tokens:
            raise UserInputError(
                f"min_tokens ({self.min_tokens}) must be from 0 to {self.max_new_tokens}, the most new tokens of this "
                "request."
            )


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Ask for `sampling.n` continuations of a prompt."""

    request_id: str
    prompt_ids: np.ndarray  # int32 [P] with one placeholder per image, which the engine expands
    sampling: SamplingParams
    images: tuple[EncodedImage, ...] = ()
    min_version: int = 0  # the oldest version of `policy` that may answer; -1: the base model without an adapter
    preferred_replica: str = ""  # usually the one that answered the earlier turns of the conversation
    policy: str = POLICY
    exact: bool = False  # no newer version may answer either
    trace: str = ""  # the span that the request belongs to (see tracing.py)


@dataclass(frozen=True, slots=True)
class Sample:
    """One continuation: sampled token ids int32 [T] and their log-probabilities float32 [T] under the distribution
    that they were sampled from (token mask, choices and temperature applied).

    `pieces` holds (number of tokens, policy version) in order where the version changed under the sample (in-flight
    updates); empty where all tokens are of the completion's version.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    stop_reason: StopReason
    top_logprobs: Sequence[TopLogprobs] = ()  # per position, if the request asked for them
    pieces: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class SampleChunk:
    """New tokens of a streamed sample: ids int32 [k] and their log-probabilities float32 [k]."""

    number: int  # of the request's `n` samples
    token_ids: np.ndarray
    logprobs: np.ndarray
    policy_version: int
    stop_reason: StopReason | None = None  # of a sample's last chunk
    top_logprobs: Sequence[TopLogprobs] = ()
    replica_id: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to a `GenerationRequest`."""

    request_id: str
    prompt_ids: np.ndarray  # int32, with every image placeholder expanded
    samples: tuple[Sample, ...]
    policy_version: int  # the oldest version of `policy` that sampled a token; see `Sample.pieces`
    replica_id: str = ""
    queue_s: float = 0.0
    generate_s: float = 0.0
    policy: str = POLICY
    spans: tuple[Span, ...] = ()  # the replica's, where the request is traced
    # Of each prompt token from the second on: itself, then the most likely ones. Under the model's own distribution.
    prompt_logprobs: tuple[TopLogprobs, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduced(self, "samples", Sample, ("token_ids", "logprobs"))


@dataclass(frozen=True, slots=True)
class Turn:
    """One sampled turn of a trajectory: tokens [start, stop) of `Trajectory.token_ids`.

    Where several versions sampled it (partial rollouts, in-flight updates), `pieces` holds the (number of tokens,
    version) of each in order; it is empty otherwise.
    """

    start: int
    stop: int
    policy_version: int  # the oldest that sampled a token of it
    stop_reason: StopReason
    reward: float = 0.0
    state_id: str = ""  # a hash of the texts and images that were shown before the turn; empty where it is unknown
    pieces: tuple[tuple[int, int], ...] = ()
    parts: tuple[tuple[str, float], ...] = ()  # (name, value) of each part of the reward, before weights
    well_formed: bool = True  # False where the environment said so, or the turn was cut off

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """(number of tokens, version) of each piece, in order; of one where a single version sampled all."""
        return self.pieces or ((self.stop - self.start, self.policy_version),)

    def __reduce__(self) -> tuple[Any, ...]:
        return Turn, _fields(self)  # costs a third of the dataclass's own pickling


def judged_correct(info: Mapping[str, Any], reward: float) -> bool:
    """The info's `correct`, unless it is a text, as some environments have the right answer there; else whether the
    reward is at least 1."""
    correct = info.get("correct")
    return bool(correct) if isinstance(correct, bool | int | float | np.bool_ | np.number) else reward >= 1.0


@dataclass(frozen=True, slots=True)
class TokenSegment:
    """One sequence that the engine saw: tokens [start, stop) of `Trajectory.token_ids`, which begin with a prompt."""

    start: int
    stop: int
    images: tuple[int, ...]  # of `Trajectory.images`, in the order of their placeholders


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """What a teacher says of S sampled tokens: `logprobs` float32 [S] of the tokens themselves, and its K most likely
    ones, `ids` int32 [S, K] and `top` float32 [S, K] (-inf where it has fewer). K may be 0."""

    logprobs: np.ndarray
    ids: np.ndarray
    top: np.ndarray

    def __getitem__(self, tokens: slice) -> TeacherScores:
        return TeacherScores(self.logprobs[tokens], self.ids[tokens], self.top[tokens])

    @classmethod
    def joined(cls, parts: Sequence[TeacherScores]) -> TeacherScores:
        return cls(*map(np.concatenate, zip(*((one.logprobs, one.ids, one.top) for one in parts), strict=True)))


@dataclass(slots=True)
class Trajectory:
    """One episode as the learner sees it: token_ids int32 [T], loss_mask bool [T] (True where the policy sampled),
    logprobs float32 [T] (behaviour log-probabilities, 0 where nothing was sampled), images in the order in which they
    were first shown.

    Where `rollout.history` or the environment rewrote what a turn shows, the tokens are those of several sequences,
    one after the other; what a later one repeats of an earlier one was not sampled in it.
    """

    trajectory_id: str
    token_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    turns: tuple[Turn, ...]
    status: TrajectoryStatus
    images: tuple[EncodedImage, ...] = ()
    info: dict[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()  # the recorded conversation; images replaced by their hash
    error: str = ""  # the reason, when aborted
    replica_ids: tuple[str, ...] = ()
    segments: tuple[TokenSegment, ...] = ()  # empty where all tokens are one sequence
    sampled_before: int = 0  # of one of an episode's `parts`: tokens that the parts before it sampled
    teacher: TeacherScores | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def reward(self) -> float:
        return float(sum(turn.reward for turn in self.turns))

    @property
    def correct(self) -> bool:
        return judged_correct(self.info, self.reward)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled a turn."""
        return min((turn.policy_version for turn in self.turns), default=0)

    @property
    def newest_version(self) -> int:
        """The newest policy version that sampled a token."""
        return max((version for turn in self.turns for _, version in turn.versions), default=0)

    @property
    def versions(self) -> np.ndarray:
        """int32 [T]: the policy version that sampled each token, -1 where nothing was sampled."""
        versions = np.full(len(self.token_ids), -1, dtype=np.int32)
        for turn in self.turns:
            start = turn.start
            for count, version in turn.versions:
                versions[start : start + count] = version
                start += count
        return versions

    @property
    def num_turns(self) -> int:
        return len(self.turns)

    @property
    def num_sampled(self) -> int:
        """How many tokens the policy sampled."""
        return sum(turn.stop - turn.start for turn in self.turns)

    @property
    def placed_images(self) -> tuple[EncodedImage, ...]:
        """One image for each place of an image in the tokens, in order."""
        if not self.segments:
            return self.images
        return tuple(self.images[number] for segment in self.segments for number in segment.images)

    @property
    def parts(self) -> list[Trajectory]:
        """The segments, each as a trajectory of its own tokens, turns and images."""
        if not self.segments:
            return [self]
        parts, sampled = [], 0
        for segment in self.segments:
            start, stop = segment.start, segment.stop
            turns = tuple(
                replace(turn, start=turn.start - start, stop=turn.stop - start)
                for turn in self.turns
                if start <= turn.start < stop
            )
            part = replace(
                self,
                token_ids=self.token_ids[start:stop],
                loss_mask=self.loss_mask[start:stop],
                logprobs=self.logprobs[start:stop],
                turns=turns,
                images=tuple(self.images[number] for number in segment.images),
                segments=(),
                sampled_before=sampled,
            )
            if self.teacher is not None:
                part.teacher = self.teacher[sampled : sampled + part.num_sampled]
            parts.append(part)
            sampled += part.num_sampled
        return parts

    def check(self) -> Trajectory:
        """Return self if the arrays, spans and mask agree; raise TrajectoryError otherwise."""
        if not len(self.loss_mask) == len(self.logprobs) == len(self):
            raise TrajectoryError(f"trajectory {self.trajectory_id} is broken: its arrays are not equally long.")
        edges = [1, *(edge for turn in self.turns for edge in (turn.start, turn.stop)), max(len(self), 1)]
        pieces = [(turn.stop - turn.start, sum(count for count, _ in turn.pieces)) for turn in self.turns]
        sampled = np.zeros(len(self), dtype=bool)
        for turn in self.turns:
            sampled[max(turn.start, 0) : turn.stop] = True
        for what, holds in (
            # No position predicts the first token.
            ("turns follow each other from token 1 on", edges == sorted(edges) and all(size > 0 for size, _ in pieces)),
            ("pieces add up to their turn", all(total in (0, size) for size, total in pieces)),
            ("the loss mask is that of the turns", np.array_equal(self.loss_mask, sampled)),
            ("segments are all of it, each a prompt and turns", self._is_whole()),
            ("rewards are finite", all(math.isfinite(turn.reward) for turn in self.turns)),
            # nan fails every comparison.
            ("log-probabilities are finite and at most 0", ((self.logprobs <= 1e-4) & (self.logprobs > -np.inf)).all()),
            ("only sampled tokens have a log-probability", not self.logprobs[~sampled].any()),
        ):
            if not holds:
                raise TrajectoryError(f"trajectory {self.trajectory_id} is broken: it does not hold that {what}.")
        return self

    def _is_whole(self) -> bool:
        """Whether the segments follow each other without a gap, and each has a prompt and then turns."""
        end = 0
        for segment in self.segments:
            own = [turn for turn in self.turns if segment.start <= turn.start < segment.stop]
            if segment.start != end or not own or own[0].start == end or own[-1].stop > segment.stop:
                return False
            end = segment.stop
        return not self.segments or end == len(self)


@dataclass(slots=True)
class TrajectoryGroup:
    """The trajectories of one task instance (same environment, split, index and seed)."""

    group_id: str
    index: int
    trajectories: list[Trajectory]
    env: str = ""  # the environment's name in a mixture
    stage: int = 0  # the curriculum's, when the task was handed out

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduced(self, "trajectories", Trajectory, ("token_ids", "loss_mask", "logprobs"))

    def __len__(self) -> int:
        return len(self.trajectories)

    @property
    def rewards(self) -> np.ndarray:
        """float64 [G]."""
        return np.array([trajectory.reward for trajectory in self.trajectories], dtype=np.float64)

    @property
    def recorded(self) -> bool:
        """Whether its trajectories hold their conversations."""
        return bool(self.trajectories[0].messages)

    @property
    def oldest_version(self) -> int:
        return min(trajectory.oldest_version for trajectory in self.trajectories)

    @property
    def newest_version(self) -> int:
        return max(trajectory.newest_version for trajectory in self.trajectories)


def _fields(record: Any) -> tuple[Any, ...]:
    return tuple(getattr(record, name) for name in record.__slots__)


def _reduced(whole: Any, name: str, kind: type[Any], arrays: Sequence[str]) -> tuple[Any, ...]:
    """How a record is pickled whose field `name` holds records of `kind`: each of their array fields in one array, as
    pickling an array costs about 10 µs whatever its size, and a rollout has thousands of short ones."""
    records, fields = getattr(whole, name), dict(zip(whole.__slots__, _fields(whole), strict=True))
    columns = dict(zip(kind.__slots__, zip(*map(_fields, records), strict=True), strict=False))
    for column in arrays if records else ():
        columns[column] = np.concatenate(columns[column]), list(accumulate(map(len, columns[column])))
    return _restored, (type(whole), fields | {name: type(records)()}, name, kind, arrays, columns)


def _restored(
    whole: type[Any], fields: dict[str, Any], name: str, kind: type[Any], arrays: Sequence[str], columns: dict[str, Any]
) -> Any:
    """The record; the arrays of its records are views of the common ones."""
    for column in arrays if columns else ():
        array, ends = columns[column]
        columns[column] = [array[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    records = (kind(*values) for values in zip(*columns.values(), strict=True))
    return whole(**fields | {name: type(fields[name])(records)})


def as_encoded(image: Image.Image | EncodedImage) -> EncodedImage:
    return image if isinstance(image, EncodedImage) else EncodedImage.from_pil(image)


def with_images(messages: Sequence[Message], images: Iterable[EncodedImage]) -> list[Message]:
    """The messages with other images in the places of their own, in order."""
    left = iter(images)
    return [
        replace(message, parts=tuple(part if isinstance(part, str) else next(left) for part in message.parts))
        for message in messages
    ]


def images_of(messages: Sequence[Message]) -> tuple[EncodedImage, ...]:
    """All images of a conversation, in order."""
    return tuple(image for message in messages for image in message.images)
