"""Play the environment of an OpenEnv server: `openenv:http://host:port`.

The server's WebSocket `/ws` holds a session with an environment of its own; its `/schema` says what an action is. The
messages are {"type": "reset" | "step", "data"} and their answers {"type", "data": {"observation", "reward", "done"}}.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import numpy as np
from PIL import Image

from rl_vlm.envs.address import TOKEN_VARIABLE, base_url, is_loopback, retried, token_header
from rl_vlm.envs.base import Count, EpisodeEnv, Info, Item, Reply, Seconds
from rl_vlm.envs.errors import EnvCrashError, EnvError, EnvTimeoutError, as_reward
from rl_vlm.envs.images import ImageError, decode, image_bytes, one_line
from rl_vlm.envs.isolation import check_plain
from rl_vlm.envs.tools import THOUGHT_END
from rl_vlm.types import EncodedImage, Observation, RLVLMError, UserInputError

MAX_MESSAGE = 32 * 2**20
MAX_SHOWN = 20_000  # characters of an observation
MAX_IMAGES = 16
_MAGIC = ("iVBORw0KGgo", "/9j/", "UklGR")  # PNG, JPEG and WebP in base64
MAX_CHARS = 65_536  # characters of an action
# Words of other scripts stand without spaces between them; an underscore is part of a word where letters go on behind
# it.
_BEFORE_WORD, _AFTER_WORD = r"(?<![A-Za-z0-9])(?<![A-Za-z0-9]_)", r"(?![A-Za-z0-9]|_[A-Za-z0-9]|\.\d)"
_BEFORE_NUMBER = r"(?<!^-)(?<![^A-Za-z]-)(?<!\d\.)"  # a sign, but not the hyphen of "action-2"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_MOST_DIGITS = 40
_MOST_BRACES = 64  # from which an object is tried to be read


T = TypeVar("T")


class OpenEnv(EpisodeEnv):
    """A VisionEnv behind an OpenEnv server.

    address: "http://host:port" or "host:port". prompt: what stands before the first observation; by default how to
    answer. action_field: the field of the action that the policy writes, where the action has several. reset: further
    arguments of the server's `reset`. max_turns: turns after which an episode is truncated. num_train, num_test: how
    many seeds each split has. timeout_s: deadline of a call; retry_s: how long a server that cannot be reached, or is
    full, is tried again. token_variable: the environment variable with the token that is sent.

    A text that is no action, or one that the server's schema refuses, is answered with the reason and costs a turn.
    `info` holds `invalid_actions`, their count.
    """

    def __init__(
        self,
        address: str,
        *,
        prompt: str | None = None,
        action_field: str | None = None,
        reset: dict[str, Any] | None = None,
        max_turns: Count = 16,
        num_train: Count = 4096,
        num_test: Count = 512,
        timeout_s: Seconds = 60.0,
        retry_s: Seconds = 30.0,
        token_variable: str = TOKEN_VARIABLE,
    ) -> None:
        self.name = f"openenv:{address}"
        super().__init__(num_train=num_train, num_test=num_test, max_turns=max_turns)
        check_plain(self.name, {"reset": reset})
        self._connection = _Connection(base_url(address), timeout_s, retry_s, token_header(token_variable))
        self._form = ActionForm.of(self._connection.action_schema(), action_field)
        self._prompt = self._form.instructions if prompt is None else prompt
        self._reset_data = dict(reset or {})

    def open(self, item: Item) -> tuple[Observation, Info]:
        """Reset the server's environment with the item's seed; a lost session is opened again."""
        number, self._invalid = self.number(item), 0
        self._connection.ensure_open()
        result = self._connection.call("reset", {"seed": number, **self._reset_data})
        images, text = parts_of(result.get("observation"))
        opening = "\n\n".join(filter(None, (self._prompt, text)))
        return Observation.user(*images, opening), {"seed": number}

    def reply(self, text: str) -> Reply:
        """Send the policy's text as an action."""
        try:
            result = self._connection.call("step", self._form.parse(text))
        except ActionError as error:
            self._invalid += 1
            return Reply(0.0, Observation.user(f"{error}"), self._counted())
        images, shown = parts_of(result.get("observation"))
        reward = as_reward(0.0 if result.get("reward") is None else result["reward"], "the server")
        return Reply(reward, None if result.get("done") else Observation.user(*images, shown), self._counted())

    def close(self) -> None:
        """End the session."""
        self._connection.close()

    def _counted(self) -> Info:
        return {"turn": self.turn, "invalid_actions": self._invalid}


