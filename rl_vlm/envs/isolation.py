"""Run an environment in a child process that can be killed: `ProcessEnv("my/env.py", {"turns": 3})`.

An environment is foreign code: it may hang, leak, or take its process down. Every call has a deadline, after which the
child and all that it started are killed. It protects against accidents, not against malice: the child runs with the
user's own rights. Variables with tokens and keys are withheld, unless the arguments or
RL_VLM_ENV_PASS ("HF_TOKEN,OPENAI_API_KEY") name them.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rl_vlm.child import STARTUP_S, Answer, Child, ChildStartError
from rl_vlm.envs.address import TOKEN_VARIABLE
from rl_vlm.envs.base import Info, StepResult, VisionEnv
from rl_vlm.envs.errors import (
    EnvCrashError,
    EnvError,
    EnvTimeoutError,
    check_metrics,
    check_reset,
    check_size,
    check_step,
    describe_error,
)
from rl_vlm.envs.foreign import split_scheme
from rl_vlm.envs.registry import make, portable_id
from rl_vlm.frames import Frame, FrameError, PeerGoneError
from rl_vlm.types import EncodedImage, Message, Observation, Part, RLVLMError, Split, UserInputError, as_encoded

PASS_VARIABLE = "RL_VLM_ENV_PASS"  # names of variables, although they hold secrets, that environments may see
_CLOSE_S = 2.0
MAX_SIDE = 2**16  # pixels


def check_plain(env_id: str, arguments: Mapping[str, Any]) -> None:
    """Raise UserInputError for an argument that JSON cannot carry to another process."""
    for name, value in arguments.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise UserInputError(
                f"{env_id}: env.kwargs.{name} must be plain values to reach another process ({error}): quote dates, "
                "and write sets as lists."
            ) from error


def pack_observation(observation: Observation) -> Frame:
    """An observation as JSON and the PNG bytes of its images."""
    blobs: list[bytes] = []

    def packed(part: Part) -> Any:
        if isinstance(part, str):
            return part
        image = as_encoded(part)
        blobs.append(image.png)
        return {"width": image.width, "height": image.height}

    def listed(messages: Sequence[Message]) -> list[dict[str, Any]]:
        return [{"role": one.role, "parts": [packed(part) for part in one.parts]} for one in messages]

    reply = {"messages": listed(observation.messages)}
    if observation.context is not None:
        reply["context"] = listed(observation.context)
    return reply, blobs


def unpack_observation(
    reply: Mapping[str, Any], blobs: list[bytes], read: Callable[[bytes], EncodedImage] | None = None
) -> Observation:
    """The inverse of `pack_observation`; FrameError if the two do not fit together.

    read: makes an image of bytes that are not trusted. Without it the images are taken as they are.
    """
    left = iter(blobs)

    def unpacked(part: Any) -> Part:
        if isinstance(part, str):
            return part
        png, width, height = next(left), part["width"], part["height"]
        if read is not None:
            return read(png)
        if not all(type(side) is int and 1 <= side <= MAX_SIDE for side in (width, height)):
            raise TypeError(f"an image of {str(width)[:20]} x {str(height)[:20]} pixels")
        return EncodedImage(hashlib.sha256(png).hexdigest(), png, width, height)

    def listed(messages: Any) -> tuple[Message, ...]:
        return tuple(Message(one["role"], tuple(map(unpacked, one["parts"]))) for one in messages)

    try:
        return Observation(listed(reply["messages"]), listed(reply["context"]) if "context" in reply else None)
    except (TypeError, KeyError, StopIteration, RuntimeError, AttributeError) as error:
        raise FrameError(f"an observation does not fit its images ({error})") from error


class EnvWorker:
    """Answers requests, one at a time: `make`, then `num_items`, `reset`, `step`, and `close`.

    build: makes the environment; by default it is made as the request says.
    """

    def __init__(self, build: Callable[[], VisionEnv] | None = None) -> None:
        self._build = build
        self._env: VisionEnv | None = None

    def answer(self, request: dict[str, Any]) -> Frame:
        """The reply to one request; whatever the environment raises becomes an error reply."""
        try:
            return self._carry_out(request)
        except BaseException as error:  # user code may even exit
            kind = "input" if isinstance(error, UserInputError) else "env"
            return {"kind": kind, "error": describe_error(error)}, []

    def _carry_out(self, request: dict[str, Any]) -> Frame:
        op = request["op"]
        if op == "make":
            self._env = self._build() if self._build else make(request["env_id"], **request["kwargs"])
            return {"metrics": check_metrics(self._env.metrics)}, []
        assert self._env is not None  # `make` came first
        if op == "num_items":
            return {"value": check_size(self._env.num_items(request["split"]))}, []
        if op == "close":
            self._env.close()
            return {}, []
        if op == "reset":
            observation, info = check_reset(self._env.reset(seed=request["seed"], options=request["options"]))
            reply: dict[str, Any] = {"info": info}
        else:
            observation, reward, terminated, truncated, info = check_step(self._env.step(request["action"]))
            reply = {"reward": reward, "terminated": terminated, "truncated": truncated, "info": info}
        packed, blobs = pack_observation(observation)
        return {**packed, **reply}, blobs


def prepare() -> Answer:
    """In a child process: what answers requests."""
    worker = EnvWorker()
    return lambda request, _: worker.answer(request)


class EnvClient(VisionEnv):
    """An environment elsewhere: its calls are frames that an `EnvWorker` answers. Subclasses carry the frames."""

    @abstractmethod
    def _open(self) -> None:
        """Have an environment made."""

    @abstractmethod
    def _ask(self, request: dict[str, Any]) -> Frame:
        """The reply to a request. Raises EnvLostError where there is no environment, or none any more."""

    @abstractmethod
    def _observation(self, reply: dict[str, Any], blobs: list[bytes]) -> Observation:
        pass

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Where the environment is lost, another one is made."""
        super().reset(seed=seed)
        request = {"op": "reset", "seed": seed, "options": options}
        try:
            reply, blobs = self._ask(request)
        except EnvLostError:
            self._open()
            reply, blobs = self._ask(request)
        return check_reset((self._observation(reply, blobs), reply.get("info")))

    def step(self, action: str) -> StepResult:
        reply, blobs = self._ask({"op": "step", "action": action})
        flags = (reply.get("reward"), reply.get("terminated"), reply.get("truncated"), reply.get("info"))
        return check_step((self._observation(reply, blobs), *flags))


