"""Carries out requests to one environment, for a process or a machine that cannot call it itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl_vlm.envs import wire
from rl_vlm.envs.base import VisionEnv
from rl_vlm.envs.errors import EnvError, check_metrics, check_reset, check_step
from rl_vlm.envs.registry import make
from rl_vlm.types import UserInputError

MAX_MESSAGE = 500  # characters of an exception's text that are sent
Reply = tuple[dict[str, Any], list[bytes]]
_KINDS: dict[str, type[Exception]] = {"input": UserInputError, "env": EnvError}


class EnvWorker:
    """Answers requests, one at a time: `make`, then `num_items`, `reset`, `step`, and `close`.

    build: makes the environment at the request `make`; by default it is made as the request says.
    """

    def __init__(self, build: Callable[[], VisionEnv] | None = None) -> None:
        self._build = build
        self._env: VisionEnv | None = None

    def answer(self, request: dict[str, Any]) -> Reply:
        """The reply to one request; whatever the environment raises becomes an error reply."""
        try:
            return self._carry_out(request)
        except UserInputError as error:
            return {"kind": "input", "error": short_line(error)}, []
        except EnvError as error:
            return {"kind": "env", "error": short_line(error)}, []
        except Exception as error:
            return {"kind": "env", "error": f"{type(error).__name__}: {short_line(error)}"}, []

    def _carry_out(self, request: dict[str, Any]) -> Reply:
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


def raise_error(reply: dict[str, Any], what: str) -> None:
    """Raise the error that a reply brings, if it brings one; `what` is put in front of the environment's own."""
    if "error" in reply:
        kind = _KINDS.get(reply.get("kind", ""), EnvError)
        raise kind(str(reply["error"]) if kind is UserInputError else f"{what}: {reply['error']}")


def short_line(error: Exception) -> str:
    """An exception's message as one bounded line."""
    return " ".join(str(error).split())[:MAX_MESSAGE] or type(error).__name__
