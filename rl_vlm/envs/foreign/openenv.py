"""Play the environment of an OpenEnv server: `openenv:http://host:port`.

The server's WebSocket `/ws` holds a session with an environment of its own; its `/schema` says what an action is. The
messages are {"type": "reset" | "step", "data"} and their answers {"type", "data": {"observation", "reward", "done"}}.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import numpy as np
from PIL import Image

from rl_vlm.envs.address import TOKEN_VARIABLE, base_url, is_loopback, token_header, wrong_token
from rl_vlm.envs.base import Count, EpisodeEnv, Info, Item, Reply, Seconds
from rl_vlm.envs.errors import EnvCrashError, EnvError, EnvTimeoutError, as_reward
from rl_vlm.envs.foreign.common import import_extra, with_class
from rl_vlm.envs.images import as_image
from rl_vlm.envs.isolation import check_plain
from rl_vlm.safe_text import without_thoughts
from rl_vlm.types import Observation, Part, RLVLMError, UserInputError
from rl_vlm.waiting import retried

MAX_MESSAGE = 32 * 2**20
MAX_SHOWN = 20_000  # characters of an observation
MAX_IMAGES = 16
_MAGIC = ("data:image/", "iVBORw0KGgo", "/9j/", "UklGR")  # a data URI, or PNG, JPEG and WebP in base64
MAX_CHARS = 65_536  # characters of an action
_NUMBER = re.compile(r"-?\d{1,40}(?:\.\d{1,40})?")
# Behind these no choice begins: a minus sign changes a number, the hyphen of "action-2" does not.
_NO_WORD_BEGINS = re.compile(r"[a-z0-9]_*$|\.$|(?:^|[^a-z])-$")


class OpenEnv(EpisodeEnv):
    """A VisionEnv behind an OpenEnv server.

    prompt: what stands before the first observation; by default how to answer. action_field: the field that the policy
    writes, if the action has several. reset: further arguments of the server's `reset`. num_train, num_test: how many
    seeds each split has. timeout_s, retry_s, token_variable: as of `RemoteEnv`.

    A text that is no action, or that the server's schema rejects, is answered with the reason and costs a turn.
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
        self._client, self._errors = (
            import_extra(f"websockets.{part}", "openenv") for part in ("sync.client", "exceptions")
        )
        self._url, self._timeout_s, self._retry_s = base_url(address), timeout_s, retry_s
        self._headers = token_header(token_variable)
        self._socket: Any = None
        self._form = ActionForm(self._action_schema(), action_field)
        self._prompt = self._form.instructions if prompt is None else prompt
        self._reset_data = dict(reset or {})

    def open(self, item: Item) -> tuple[Observation, Info]:
        number, self._invalid = self.number(item), 0
        if self._socket is None or self._socket.state.name != "OPEN":
            self.close()
            self._retried(self._connect, (OSError, self._errors.WebSocketException, EnvError))
        result = self._call("reset", {"seed": number, **self._reset_data})
        images, text = parts_of(result.get("observation"))
        opening = "\n\n".join(filter(None, (self._prompt, text)))
        return Observation.user(*images, opening), {"seed": number}

    def reply(self, text: str) -> Reply:
        try:
            result = self._call("step", self._form.parse(text))
        except ActionError as error:
            self._invalid += 1
            result = {"observation": str(error)}
        reward = 0.0 if result.get("reward") is None else as_reward(result["reward"], "the server")
        images, shown = parts_of(result.get("observation"))
        message = None if result.get("done") else Observation.user(*images, shown)
        return Reply(reward, message, {"turn": self.turn, "invalid_actions": self._invalid})

    def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            with suppress(Exception):  # it is gone already; the library raises many kinds
                socket.send(json.dumps({"type": "close"}))
                socket.close()

    def _action_schema(self) -> dict[str, Any]:
        """The JSON schema of an action. Raises UserInputError if there is no OpenEnv server."""
        client = httpx.Client(headers=self._headers, timeout=self._timeout_s, trust_env=not is_loopback(self._url))
        with client:
            reply = self._retried(lambda: client.get(f"{self._url}/schema"), (httpx.TransportError,))
        if reply.status_code in (401, 403):
            raise wrong_token(self._url)
        try:
            return dict(reply.raise_for_status().json()["action"])
        except (httpx.HTTPStatusError, ValueError, TypeError, KeyError) as error:
            raise UserInputError(f"{self._url}/schema does not describe an action: it is no OpenEnv server.") from error

    def _connect(self) -> None:
        """Open a session; it raises where a server is starting or full."""
        self._socket = self._client.connect(
            self._url.replace("http", "ws", 1) + "/ws",
            additional_headers=self._headers,
            max_size=MAX_MESSAGE,
            proxy=None if is_loopback(self._url) else True,
            close_timeout=2.0,
        )
        self._call("state", {})  # a server that is full says so only after it has accepted

    def _call(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """The `data` of the answer. ActionError where the server's schema rejects the action."""
        if self._socket is None:
            raise EnvCrashError(f"{self._url}: the session is gone; call reset() for a new one.")
        try:
            with suppress(self._errors.ConnectionClosed):  # why it did can still be read
                self._socket.send(json.dumps({"type": kind, **({"data": data} if data else {})}))
            reply = json.loads(self._socket.recv(timeout=self._timeout_s))
            content = dict(reply["data"])
        except TimeoutError as error:
            self.close()
            raise EnvTimeoutError(f"{self._url}: {kind} took longer than {self._timeout_s:g} s.") from error
        except Exception as error:  # the library's own, an OSError, or what is no message of OpenEnv
            self.close()
            raise EnvCrashError(f"{self._url}: the session broke at {kind} ({with_class(error)}).") from error
        if reply.get("type") != "error":
            return content
        code, text = content.get("code"), str(content.get("message", ""))[:300]
        if code == "VALIDATION_ERROR" and kind == "step":
            first = next(iter(content.get("errors") or [{}]))
            place = ".".join(map(str, first.get("loc", ())))
            raise ActionError(f"This action is not valid: {place}: {first.get('msg', text)}."[:300])
        if kind != "step":  # the server is full, or cannot make its environment
            self.close()
        raise EnvError(f"{self._url}: {kind}: {text} ({code}).")

    def _retried(self, call: Callable[[], Any], errors: tuple[type[Exception], ...]) -> Any:
        try:
            return retried(call, errors, self._retry_s)
        except errors as error:
            raise EnvCrashError(
                f"{self._url} was not reached for {self._retry_s:g} s ({with_class(error)})."
            ) from error


def parts_of(observation: Any) -> tuple[list[Part], str]:
    """The images of an observation in the order of its fields, and its other fields as text.

    An image is a data URI, base64 of a PNG, JPEG or WebP file, a nested list [H][W][3], or a flat list beside a field
    `<name>_shape`. A single text stays as it is; several fields are lines "name: value".
    """
    fields = observation if isinstance(observation, dict) else {"observation": observation}
    images: list[Part] = []
    lines: dict[str, str] = {}
    for name, value in fields.items():
        if value in (None, "", [], {}) or (name.endswith("_shape") and name.removesuffix("_shape") in fields):
            continue
        if found := _images(value, fields.get(f"{name}_shape")):
            images += found
        else:
            lines[name] = value if isinstance(value, str) else json.dumps(value)
    if len(images) > MAX_IMAGES:
        raise EnvError(f"An observation has {len(images)} images, more than {MAX_IMAGES}.")
    text = "\n".join(lines.values() if len(lines) == 1 else (f"{name}: {one}" for name, one in lines.items()))
    if len(text) > MAX_SHOWN:
        text = f"{text[:MAX_SHOWN]} … ({len(text) - MAX_SHOWN} characters are left out)"
    return images, text


def _images(value: Any, shape: Any) -> list[Part]:
    """The images that a value is; none if it is something else."""
    texts = value if isinstance(value, list) else [value]
    if all(isinstance(one, str) and one.startswith(_MAGIC) for one in texts):
        return [as_image(one if one.startswith("data:") else f"data:;base64,{one}") for one in texts]
    try:
        array = np.asarray(value if isinstance(value, list) else [])
    except ValueError:  # lists of different lengths
        return []
    if isinstance(shape, list) and shape and math.prod(shape) == array.size:
        array = array.reshape(shape)
    coloured = array.ndim == 3 and array.shape[2] in (3, 4) and min(array.shape[:2]) > 3
    pictured = array.dtype.kind == "i" and (coloured or (shape is not None and array.ndim == 2))
    if not pictured or array.min() < 0 or array.max() > 255:
        return []
    return [Image.fromarray(array.astype(np.uint8))]


class ActionError(RLVLMError):
    """The policy's text is no action; the message says why.

    Do: nothing: the policy sees the message.
    """


class ActionForm:
    """How an action is written, by its JSON schema; `field` chooses one of several. Raises UserInputError.

    `kind` is the JSON type of the one field to fill, "enum", or "object" if all are written as JSON.
    """

    def __init__(self, schema: dict[str, Any], field: str | None = None) -> None:
        properties = {name: one for name, one in schema.get("properties", {}).items() if name != "metadata"}
        if field is not None and field not in properties:
            raise UserInputError(f"The action has no field {field!r}: choose one of {', '.join(properties) or 'none'}.")
        required = [name for name in schema.get("required", ()) if name in properties]
        names = [field] if field else required if len(required) == 1 else list(properties)
        only = properties[names[0]] if len(names) == 1 else {}
        self.kind = "enum" if "enum" in only else str(only.get("type"))
        self.choices = (True, False) if self.kind == "boolean" else tuple(only.get("enum", ()))
        hints = {"string": "", "integer": ", a whole number", "number": ", a number", "boolean": ", true or false"}
        hints["enum"] = f", one of {', '.join(map(str, self.choices))}"
        if self.kind in hints:
            self.field = names[0]
            about = f" ({only['description']})" if only.get("description") else ""
            self.instructions = f"Answer with the {self.field}{hints[self.kind]}{about}."
        else:
            self.kind = "object"
            shape = {name: one.get("description") or one.get("type", "any") for name, one in properties.items()}
            self.instructions = f"Answer with a JSON object: {json.dumps(shape)}."

    def parse(self, text: str) -> dict[str, Any]:
        """The action; thoughts do not count. Raises ActionError."""
        if len(text) > MAX_CHARS:
            raise ActionError(f"An action may have {MAX_CHARS} characters, not {len(text)}.")
        spoken = without_thoughts(text)
        if self.kind == "object":
            try:
                return dict(json.loads(spoken[spoken.find("{") : spoken.rfind("}") + 1]))
            except (ValueError, TypeError, RecursionError) as error:
                raise ActionError(f"The answer is no JSON object. {self.instructions}") from error
        if self.kind == "string":
            return {self.field: spoken}
        if self.kind in ("integer", "number"):
            number = (_NUMBER.findall(spoken) or [""])[-1]
            if not number:
                raise ActionError(f"No number was found. {self.instructions}")
            whole = int(number) if "." not in number else round(float(number))
            return {self.field: whole if self.kind == "integer" else float(number)}
        # The word that the text ends with; of "up" and "pick up" the longer one.
        said = spoken.lower().rstrip(" \n.!。\"'`*_")
        for choice in sorted(self.choices, key=lambda one: -len(str(one))):
            before, word, _ = said.rpartition(str(choice).lower())
            if word and said.endswith(word) and not (word[0].isalnum() and _NO_WORD_BEGINS.search(before)):
                return {self.field: choice}
        raise ActionError(f"The answer ends with none of the choices. {self.instructions}")