class EnvLostError(EnvCrashError):
    """There is no environment, or the other side does not know it any more.

    Do: nothing: the group is sampled again.
    """


def raise_error(reply: dict[str, Any], what: str) -> None:
    """Raise the error that a reply brings, if any; `what` is put in front of the environment's own."""
    if "error" in reply:
        if reply.get("kind") == "input":
            raise UserInputError(str(reply["error"]))
        raise EnvError(f"{what}: {reply['error']}")


class ProcessEnv(EnvClient):
    """A VisionEnv in a child process.

    Raises EnvTimeoutError when a call takes longer than its deadline (the child is killed), EnvCrashError when the
    child died, EnvError for an exception in the child or an invalid result, and UserInputError for wrong arguments.
    After a timeout or crash, `reset` starts a fresh child. `kwargs` and `info` are sent as JSON: tuples become lists.
    """

    def __init__(self, env_id: str, kwargs: dict[str, Any] | None = None, step_timeout_s: float = 60.0) -> None:
        self._env_id, self._kwargs = env_id, kwargs or {}
        self._make = {"op": "make", "env_id": portable_id(env_id), "kwargs": self._kwargs}
        check_plain(env_id, self._kwargs)
        self._step_timeout_s = step_timeout_s
        self._child: Child | None = None
        self._open()

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    def num_items(self, split: Split) -> int | None:
        return self._ask({"op": "num_items", "split": split}, STARTUP_S)[0]["value"]  # type: ignore[no-any-return]

    def close(self) -> None:
        with suppress(RLVLMError):  # it is killed in any case
            self.ask_to_close()
        self._kill()

    def ask_to_close(self) -> None:
        """Close the environment in its process, which stays. Raises what `close` raises there as EnvError."""
        self._ask({"op": "close"}, _CLOSE_S)

    def _open(self) -> None:
        self._child = Child("rl_vlm.envs.isolation:prepare", whole=True, keep=self._wanted_secrets(), quiet=False)
        try:
            self._child.wait_ready()
        except ChildStartError as error:
            self._kill()
            raise EnvCrashError(f"{self._env_id}: {error}") from error
        reply, _ = self._ask(self._make, STARTUP_S)
        self.metrics = check_metrics(reply["metrics"])  # type: ignore[misc]  # those of this child's environment

    def _wanted_secrets(self) -> set[str]:
        """The variables with secrets that the arguments or RL_VLM_ENV_PASS name: the environment may see them."""
        wanted = set(os.environ.get(PASS_VARIABLE, "").replace(",", " ").split())
        wanted |= {value for value in self._kwargs.values() if isinstance(value, str)}
        if "://" in self._env_id or split_scheme(self._env_id) is not None:
            wanted.add(TOKEN_VARIABLE)  # it runs elsewhere, and this is the token of that place
        return wanted

    def _ask(self, request: dict[str, Any], timeout_s: float | None = None) -> Frame:
        timeout_s = timeout_s or self._step_timeout_s
        if self._child is None:
            raise EnvLostError(f"{self._env_id}: the process is gone; call reset() for a new one.")
        what = f"{self._env_id}: {request['op']}"
        try:
            reply, blobs = self._child.ask(request, timeout_s=timeout_s)
        except TimeoutError as error:
            self._kill()
            raise EnvTimeoutError(f"{what} took longer than {timeout_s:g} s; the process was killed.") from error
        except PeerGoneError as error:
            raise EnvCrashError(f"{what}: the process died ({self._kill()}).") from error
        except FrameError as error:
            self._kill()
            raise EnvCrashError(f"{what}: the process sent an invalid message ({error}) and was killed.") from error
        if "error" in reply and request["op"] == "make":
            self._kill()
        raise_error(reply, what)
        return reply, blobs

    def _observation(self, reply: dict[str, Any], blobs: list[bytes]) -> Observation:
        return unpack_observation(reply, blobs)

    def _kill(self) -> str:
        """Kill the child; how it ended, in words."""
        child, self._child = self._child, None
        return child.kill() if child is not None else "it was gone already"
