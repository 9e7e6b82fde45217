"""Play the environment of an OpenEnv server: `openenv:http://host:port`.

The server's WebSocket `/ws` holds a session with an environment of its own; its `/schema` says what an action is. The
messages are {"type": "reset" | "step", "data"} and their answers {"type", "data": {"observation", "reward", "done"}}.
"""

from __future__ import annotations

import json
import time
from typing import Any, Literal

import httpx

from rl_vlm.envs.adapters.address import TOKEN_VARIABLE, base_url, check_seconds, is_loopback, token_header
from rl_vlm.envs.adapters.openenv_actions import ActionError, ActionForm
from rl_vlm.envs.adapters.openenv_observations import parts_of
from rl_vlm.envs.base import Count, EpisodeEnv, Info, Item, Reply
from rl_vlm.envs.errors import EnvCrashError, EnvError, EnvTimeoutError, as_reward
from rl_vlm.envs.images import one_line
from rl_vlm.envs.wire import check_plain
from rl_vlm.types import Observation, UserInputError

MAX_MESSAGE = 32 * 2**20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


class OpenEnv(EpisodeEnv):
    """A VisionEnv behind an OpenEnv server.

    address: "http://host:port" or "host:port". prompt: what stands before the first observation; by default how to answer.
    action_field: the field of the action that the policy writes, where the action has several. reset: further arguments
    of the server's `reset`. max_turns: turns after which an episode is truncated. num_train, num_test: how many seeds each
    split has. timeout_s: deadline of a call; retry_s: how long a server that cannot be reached, or is full, is tried again.
    token_variable: the environment variable with the token that is sent.

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
        timeout_s: float = 60.0,
        retry_s: float = 30.0,
        token_variable: str = TOKEN_VARIABLE,
    ) -> None:
        self.name = f"openenv:{address}"
        super().__init__(num_train=num_train, num_test=num_test, max_turns=max_turns)
        check_seconds(timeout_s=timeout_s, retry_s=retry_s)
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

        def ask() -> dict[str, Any]:
            reply = httpx.get(
                f"{self._url}/schema",
                headers=self._headers,
                timeout=self._timeout_s,
                trust_env=not is_loopback(self._url),
            )
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
                raise UserInputError(
                    f"{self._url}/schema does not describe an action: it is no OpenEnv server."
                ) from error

        return dict(self._retried(ask, (httpx.TransportError,)))

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
            proxy: Literal[True] | None = None if is_loopback(self._url) else True
            self._socket = connect(
                url,
                additional_headers=self._headers,
                open_timeout=min(10.0, self._timeout_s),
                max_size=MAX_MESSAGE,
                proxy=proxy,
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

    def _retried(self, call: Any, errors: tuple[type[Exception], ...]) -> Any:
        """The result of `call`, which is tried again after `errors` while time is left."""
        started, pause = time.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                return call()
            except errors as error:
                if time.monotonic() - started + pause > self._retry_s:
                    raise EnvCrashError(
                        f"{self._url} could not be reached for {self._retry_s:g} s ({type(error).__name__}: {one_line(error)})."
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def close(self) -> None:
        """End the session."""
        socket, self._socket = self._socket, None
        if socket is not None:
            try:
                socket.send(json.dumps({"type": "close"}))
                socket.close()
            except Exception:  # it is gone already; the library raises many kinds
                pass
