"""Both sides of an environment in another process or on another machine: who answers requests, and who sends them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from rl_vlm.child import Answer
from rl_vlm.envs import wire
from rl_vlm.envs.base import Info, StepResult, VisionEnv
from rl_vlm.envs.errors import EnvCrashError, EnvError, check_metrics, check_reset, check_step
from rl_vlm.envs.registry import make
from rl_vlm.frames import Frame
from rl_vlm.types import Observation, UserInputError

MAX_MESSAGE = 500  # characters of an exception's text that are sent
_KINDS: dict[str, type[Exception]] = {"input": UserInputError, "env": EnvError}


class EnvWorker:
    """Answers requests, one at a time: `make`, then `num_items`, `reset`, `step`, and `close`.

    build: makes the environment at the request `make`; by default it is made as the request says.
    """

    def __init__(self, build: Callable[[], VisionEnv] | None = None) -> None:
        self._build = build
        self._env: VisionEnv | None = None

    def answer(self, request: dict[str, Any]) -> Frame:
        """The reply to one request; whatever the environment raises becomes an error reply."""
        try:
            return self._carry_out(request)
        except UserInputError as error:
            return {"kind": "input", "error": short_line(error)}, []
        except EnvError as error:
            return {"kind": "env", "error": short_line(error)}, []
        except Exception as error:
            return {"kind": "env", "error": f"{type(error).__name__}: {short_line(error)}"}, []

    def _carry_out(self, request: dict[str, Any]) -> Frame:
        op = request["op"]
        if op == "make":
            self._env = self._build() if self._build else make(request["env_id"], **request["kwargs"])
            return {"metrics": check_metrics(self._env.metrics)}, []
        if self._env is None:
            raise EnvError("no environment was made")
        if op == "num_items":
            return {"value": self._env.num_items(request["split"])}, []
        if op == "reset":
            observation, info = check_reset(self._env.reset(seed=request["seed"], options=request["options"]))
            messages, blobs = wire.pack_observation(observation)
            return {"messages": messages, "info": info}, blobs
        if op == "step":
            observation, reward, terminated, truncated, info = check_step(self._env.step(request["action"]))
            messages, blobs = wire.pack_observation(observation)
            flags = {"reward": reward, "terminated": terminated, "truncated": truncated, "info": info}
            return {"messages": messages, **flags}, blobs
        if op == "close":
            self._env.close()
            return {}, []
        raise EnvError(f"unknown request {op!r}")


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
    def _is_open(self) -> bool:
        """Whether there is one."""

    @abstractmethod
    def _ask(self, request: dict[str, Any]) -> Frame:
        """The reply to a request. Raises EnvLostError where the other side has lost the environment without a trace."""

    @abstractmethod
    def _observation(self, reply: dict[str, Any], blobs: list[bytes]) -> Observation:
        """The observation in a reply."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """See VisionEnv. Where the environment is lost, another one is made."""
        super().reset(seed=seed)
        request = {"op": "reset", "seed": seed, "options": options}
        if not self._is_open():
            self._open()
        try:
            reply, blobs = self._ask(request)
        except EnvLostError:
            self._open()
            reply, blobs = self._ask(request)
        return check_reset((self._observation(reply, blobs), reply.get("info")))

    def step(self, action: str) -> StepResult:
        """See VisionEnv."""
        reply, blobs = self._ask({"op": "step", "action": action})
        flags = (reply.get("reward"), reply.get("terminated"), reply.get("truncated"), reply.get("info"))
        return check_step((self._observation(reply, blobs), *flags))


class EnvLostError(EnvCrashError):
    """The other side does not know the environment any more."""


def raise_error(reply: dict[str, Any], what: str) -> None:
    """Raise the error that a reply brings, if it brings one; `what` is put in front of the environment's own."""
    if "error" in reply:
        kind = _KINDS.get(reply.get("kind", ""), EnvError)
        raise kind(str(reply["error"]) if kind is UserInputError else f"{what}: {reply['error']}")


def short_line(error: Exception) -> str:
    """An exception's message as one bounded line."""
    return " ".join(str(error).split())[:MAX_MESSAGE] or type(error).__name__