class _Connection:
    """One session on the server."""

    def __init__(self, url: str, timeout_s: float, retry_s: float, headers: dict[str, str]) -> None:
        self._url, self._timeout_s, self._retry_s, self._headers = url, timeout_s, retry_s, headers
        self._socket: Any = None

    def action_schema(self) -> dict[str, Any]:
        """The JSON schema of an action. Raises UserInputError where there is no OpenEnv server."""

        def ask() -> httpx.Response:
            local = is_loopback(self._url)
            return httpx.get(f"{self._url}/schema", headers=self._headers, timeout=self._timeout_s, trust_env=not local)

        reply = self._retried(ask, (httpx.TransportError,))
        if reply.status_code in (401, 403):
            raise UserInputError(
                f"{self._url} refuses the token: set the variable that env.kwargs.token_variable names."
            )
        if reply.status_code != 200 or len(reply.content) > MAX_MESSAGE:
            raise UserInputError(
                f"{self._url}/schema answers with status {reply.status_code}: it is no OpenEnv server."
            )
        try:
            return dict(reply.json()["action"])
        except (ValueError, TypeError, KeyError) as error:
            raise UserInputError(f"{self._url}/schema does not describe an action: it is no OpenEnv server.") from error

    def ensure_open(self) -> None:
        """Open a session if there is none, for as long as the server is starting or full."""
        if self._socket is not None:
            try:
                self._socket.ping()
                return
            except Exception:  # whatever the library raises for a connection that is gone
                self.close()
        try:
            from websockets.exceptions import WebSocketException
            from websockets.sync.client import connect
        except ImportError as error:
            raise UserInputError(
                f"websockets is not installed ({error}): run `pip install 'rl-vlm[openenv]'`."
            ) from error

        def open_it() -> None:
            url = self._url.replace("http", "ws", 1) + "/ws"
            self._socket = connect(
                url,
                additional_headers=self._headers,
                open_timeout=min(10.0, self._timeout_s),
                max_size=MAX_MESSAGE,
                proxy=None if is_loopback(self._url) else True,
                close_timeout=2.0,
            )
            self.call("state", None)  # a server that is full says so only after it has accepted

        self._retried(open_it, (OSError, TimeoutError, WebSocketException, EnvCrashError))

    def call(self, kind: str, data: dict[str, Any] | None) -> dict[str, Any]:
        """The `data` of the answer. ActionError where the server's schema refuses the action."""
        if self._socket is None:
            raise EnvCrashError(f"{self._url}: the session is gone; call reset() for a new one.")
        message = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            self._send(message)
            reply = json.loads(self._socket.recv(timeout=self._timeout_s))
        except TimeoutError as error:
            self.close()
            raise EnvTimeoutError(f"{self._url}: {kind} took longer than {self._timeout_s:g} s.") from error
        except Exception as error:  # the library's own, an OSError, or what is no JSON
            self.close()
            raise EnvCrashError(
                f"{self._url}: the session broke at {kind} ({type(error).__name__}: {one_line(error)})."
            ) from error
        content = reply.get("data") if isinstance(reply, dict) else None
        if not isinstance(content, dict):
            raise EnvError(f"{self._url}: the answer to {kind} is no message of OpenEnv.")
        if reply.get("type") == "error":
            self._raise(kind, content)
        return content

    def _send(self, message: dict[str, Any]) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            self._socket.send(json.dumps(message))
        except ConnectionClosed:
            pass  # the server may have said why before it closed, and that can still be read

    def _raise(self, kind: str, content: dict[str, Any]) -> None:
        code, text = content.get("code"), str(content.get("message", ""))[:300]
        if code == "VALIDATION_ERROR" and kind == "step":
            first = next(iter(content.get("errors") or [{}]))
            place = ".".join(map(str, first.get("loc", ())))
            raise ActionError(f"This action is not valid: {place}: {first.get('msg', text)}."[:300])
        if code in ("CAPACITY_REACHED", "SESSION_ERROR", "FACTORY_ERROR"):
            self.close()
            raise EnvCrashError(f"{self._url} opens no session: {text}.")
        raise EnvError(f"{self._url}: {kind}: {text} ({code}).")

    def _retried(self, call: Callable[[], T], errors: tuple[type[Exception], ...]) -> T:
        try:
            return retried(call, errors, self._retry_s)
        except errors as error:
            raise EnvCrashError(
                f"{self._url} could not be reached for {self._retry_s:g} s ({type(error).__name__}: {one_line(error)})."
            ) from error

    def close(self) -> None:
        """End the session."""
        socket, self._socket = self._socket, None
        if socket is not None:
            try:
                socket.send(json.dumps({"type": "close"}))
                socket.close()
            except Exception:  # it is gone already; the library raises many kinds
                pass


