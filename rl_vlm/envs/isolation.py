"""Run an environment in a child process that can be killed: `ProcessEnv("my/env.py", {"turns": 3})`.

An environment is foreign code: it may hang, leak, or take its process down. Every call has a deadline, after which the child and all
that it started are killed. It protects against accidents, not against malice: the child runs with the user's own rights. Variables
that hold tokens and keys are not handed on, except those that the arguments or RL_VLM_ENV_PASS ("HF_TOKEN,OPENAI_API_KEY") name.
"""

from __future__ import annotations

import os
from typing import Any

from rl_vlm.child import Child, ChildStartError
from rl_vlm.envs import wire
from rl_vlm.envs.adapters.address import TOKEN_VARIABLE
from rl_vlm.envs.adapters.interfaces import split_scheme
from rl_vlm.envs.apart import EnvClient, raise_error
from rl_vlm.envs.errors import EnvCrashError, EnvError, EnvTimeoutError, check_metrics
from rl_vlm.envs.registry import portable_id
from rl_vlm.frames import Frame, FrameError, PeerGoneError
from rl_vlm.types import Observation, Split, UserInputError

PASS_VARIABLE = "RL_VLM_ENV_PASS"  # names of variables, although they hold secrets, that environments may see
_CLOSE_S = 2.0


class ProcessEnv(EnvClient):
    """A VisionEnv in a child process.

    Raises EnvTimeoutError when a call takes longer than its deadline (the child is killed), EnvCrashError when the
    child died, EnvError with the one-line message of an exception in the child or for an invalid result, and
    UserInputError for wrong arguments. After a timeout or crash, `reset` starts a fresh child. `kwargs` and `info`
    are sent as JSON: tuples become lists, and values that JSON does not know their text.
    """

    def __init__(
        self,
        env_id: str,
        kwargs: dict[str, Any] | None = None,
        step_timeout_s: float = 60.0,
        start_timeout_s: float = 120.0,
    ) -> None:
        super().__init__()
        if not step_timeout_s > 0 or not start_timeout_s > 0:
            raise UserInputError(f"Timeouts must be positive, not {step_timeout_s} s and {start_timeout_s} s.")
        self._env_id = env_id
        self._kwargs = kwargs or {}
        self._make = {"op": "make", "env_id": portable_id(env_id), "kwargs": self._kwargs}
        wire.check_plain(env_id, self._kwargs)
        self._step_timeout_s = step_timeout_s
        self._start_timeout_s = start_timeout_s
        self._child: Child | None = None
        self._open()

    @property
    def pid(self) -> int | None:
        """The child's process id; None when there is no child."""
        return self._child.pid if self._child else None

    def num_items(self, split: Split) -> int | None:
        """See VisionEnv."""
        return self._call({"op": "num_items", "split": split}, self._start_timeout_s)[0]["value"]  # type: ignore[no-any-return]

    def close(self) -> None:
        """Let the child close its environment, briefly, and end it."""
        if self._child is not None:
            try:
                self._child.ask({"op": "close"}, timeout_s=_CLOSE_S)
            except (TimeoutError, PeerGoneError, FrameError):
                pass  # it is killed below in any case
        self._kill()

    def _open(self) -> None:
        self._child = Child("rl_vlm.envs.apart:prepare", whole=True, keep=self._wanted_secrets(), quiet=False)
        try:
            self._child.wait_ready(self._start_timeout_s)
        except ChildStartError as error:
            self._kill()
            raise EnvCrashError(f"{self._env_id}: {error}") from error
        reply, _ = self._call(self._make, self._start_timeout_s)
        try:
            self.metrics = check_metrics(reply.get("metrics", {}))  # type: ignore[misc]  # those of this child's environment
        except EnvError as error:
            raise self._protocol_error(error) from error

    def _is_open(self) -> bool:
        return self._child is not None

    def _wanted_secrets(self) -> set[str]:
        """The variables with secrets that the environment needs: those that its arguments or RL_VLM_ENV_PASS name."""
        wanted = set(os.environ.get(PASS_VARIABLE, "").replace(",", " ").split())
        wanted |= {value for value in self._kwargs.values() if isinstance(value, str)}
        if "://" in self._env_id or split_scheme(self._env_id) is not None:
            wanted.add(TOKEN_VARIABLE)  # it runs elsewhere, and this is the token of that place
        return wanted

    def _ask(self, request: dict[str, Any]) -> Frame:
        return self._call(request, self._step_timeout_s)

    def _call(self, request: dict[str, Any], timeout_s: float) -> Frame:
        if self._child is None:
            raise EnvCrashError(f"{self._env_id}: the process is gone; call reset() for a new one.")
        what = f"{self._env_id}: {request['op']}"
        try:
            reply, blobs = self._child.ask(request, timeout_s=timeout_s)
        except TimeoutError as error:
            self._kill()
            raise EnvTimeoutError(f"{what} took longer than {timeout_s:g} s; the process was killed.") from error
        except PeerGoneError as error:
            raise EnvCrashError(f"{what}: the process died ({self._kill()}).") from error
        except FrameError as error:
            raise self._protocol_error(error) from error
        if "error" in reply and request["op"] == "make":
            self._kill()
        raise_error(reply, what)
        return reply, blobs

    def _observation(self, reply: dict[str, Any], blobs: list[bytes]) -> Observation:
        try:
            return wire.unpack_observation(reply.get("messages"), blobs)
        except FrameError as error:
            raise self._protocol_error(error) from error

    def _protocol_error(self, error: FrameError | EnvError) -> EnvCrashError:
        self._kill()
        return EnvCrashError(f"{self._env_id}: the process sent an invalid message ({error}) and was killed.")

    def _kill(self) -> str:
        """Kill the child; how it ended, in words."""
        child, self._child = self._child, None
        return child.kill() if child is not None else "it was gone already"