def parts_of(observation: Any) -> tuple[list[EncodedImage], str]:
    """The images of an observation in the order of its fields, and its other fields as text.

    An image is a data URI, base64 of a PNG, JPEG or WebP file, a nested list [H][W][3], or a flat list beside a field
    `<name>_shape`. A single text stays as it is; several fields are lines "name: value", and so is a number that stands
    alone because the other fields are empty.
    """
    fields = observation if isinstance(observation, dict) else {"observation": observation}
    images: list[EncodedImage] = []
    lines: dict[str, str] = {}
    shapes = {name for name in fields if name.endswith("_shape") and name.removesuffix("_shape") in fields}
    for name, value in fields.items():
        if name in shapes or value is None or value in ("", [], {}):
            continue
        found = _images(value, fields.get(f"{name}_shape"))
        if found is not None:
            images += found
        else:
            lines[name] = value if isinstance(value, str) else json.dumps(value)
    if len(images) > MAX_IMAGES:
        raise EnvError(f"An observation has {len(images)} images, more than {MAX_IMAGES}.")
    named = [f"{name}: {one}" for name, one in lines.items()]
    alone = len(lines) == 1 and (len(fields) == 1 or isinstance(fields[next(iter(lines))], str))
    text = next(iter(lines.values())) if alone else "\n".join(named)
    if len(text) > MAX_SHOWN:
        text = f"{text[:MAX_SHOWN]} … ({len(text) - MAX_SHOWN} characters are left out)"
    return images, text


def _images(value: Any, shape: Any) -> list[EncodedImage] | None:
    """The images that a value is; None where it is something else."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        return None
    if all(isinstance(one, str) for one in texts):
        return list(map(_decoded, texts)) if all(one.startswith(("data:image/", *_MAGIC)) for one in texts) else None
    pixels = _pixels(value, shape)
    return None if pixels is None else [EncodedImage.from_pil(pixels)]


def _decoded(text: str) -> EncodedImage:
    try:
        return decode(image_bytes(text if text.startswith("data:") else base64.b64decode(text, validate=True), None))
    except (ImageError, binascii.Error, ValueError) as error:
        raise EnvError(f"An image of the observation cannot be read: {error}.") from error


def _pixels(value: list[Any], shape: Any) -> Any:
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return None
    if (
        isinstance(shape, list)
        and all(isinstance(side, int) and side > 0 for side in shape)
        and math.prod(shape) == array.size
    ):
        array = array.reshape(shape)
    grey = shape is not None and array.ndim == 2
    coloured = array.ndim == 3 and array.shape[2] in (3, 4) and min(array.shape[:2]) > 3
    if array.dtype.kind != "i" or not (grey or coloured) or array.min() < 0 or array.max() > 255:
        return None
    return Image.fromarray(array.astype(np.uint8))


class ActionError(RLVLMError):
    """The policy's text is no action; the message tells it why."""


@dataclass(frozen=True)
class ActionForm:
    """How an action is written: `field` is the only one to fill, or "" where a JSON object is expected.

    `kind` is the field's JSON type, `choices` its allowed values as the server writes them, `properties` the schema of
    all fields.
    """

    field: str
    kind: str
    choices: tuple[Any, ...]
    properties: dict[str, Any]

    @classmethod
    def of(cls, schema: dict[str, Any], field: str | None = None) -> ActionForm:
        """The form of a JSON schema; `field` chooses one where the schema has several. Raises UserInputError."""
        properties = {name: one for name, one in schema.get("properties", {}).items() if name != "metadata"}
        if field is not None and field not in properties:
            raise UserInputError(f"The action has no field {field!r}: choose one of {', '.join(properties) or 'none'}.")
        required = [name for name in schema.get("required", ()) if name in properties]
        names = [field] if field else required if len(required) == 1 else list(properties)
        if len(names) != 1:
            return cls("", "object", (), properties)
        one = properties[names[0]]
        kind = "enum" if "enum" in one else str(one.get("type", ""))
        if kind not in ("enum", "string", "integer", "number", "boolean"):
            return cls("", "object", (), properties)
        return cls(names[0], kind, tuple(one.get("enum", ())), properties)

    @property
    def instructions(self) -> str:
        """What the policy is told to write."""
        if not self.field:
            shape = {name: one.get("description") or one.get("type", "any") for name, one in self.properties.items()}
            return f"Answer with a JSON object: {json.dumps(shape)}."
        about = self.properties[self.field].get("description", "")
        what = {
            "string": f"the {self.field}",
            "integer": f"the {self.field}, a whole number",
            "number": f"the {self.field}, a number",
            "boolean": f"the {self.field}, true or false",
            "enum": f"the {self.field}, one of {', '.join(map(str, self.choices))}",
        }[self.kind]
        return f"Answer with {what}{f' ({about})' if about else ''}."

    def parse(self, text: str) -> dict[str, Any]:
        """The action; what stands before the end of a thought does not count. Raises ActionError."""
        if len(text) > MAX_CHARS:
            raise ActionError(f"An action may have {MAX_CHARS} characters, not {len(text)}.")
        spoken = text.rpartition(THOUGHT_END)[2].strip()
        if not self.field:
            return _last_object(spoken)
        return {self.field: self._value(spoken)}

    def _value(self, text: str) -> Any:
        if self.kind == "string":
            return text
        if self.kind in ("integer", "number"):
            found = _NUMBER.findall(text)
            if not found:
                raise ActionError(f"No number was found. {self.instructions}")
            if len(found[-1]) > _MOST_DIGITS:
                raise ActionError(
                    f"A number may have {_MOST_DIGITS} characters, not {len(found[-1])}. {self.instructions}"
                )
            if self.kind == "number":
                return float(found[-1])
            return round(float(found[-1])) if "." in found[-1] else int(found[-1])
        # Where one choice is part of another ("up" and "pick up"), the longer one is meant: both end at the same place.
        choices = (True, False) if self.kind == "boolean" else self.choices
        named = [(*place, number) for number, one in enumerate(choices) if (place := _last_place(str(one), text))]
        if not named:
            raise ActionError(f"The answer names none of the choices. {self.instructions}")
        return choices[max(named)[-1]]


def _last_place(choice: str, text: str) -> tuple[int, int] | None:
    """(end, length) of the last place where a choice stands as a whole word, in any case; None where it does not."""
    before = (_BEFORE_WORD if _is_ascii_word(choice[:1]) else "") + (_BEFORE_NUMBER if choice[:1].isdigit() else "")
    after = _AFTER_WORD if _is_ascii_word(choice[-1:]) else ""
    found = list(re.finditer(f"{before}{re.escape(choice)}{after}", text, re.IGNORECASE)) if choice else []
    return (found[-1].end(), len(choice)) if found else None


def _is_ascii_word(character: str) -> bool:
    return character.isascii() and (character.isalnum() or character == "_")


def _last_object(text: str) -> dict[str, Any]:
    """The last JSON object of a text, tried from each brace that may open it."""
    decoder, starts = json.JSONDecoder(), [match.start() for match in re.finditer(r"\{", text)][-_MOST_BRACES:]
    best: dict[str, Any] | None = None
    end = -1
    for start in starts:
        if start < end:
            continue  # inside the object before
        try:
            best, end = decoder.raw_decode(text, start)
        except (json.JSONDecodeError, RecursionError):
            continue
    if not isinstance(best, dict):
        raise ActionError("The answer holds no JSON object.")
    return best
